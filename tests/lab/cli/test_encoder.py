"""`klformer train --encoder`: a classifier on a pretrained encoder, softmax or converted, as a run like any other."""

import csv
import json
import shutil

import pytest
import torch
from cli_support import fails
from conversion_support import ENCODERS, FAMILIES, make_folder, texts
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import processors
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer

from klformer.conversion.hf.encoder import load_encoder
from klformer.lab.cli.main import main
from klformer.lab.runs.load import load_run
from klformer.lab.training.progress import SilentReporter

FAST = ["--training.max-steps", "4", "--quiet", "--out", "runs"]
TRAIN = ["train", "--task", "csv", "--data.train", "rows.csv", *FAST]


@pytest.fixture
def encoder(home):
    """A BERT whose tokenizer puts [CLS] and [SEP] around a text, and a table with the words that it knows."""
    folder = make_folder(home / "bert", ENCODERS["bert"]())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    pair = "[CLS] $A [SEP] $B [SEP]"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=ends
    )
    tokenizer.save_pretrained(folder)
    with (home / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows([text, ["long", "short"][text.count(" ") < 7]] for text in texts(60))
    (home / "texts.txt").write_text("\n".join(texts()) + "\n")
    return folder


def only_run(home):
    (folder,) = (home / "runs").iterdir()
    return folder


def test_a_run_is_whole_without_the_folder(encoder, home, capsys):
    main([*TRAIN, "--encoder", "bert"])
    run = only_run(home)
    assert run.name == "csv-rows-laptop-softmax-pretrained-seed0"
    shutil.move(encoder, home / "gone")
    loaded = load_run(run, SilentReporter())
    some = texts(3)
    inputs = AutoTokenizer.from_pretrained(home / "gone")(some, padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(home / "gone")(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    got = loaded.model.encoder(inputs["input_ids"], inputs["attention_mask"])
    assert_close(got, (hidden * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)
    (home / "new.csv").write_text("text\n" + "\n".join(some) + "\n")
    capsys.readouterr()
    main(["eval", str(run)])
    assert "accuracy" in capsys.readouterr().out
    main(["predict", str(run), "new.csv", "--out", "answers.csv"])
    rows = list(csv.DictReader((home / "answers.csv").read_text().splitlines()))
    scores = loaded.model(inputs["input_ids"], inputs["attention_mask"].bool()).softmax(-1)
    assert_close(torch.tensor([float(row["p(short)"]) for row in rows]), scores[:, 1], atol=1e-5, rtol=1e-5)
    main(["report", "runs", "--out", "report.html"])
    assert "softmax:pretrained" in (home / "report.html").read_text().replace(" ", "")
    main(["train", "--out", "runs", "--name", run.name, "--resume", "--training.max-steps", "6"])
    assert json.loads((run / "result.json").read_text())["steps"] == 6


def test_a_frozen_encoder_stays_as_it_is_and_another_does_not(encoder, home):
    before = load_encoder(encoder, max_len=512)
    for rate, name in (("0", "pretrained"), ("1e-3", "finetuned")):
        main([*TRAIN, "--encoder", "bert", "--optimiser.encoder-learning-rate", rate])
        run = load_run(home / f"runs/csv-rows-laptop-softmax-{name}-seed0", SilentReporter())
        after = run.model.encoder.model.state_dict()
        moved = max(float((after[key] - before[key]).abs().max()) for key in before)
        # Adam moves by the rate in a step, at most: the warm-up keeps it below.
        assert moved == 0 if rate == "0" else 0 < moved < 4e-3


def test_what_is_kept_of_texts_is_what_the_encoder_gives(encoder, home):
    main([*TRAIN, "--encoder", "bert"])
    model = load_run(only_run(home), SilentReporter()).model
    ids = torch.randint(4, 50, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    first = model(ids, mask)
    assert_close(model(ids, mask), first, atol=0, rtol=0)
    assert_close(model(ids.masked_fill(~mask, 17), mask), first, atol=0, rtol=0)
    vectors = model.encoder(ids, mask.long())
    assert_close(first, model.head(model.norm(vectors)), atol=1e-5, rtol=1e-5)
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    assert not torch.allclose(model(ids, mask), first)


def test_a_converted_encoder_of_sentences(encoder, home):
    make_folder(home / "body", FAMILIES["bert-embeddings"]())
    parts = [Transformer("body", max_seq_length=8), Pooling(32, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save("sentences")
    arguments = ["--attention", "atoms-prf:num_frequencies=8,window=2", "--batch-size", "4", "--steps", "2"]
    main(["convert", "sentences", "--data", "texts.txt", "--out", "linear", *arguments])
    main([*TRAIN, "--encoder", "linear"])
    config = json.loads((only_run(home) / "config.json").read_text())
    assert config["attention"]["options"]["window"] == 2
    assert config["model"]["pooling"] == "cls"
    assert config["data"]["max_len"] == 8
    loaded = load_run(only_run(home), SilentReporter())
    assert int(loaded.examples("test").lengths.max()) <= 8
    assert "klformer" in type(loaded.model.encoder.model).__module__


def test_texts_longer_than_the_encoder_was_made_for(encoder, home):
    long = " ".join(["w9"] * 700)
    with (home / "rows.csv").open("a", newline="") as file:
        csv.writer(file).writerows([[long, "long"]] * 12)
    main([*TRAIN, "--encoder", "bert", "--data.max-len", "600"])
    loaded = load_run(only_run(home), SilentReporter())
    tokens = loaded.examples("train")
    assert int(tokens.lengths.max()) == 600  # with both ends
    table = loaded.model.encoder.model.embeddings.position_embeddings.weight
    assert len(table) == 600
    assert torch.equal(table[512:], table[:88])


def test_pairs_have_the_tokens_of_the_encoder_between_them(encoder, home):
    with (home / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "other", "label"])
        rows.writerows([*pair, "ab"[i % 2]] for i, pair in enumerate(zip(texts(40), texts(40)[::-1], strict=True)))
    main([*TRAIN, "--encoder", "bert", "--data.second-column", "other", "--data.max-len", "9"])
    examples = load_run(only_run(home), SilentReporter()).examples("train")
    row = examples.first[0].tolist()
    assert (row[0], row[-1], row.count(2)) == (1, 2, 2)
    assert len(row) <= 9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--encoder", "none"], "can't read"),
        (["--encoder", "bert", "--attention", "performer"], "leave --attention out"),
        (["--encoder", "bert", "--parallel.sequence", "2"], "does not go with --parallel.sequence"),
        (["--encoder", "gpt2"], "which generates texts: give an encoder"),
        (["--encoder", "bert", "--data.inputs", "floats", "--data.text-column", "label"], "must hold numbers"),
    ],
)
def test_what_does_not_fit_is_refused(encoder, home, arguments, said, capsys):
    make_folder(home / "gpt2", FAMILIES["gpt2"]())
    with pytest.raises(SystemExit):
        main([*TRAIN, *arguments])
    assert said in capsys.readouterr().err
    assert not (home / "runs").exists()


def test_a_task_without_texts_is_refused(encoder, capsys):
    assert "recall reads its inputs otherwise" in fails(
        capsys, 1, "train", "--task", "recall", "--encoder", "bert", *FAST
    )

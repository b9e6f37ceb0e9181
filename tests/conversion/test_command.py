"""`klformer convert` from a folder and texts to a folder with a certificate; it goes on after an interruption."""

import json
import math
import os
import pickle
import re
import signal

import pyarrow
import pyarrow.parquet
import pytest
import torch
from cli_support import fails
from conversion_support import CAUSAL, ENCODERS, VOCABULARY, WORDS, answer, batch, batches, convert, make_folder, texts
from transformers import pipeline

import klformer
from klformer.conversion import fitting
from klformer.conversion.certificate import Certificate
from klformer.conversion.hf import footprint
from klformer.errors import DataError, FileError
from klformer.lab.cli import convert as command_module
from klformer.lab.cli.main import main
from klformer.lab.cli.texts import read_texts
from klformer.lab.runs.conversion import StageProgress


@pytest.fixture
def folder(home):
    (home / "texts.txt").write_text("\n".join(texts()) + "\n")
    return make_folder(home / "bert", ENCODERS["bert"]())


ARGUMENTS = ["--attention", "atoms-prf:num_frequencies=8", "--batch-size", "4", "--steps", "6"]


def test_convert(folder, home, capsys):
    main(
        [
            "convert",
            "bert",
            "--data",
            "texts.txt",
            "--out",
            "linear",
            *ARGUMENTS,
            "--align-steps",
            "2",
            "--finetune-steps",
            "2",
        ]
    )
    said = capsys.readouterr().out
    assert "fit 6/6" in said
    assert "align 2/2" in said
    assert "distil 2/2" in said
    certificate = json.loads((home / "linear/certificate.json").read_text())
    assert {"accuracy", "agreement"} <= set(certificate["linear"])
    assert [layer["num_frequencies"] for layer in certificate["layers"]] == [8, 8]
    page = (home / "linear/certificate.html").read_text()
    assert "<script" not in page
    assert f"{certificate['linear']['accuracy']:.4f}" in page
    assert not (home / "linear/fit.safetensors").exists()
    # The folder is one of transformers: with its tokenizer it does what the model does.
    answers = pipeline("fill-mask", model="linear")("w5 [MASK] w7", top_k=1)
    assert answers[0]["token_str"] in WORDS
    with pytest.raises(SystemExit):
        main(["convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS])
    assert "has a converted model already" in capsys.readouterr().err


def test_the_certificate_says_what_it_is_of(folder, home, capsys):
    main(["convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS])
    said, page = capsys.readouterr(), (home / "linear/certificate.html").read_text()
    assert "Warning" not in said.err
    verdict = next(line for line in said.out.splitlines() if line.startswith("Verdict: "))
    assert "accuracy" in verdict
    notes = json.loads((home / "linear/certificate.json").read_text())["notes"]
    assert "teacher: bert; texts: texts.txt, 4 of them to measure by" in notes
    assert any("times the teacher's time" in note for note in notes)
    for words in (verdict.removeprefix("Verdict: ").partition(" (")[0], "Teacher: bert", "0 is the same"):
        assert words.lower() in page.lower()
    assert "distance: KL" in said.out


def test_verdicts():
    def verdict(**figures):
        teacher = {name: 0.5 for name in figures if name in ("accuracy", "perplexity")}
        rest = {"layers": (), "hybrid": None, "num_held_out": 1, "seconds": {}, "processor_seconds": 0.0}
        return Certificate("Model", teacher=teacher, linear=figures, **rest).verdict()

    assert verdict(accuracy=0.498) == "as good as its teacher here (accuracy 0.498, the teacher's 0.5)"
    assert verdict(perplexity=0.52).startswith("close to its teacher")
    assert verdict(agreement=0.9) == (
        "below its teacher: more steps, frequencies or fine-tuning, or keep_softmax, would help "
        "(90.0% like the teacher's answers)"
    )
    assert verdict(cosine_mean=0.3).startswith("far from its teacher")


def test_a_folder_without_a_tokenizer_is_refused(folder, capsys):
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(SystemExit):
        main(["convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS])
    assert "bert has no tokenizer (" in capsys.readouterr().err


def test_unknown_words_and_another_vocabulary_are_noticed(folder, home, capsys):
    (home / "other.txt").write_text("\n".join(line.replace("w", "v") for line in texts()) + "\n")
    main(["convert", "bert", "--data", "other.txt", "--out", "linear", *ARGUMENTS])
    assert "% of the tokens are [UNK]" in capsys.readouterr().err
    notes = json.loads((home / "linear/certificate.json").read_text())["notes"]
    assert any("% of the tokens are [UNK]: the tokenizer does not know such texts" in note for note in notes)
    for count, message in ((100, "the tokenizer has 50 tokens and the model 100"), (30, "the model has 30 tokens")):
        config = ENCODERS["bert"]().config
        config.vocab_size = count
        make_folder(home / f"bert{count}", type(ENCODERS["bert"]())(config))
        arguments = ["convert", f"bert{count}", "--data", "texts.txt", "--out", f"linear{count}", *ARGUMENTS]
        if count < 50:
            with pytest.raises(SystemExit):
                main(arguments)
        else:
            main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_says_how_to_go_on(folder, home, capsys, monkeypatch, kind):
    command = ["convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS]

    def end(stage, step, steps, error):
        if step == 3:
            os.kill(os.getpid(), kind)

    before = signal.getsignal(kind)
    with monkeypatch.context() as patched:
        patched.setattr(command_module, "StageProgress", lambda: end)
        with pytest.raises(SystemExit) as stopped:
            main(command)
    assert stopped.value.code == 130
    assert signal.getsignal(kind) is before
    message = f"klformer: interrupted by {kind.name}: the same command goes on after step 0 of fit"
    assert message in capsys.readouterr().err
    main(command)
    assert "going on after step 0 of fit" in capsys.readouterr().out


def test_progress_says_how_long_it_takes(capsys):
    shown = StageProgress(seconds_between=0.0)
    for step in range(4):
        shown("fit", step, 3, 0.5)
    for step in (1, 2, 1):  # one model after the other
        shown("measure", step, 2, math.nan)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["fit 0/3", "fit 1/3", "fit 2/3", "fit 3/3"] + [
        f"measure {step}/2" for step in (1, 2, 1)
    ]
    assert lines[0] == "fit 0/3  error 0.5"
    assert lines[1].endswith(" min left")
    assert lines[4] == lines[6] == "measure 1/2"


def test_longer_than_the_teacher(home):
    (home / "texts.txt").write_text("\n".join(texts()) + "\n")
    config = ENCODERS["bert"]().config
    config.max_position_embeddings = 16
    make_folder(home / "bert", type(ENCODERS["bert"]())(config))
    main(["convert", "bert", "--data", "texts.txt", "--out", "long", *ARGUMENTS, "--max-positions", "40"])
    model = klformer.load_converted("long")
    long = batch("bert", length=40)
    assert answer(model, long).shape == (3, 40, VOCABULARY)
    table = model.bert.embeddings.position_embeddings.weight
    assert torch.equal(table[16:32], table[:16])


@pytest.mark.parametrize("extension", ["repeat", "interpolate"])
@pytest.mark.parametrize("family", ["roberta", "distilbert", "gpt2", "llama"])
def test_positions(family, extension, tmp_path):
    model = (ENCODERS | CAUSAL)[family]().eval()
    longest = 600 if family != "gpt2" else 1100
    arguments = {"options": {"num_frequencies": 4}, "steps": 0, "max_positions": longest, "extension": extension}
    conversion = convert(model, batches(family), **arguments)
    long = batch(family, rows=2, length=longest)
    expected = answer(conversion.model, long)
    conversion.save(tmp_path)
    assert torch.equal(answer(klformer.load_converted(tmp_path), long), expected)
    assert (family in ("llama",)) == torch.equal(
        torch.tensor([len(p) for n, p in model.named_parameters()]),
        torch.tensor([len(p) for n, p in conversion.model.named_parameters() if ".klformer." not in n]),
    )


def test_goes_on_bit_for_bit(tmp_path, monkeypatch):
    model, data = ENCODERS["bert"]().eval(), batches("bert", 12)
    monkeypatch.setattr(fitting, "MIN_STEPS_BETWEEN", 2)
    arguments = {"options": {"num_frequencies": 8}, "steps": 9}
    expected = convert(model, data, **arguments)
    state = tmp_path / "fit.safetensors"

    def interrupt(stage, step, steps, error):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, data, **arguments, state_file=state, progress=interrupt)
    assert state.exists()
    with pytest.raises(FileError, match=r"with other settings \(steps\)"):
        convert(model, data, **{**arguments, "steps": 10}, state_file=state)
    seen = []
    again = convert(model, data, **arguments, state_file=state, progress=lambda *said: seen.append(said[:2]))
    # The state of step 6 was there when it was told.
    assert [step for stage, step in seen if stage == "fit"] == [7, 8, 9]
    assert {stage for stage, _ in seen} == {"fit", "measure"}
    assert torch.equal(answer(again.model, data[0]), answer(expected.model, data[0]))
    assert not state.exists()
    state.write_bytes(b"nothing")
    with pytest.raises(FileError, match="remove it to begin again"):
        convert(model, data, **arguments, state_file=state)


@pytest.mark.parametrize(("keep_softmax", "stage"), [(0, "align"), (1, "distil")])
def test_fine_tuning_goes_on_bit_for_bit(tmp_path, keep_softmax, stage):
    model, data = ENCODERS["bert"]().eval(), batches("bert", 12)
    arguments = {
        "options": {"num_frequencies": "auto"},
        "steps": 2,
        "align_steps": 6,
        "finetune_steps": 6,
        "error_budget": 5.0,
    }
    arguments["keep_softmax"] = keep_softmax
    expected = convert(model, data, **arguments)
    state = tmp_path / "fit.safetensors"

    def interrupt(now, step, steps, error):
        if (now, step) == (stage, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, data, **arguments, state_file=state, progress=interrupt)
    with pytest.raises(FileError, match=r"with other settings \(finetune_steps\)"):
        convert(model, data, **{**arguments, "finetune_steps": 7}, state_file=state)
    seen = []
    again = convert(model, data, **arguments, state_file=state, progress=lambda *said: seen.append(said[:2]))
    seen = [said for said in seen if said[0] != "measure"]
    assert seen[:2] == [(stage, 5), (stage, 6)]
    assert seen[2:] == ([("distil", step) for step in range(1, 7)] if stage == "align" else [])
    for name, value in expected.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    for part in ("layers", "teacher", "linear", "hybrid"):
        assert getattr(again.certificate, part) == getattr(expected.certificate, part)
    assert again.records == expected.records
    assert any("interrupted" in note for note in again.certificate.notes)
    assert not state.exists()


def test_texts(tmp_path):
    lines = ["one", "two, three"]
    (tmp_path / "a.txt").write_text("one\n\ntwo, three\n")
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"two, three"\n')
    (tmp_path / "a.tsv").write_text("text\tid\none\t1\ntwo, three\t2\n")
    table = pyarrow.table({"text": lines})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.txt", "a.csv", "a.tsv", "a.parquet", "a.arrow"):
        assert list(read_texts(tmp_path / name, "text")) == lines, name
    (tmp_path / "files").mkdir()
    for i, line in enumerate(lines):
        (tmp_path / f"files/{i}.txt").write_text(f"{line}\nand more")
    assert list(read_texts(tmp_path / "files", "text")) == [f"{line}\nand more" for line in lines]
    assert len(list(read_texts(tmp_path, "text"))) == 2 * 5 + 4
    with pytest.raises(
        DataError,
        match=r"a.csv, line 1: has no column 'txt'; its columns are id, text; --column names another",
    ):
        list(read_texts(tmp_path / "a.csv", "txt"))
    with pytest.raises(DataError, match="no such file"):
        list(read_texts(tmp_path / "b", "text"))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad.txt: can't be read"):
        list(read_texts(tmp_path / "bad.txt", "text"))


def test_refusals(folder, home, capsys):
    for arguments, message in (
        (["bert", "--data", "nothing.txt"], "nothing.txt: there is no such file"),
        (["nothing", "--data", "texts.txt"], "can't read nothing/config.json"),
        (["bert", "--data", "texts.txt", "--batch-size", "50"], "three batches of 50 at least, got 60 texts"),
    ):
        with pytest.raises(SystemExit):
            main(["convert", *arguments, "--out", "linear"])
        assert message in capsys.readouterr().err
        assert not (home / "linear").exists()


def test_time_and_memory(folder, home, capsys, monkeypatch):
    monkeypatch.setattr(footprint, "footprint", footprint._measure)  # without a process of its own, for time's sake
    main(["convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS, "--lengths", "64"])
    (row,) = json.loads((home / "linear/certificate.json").read_text())["speed"]
    assert row["tokens"] == 64
    assert min(row["seconds"], row["teacher_seconds"]) > 0
    assert "64 tokens: softmax" in capsys.readouterr().out


def test_lines_end_at_newlines_alone(tmp_path):
    (tmp_path / "texts.txt").write_text("one\u0085still one\ntwo\u2028still two\r\n", encoding="utf-8", newline="")
    assert list(read_texts(tmp_path / "texts.txt", "text")) == ["one\u0085still one", "two\u2028still two"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda content: content[:-100]),
        ("model.safetensors", lambda content: b""),
        ("config.json", lambda content: content.replace(f'"vocab_size": {VOCABULARY}'.encode(), b'"vocab_size": 7')),
        ("config.json", lambda content: b'{"a":' * 100_000),
    ],
)
def test_folders_that_are_damaged_are_refused_in_words(folder, capsys, name, change):
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    error = fails(capsys, 1, "convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS)
    assert re.search(r"klformer: .*bert", error)
    assert "Traceback" not in error


def test_a_pickle_of_something_else_is_no_model(folder, capsys):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    error = fails(capsys, 1, "convert", "bert", "--data", "texts.txt", "--out", "linear", *ARGUMENTS)
    assert "klformer: can't load the model and the tokenizer in bert: " in error


def test_a_tokenizer_of_another_model_is_noticed(folder, home, capsys):
    config = ENCODERS["bert"]().config
    config.vocab_size = 20
    make_folder(home / "small", type(ENCODERS["bert"]())(config))
    error = fails(capsys, 1, "convert", "small", "--data", "texts.txt", "--out", "linear", *ARGUMENTS)
    assert re.search(r"klformer: the tokenizer gives the id [2-4]\d, and the model has 20 tokens", error)

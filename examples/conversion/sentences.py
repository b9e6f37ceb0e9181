"""A sentence encoder, trained here on real pairs, becomes linear.

Results: research/pages/conversion-results.md.

python examples/conversion/sentences.py DATA

DATA holds two folders: `glue_data`, GLUE as its download script lays it out, and `bert-base-uncased-vocab` with
vocab.txt. A small BERT learns from pairs of sentences that mean the same (QQP, MRPC, MNLI, RTE, STS-B): each must find
its partner among those of the batch. What is reported is the rank correlation of cosines with what people say of the
1,500 pairs of STS-B's dev.tsv, which nothing was chosen by. The embedding of a sentence is the mean over its tokens.

With --articles FILE (paragraphs, and titles as " = Title = "), the encoder, which was made for 512 tokens, reads whole
articles of 8,192: its kernels are fitted to articles of up to 1,024 tokens, and embeddings, time and memory of long
ones are set beside those of softmax with the same positions.
"""

import argparse
import copy
import csv
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torchmetrics.functional import spearman_corrcoef
from transformers import BertConfig, BertModel, BertTokenizerFast

import klformer
from klformer.conversion.hf.footprint import footprint
from klformer.conversion.hf.positions import extend_positions

Pair = tuple[str, str]
TEMPERATURE, BATCH_SIZE, MAX_LENGTH = 0.05, 48, 48
LONG, FITTED_LENGTH, LONG_ARTICLES = 8192, 1024, 8
#: Tokens at which time and memory are measured.
LENGTHS = (1024, 2048, 4096, 8192)
#: File, columns of the sentences, and which rows are of sentences that mean the same.
SAME: list[tuple[str, int, int, Callable[[list[str]], bool]]] = [
    ("QQP/train.tsv", 3, 4, lambda row: row[5] == "1"),
    ("MRPC/train.tsv", 3, 4, lambda row: row[0] == "1"),
    ("MNLI/train.tsv", 8, 9, lambda row: row[11] == "entailment"),
    ("RTE/train.tsv", 1, 2, lambda row: row[3] == "entailment"),
    ("STS-B/train.tsv", 7, 8, lambda row: float(row[9]) >= 3.5),
]


def rows(file: Path) -> list[list[str]]:
    with file.open(encoding="utf-8") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]


def pairs_to_learn(folder: Path) -> list[Pair]:
    found = [
        (row[first], row[second])
        for name, first, second, is_same in SAME
        for row in rows(folder / name)
        if is_same(row)
    ]
    random.Random(0).shuffle(found)
    return found


class Encoder:
    """Sentences to the means of a BERT's hidden states."""

    def __init__(self, model: torch.nn.Module, tokenizer: BertTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer

    def inputs(self, sentences: list[str]) -> dict[str, Tensor]:
        return dict(
            self.tokenizer(sentences, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        )

    def __call__(self, sentences: list[str]) -> Tensor:
        inputs = self.inputs(sentences)
        mask = inputs["attention_mask"].unsqueeze(-1)
        return (self.model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def train(encoder: Encoder, pairs: list[Pair], steps: int) -> None:
    optimiser = torch.optim.AdamW(encoder.model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=1e-3, total_steps=steps, pct_start=max(0.1, 2 / steps)
    )
    order = random.Random(1)
    encoder.model.train()
    for step in range(steps):
        some = order.sample(pairs, BATCH_SIZE)
        first, second = (normalize(encoder([pair[side] for pair in some]), dim=-1) for side in (0, 1))
        scores = first @ second.T / TEMPERATURE
        partners = torch.arange(len(some))
        loss = (cross_entropy(scores, partners) + cross_entropy(scores.T, partners)) / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)
    encoder.model.eval()


@torch.no_grad()
def rank_correlation(encoder: Encoder, scored: list[list[str]]) -> float:
    cosines = []
    for start in range(0, len(scored), 100):
        part = scored[start : start + 100]
        cosines.append(cosine_similarity(*(encoder([row[column] for row in part]) for column in (7, 8)), dim=-1))
    return float(spearman_corrcoef(torch.cat(cosines), torch.tensor([float(row[9]) for row in scored])))


def read_articles(file: Path) -> list[str]:
    """All articles of a file, without their titles."""
    articles: list[list[str]] = [[]]
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(" = ") and line.rstrip().endswith(" ="):
            articles.append([])
        else:
            articles[-1].append(line)
    return [text for text in ("\n".join(lines).strip() for lines in articles) if text]


@torch.no_grad()
def embeddings(model: torch.nn.Module, articles: list[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=each).last_hidden_state.mean(1) for each in articles])


def read_whole_articles(encoder: Encoder, articles: list[str], num_frequencies: int, steps: int, out: Path) -> None:
    """Convert the encoder so that it reads long articles, and print how it does beside softmax.

    Embeddings are compared less the mean of the teacher's: what they have in common says nothing.
    """
    tokens = [torch.tensor(encoder.tokenizer(text, truncation=True, max_length=LONG)["input_ids"]) for text in articles]
    long = [each[None] for each in tokens if len(each) == LONG][:LONG_ARTICLES]
    chosen = [each[None, :FITTED_LENGTH] for each in tokens if FITTED_LENGTH <= len(each) < LONG]
    batches = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in chosen]
    teacher = copy.deepcopy(encoder.model)
    extend_positions(teacher, LONG, "repeat")
    teacher.set_attn_implementation("sdpa")
    right = embeddings(teacher, long)
    common = right.mean(0)
    others = [cosine_similarity(right - common, (right - common).roll(i, 0), dim=-1) for i in range(1, len(long))]
    print(json.dumps({"articles": len(long), "tokens": LONG, "cosine_of_different_articles": mean_of(others)}))
    for saving in (teacher, encoder.tokenizer):
        saving.save_pretrained(str(out / "softmax"))
    for name, its_steps in (("performer", 0), ("atoms-prf", steps)):
        options = {"num_frequencies": num_frequencies}
        conversion = klformer.convert(
            encoder.model,
            batches,
            attention=name,
            options=options | {"window": 0},
            config=klformer.ConversionConfig(steps=its_steps, max_positions=LONG),
        )
        ours = embeddings(conversion.model, long)
        row = {"attention": name, **options, "fitted_to": len(batches), "steps": its_steps}
        row |= {"cosine": mean_of([cosine_similarity(ours - common, right - common, dim=-1)])}
        print(json.dumps(row | {"processor_seconds": conversion.certificate.processor_seconds}), flush=True)
    conversion.save(out / "linear", tokenizer=encoder.tokenizer)
    for name in ("softmax", "linear"):
        for length in LENGTHS:
            taken = footprint(out / name, length)
            row = {"attention": name, "tokens": length, "processor_seconds": taken["processor_seconds"]}
            print(json.dumps(row | {"mebibytes": taken["bytes"] / 2**20}), flush=True)


def mean_of(values: list[Tensor]) -> float:
    return float(torch.cat(values).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--train-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--frequencies", type=int, default=64)
    parser.add_argument("--articles", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the two encoders that read long articles")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer = BertTokenizerFast(str(given.data / "bert-base-uncased-vocab" / "vocab.txt"))
    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tokenizer)
    pairs = pairs_to_learn(given.data / "glue_data")
    began = time.process_time()
    train(encoder, pairs, given.train_steps)
    print(f"{len(pairs):,} pairs, {time.process_time() - began:.0f} s of processors")
    scored = [row for row in rows(given.data / "glue_data" / "STS-B" / "dev.tsv") if len(row) == 10]
    print(json.dumps({"attention": "softmax", "rank_correlation": rank_correlation(encoder, scored)}))
    sentences = [sentence for pair in pairs for sentence in pair]
    random.Random(2).shuffle(sentences)
    groups = [sentences[i : i + 32] for i in range(0, 32 * (given.steps + 8), 32)]
    batches = [encoder.inputs(group) for group in groups if len(group) == 32]
    options = {"num_frequencies": given.frequencies}
    contenders = [
        ("performer", options, 0),
        ("performer", {"num_frequencies": 4 * given.frequencies}, 0),
        ("hedgehog", options, given.steps),
        ("atoms-prf", options, given.steps),
    ]
    for name, chosen, steps in contenders:
        conversion = klformer.convert(
            encoder.model, batches, attention=name, options=chosen | {"window": 0}, steps=steps
        )
        figures = conversion.certificate
        row = {"attention": name, **chosen, "steps": steps}
        row |= {"rank_correlation": rank_correlation(Encoder(conversion.model, tokenizer), scored)}
        row |= {"cosine": figures.linear["cosine_mean"], "processor_seconds": figures.processor_seconds}
        print(json.dumps(row), flush=True)
    if given.articles is not None:
        with tempfile.TemporaryDirectory() as folder:
            out = given.out or Path(folder)
            read_whole_articles(encoder, read_articles(given.articles), given.frequencies, given.steps, out)


if __name__ == "__main__":
    main()

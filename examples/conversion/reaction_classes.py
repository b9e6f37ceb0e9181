"""A pooled encoder of reactions, trained here on real pairs, becomes linear.

Results: research/pages/conversion-results.md.

python examples/conversion/reaction_classes.py DATA

DATA holds what `reactions.py` takes. The BERT of reactions learns from pairs of reactions of the same class (valid.tsv
names ten): each must find its partner among those of the batch. The embedding of a reaction is the mean over its
tokens. Then its kernels are learned, nothing else. What is reported is of reactions of test.tsv that nothing was chosen
by: the rank correlation of cosines with whether two are of one class, and how often the nearest other one is.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from reactions import FIRST_TESTED, load_model, load_tokenizer
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import BertModel, PreTrainedTokenizerFast

import klformer

TEMPERATURE, PAIRS, BATCH_SIZE, LEARNING_RATE = 0.1, 16, 24, 1e-4


class Encoder:
    """Reactions to the means of a BERT's hidden states."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer

    def inputs(self, texts: list[str]) -> dict[str, Tensor]:
        given = self.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        return {name: given[name] for name in ("input_ids", "attention_mask")}

    def __call__(self, texts: list[str]) -> Tensor:
        inputs = self.inputs(texts)
        mask = inputs["attention_mask"].unsqueeze(-1)
        return (self.model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def labelled(file: Path) -> list[tuple[str, str]]:
    """Classes and reactions."""
    return [tuple(line.split("\t")[:2]) for line in file.read_text().splitlines()]


def train(encoder: Encoder, rows: list[tuple[str, str]], steps: int) -> None:
    """Pairs of a batch may be of one class: all of the same class are partners."""
    by_class: dict[str, list[str]] = {}
    for name, text in rows:
        by_class.setdefault(name, []).append(text)
    order, names = random.Random(0), sorted(by_class)
    optimiser = torch.optim.AdamW(encoder.model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        chosen = [order.choice(names) for _ in range(PAIRS)]
        pairs = [order.sample(by_class[name], 2) for name in chosen]
        first, second = (normalize(encoder([pair[side] for pair in pairs]), dim=-1) for side in (0, 1))
        same = torch.tensor([[float(a == b) for b in chosen] for a in chosen])
        scores = first @ second.T / TEMPERATURE
        loss = cross_entropy(scores, same / same.sum(1, keepdim=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def figures(encoder: Encoder, rows: list[tuple[str, str]]) -> tuple[Tensor, dict[str, float]]:
    """Embeddings, and how well they tell classes apart."""
    texts = [text for _, text in rows]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]
    found = torch.cat([encoder([texts[i] for i in part]) for part in parts])
    found = found[torch.tensor(order).argsort()]
    cosines = normalize(found, dim=-1) @ normalize(found, dim=-1).T
    classes = torch.tensor([int(name) for name, _ in rows])
    same = classes[:, None] == classes
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    # Spearman's: ranks of two values are as good as the values. Cosines are hardly ever equal.
    ranks = cosines[first, second].argsort().argsort()
    correlation = float(torch.corrcoef(torch.stack([ranks.double(), same[first, second].double()]))[0, 1])
    nearest = cosines.fill_diagonal_(-2).argmax(1)
    return found, {"rank_correlation": correlation, "nearest": float((classes[nearest] == classes).float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--train-steps", type=int, default=80)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--frequencies", type=int, default=128)
    parser.add_argument("--tested", type=int, default=500, help="reactions of test.tsv to report on")
    given = parser.parse_args()
    source = given.data / "rxnfp_bert_fp16"
    tokenizer = load_tokenizer(source)
    body = load_model(source).bert
    assert isinstance(body, BertModel)
    encoder = Encoder(body, tokenizer)
    valid, test = (labelled(given.data / "uspto50k_rxn" / f"{name}.tsv") for name in ("valid", "test"))
    tested = test[FIRST_TESTED : FIRST_TESTED + given.tested]
    print(json.dumps({"attention": "softmax, as it comes"} | figures(encoder, tested)[1]), flush=True)
    train(encoder, valid, given.train_steps)
    right, row = figures(encoder, tested)
    print(json.dumps({"attention": "softmax"} | row), flush=True)
    texts = random.Random(1).sample([text for _, text in valid], 12 * (given.steps + 16))
    batches = [encoder.inputs(texts[i : i + 12]) for i in range(0, len(texts), 12)]
    options = {"num_frequencies": given.frequencies}
    for name, steps in (("performer", 0), ("hedgehog", given.steps), ("atoms-prf", given.steps)):
        conversion = klformer.convert(body, batches, attention=name, options=options | {"window": 0}, steps=steps)
        ours, row = figures(Encoder(conversion.model, tokenizer), tested)
        row |= {"cosine": float(cosine_similarity(ours, right, dim=-1).mean())}
        row |= {"processor_seconds": round(conversion.certificate.processor_seconds)}
        print(json.dumps({"attention": name, **options, "steps": steps} | row), flush=True)


if __name__ == "__main__":
    main()

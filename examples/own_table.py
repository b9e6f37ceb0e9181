"""A csv file in, predictions out: the commands `train` and `predict`, called from Python."""

import csv
import random
import tempfile
from pathlib import Path

from klformer.lab.cli.main import main

GOOD, BAD = ["lovely", "bright", "moving", "funny"], ["dull", "noisy", "stale", "long"]
FILLER = ["the film", "the cast", "a scene", "this story", "the music"]


def sentence(words: list[str]) -> str:
    return " and ".join(f"{random.choice(FILLER)} is {random.choice(words)}" for _ in range(2))


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


random.seed(0)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    kinds = {"good": GOOD, "bad": BAD}
    labelled = [{"text": sentence(words), "label": label} for _ in range(300) for label, words in kinds.items()]
    write_table(folder / "reviews.csv", labelled)
    write_table(folder / "new.csv", [{"text": "the cast is moving"}, {"text": "a scene is dull"}])

    data = f"--task csv --data.train {folder}/reviews.csv --data.tokens.kind wordpiece"
    model = "--model.num-layers 1 --model.model-dim 32 --model.ffn-dim 32 --model.num-heads 2"
    training = "--training.max-steps 80 --training.evaluate-every 40 --optimiser.learning-rate 0.01"
    main(f"train {data} --attention gmm-rks {model} {training} --name reviews --out {folder} --quiet".split())
    main(f"predict {folder}/reviews {folder}/new.csv --out {folder}/predictions.csv --keep text".split())
    print((folder / "predictions.csv").read_text())

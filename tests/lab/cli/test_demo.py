"""The demo of `make run`, in small: rows of everything that it compares, and a figure."""

import json

from klformer.lab.cli.demo import CONTENDERS, demonstrate, what_was_seen
from klformer.lab.training.progress import SilentReporter


def test_the_demo_leaves_rows_and_a_figure(home):
    sizes = {"train_steps": 4, "fit_steps": 2, "num_examples": 512, "long": 256}
    rows = demonstrate(home / "demo", SilentReporter(), **sizes)
    summary = json.loads((home / "demo/summary.json").read_text())
    assert summary.keys() == {"environment", "command", "rows"}
    written = summary["rows"]
    assert [row["attention"] for row in written] == ["softmax", *(label.partition(":")[0] for label, _ in CONTENDERS)]
    assert [row["learned"] for row in written] == [False, *(learned for _, learned in CONTENDERS)]
    assert all(0 <= row["accuracy"] <= 1 and row["seconds"] > 0 and row["long_seconds"] > 0 for row in written)
    assert [row["num_frequencies"] for row in written] == [None, 256, 128, 64, 128]
    assert (home / "demo/kernel.png").read_bytes().startswith(b"\x89PNG")
    assert "learned from the model's own queries and keys" in what_was_seen(rows)

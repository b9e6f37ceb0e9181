"""Tables of the docs on trials, from rows as their commands write them."""

import json

import pytest

from klformer.errors import ArgumentError
from klformer.lab.bench.measure import KEEP_FREED_MEMORY
from klformer.lab.environment import allocator_variables
from research.evidence.pages import render


def table_of(kind, rows, tmp_path):
    """The lines of a table."""
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render(f"<!-- table {kind} data.json -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    return [line for line in made if line.startswith("|")]


def test_projections_of_fastfood(tmp_path):
    times = {
        way: {"median": seconds, "low": 0.0, "high": 1.0} for way, seconds in (("transform", 0.03), ("product", 0.02))
    }
    rows = [{"setting": "fastfood-blocks", "head_dim": 2048, "length": 64, **times}]
    assert table_of("fastfood-blocks", rows, tmp_path) == [
        "| d | transform every token, ms | form blocks + matrix product, ms | transform / product |",
        "|---|---|---|---|",
        "| 2,048 | 30.00 | 20.00 | 1.5x |",
    ]


def test_shares_of_negative_denominators(tmp_path):
    rows = [
        {
            "setting": "denominators",
            "attention": "rbf-rks",
            "keys": keys,
            "smoothing": smoothing,
            "negative_share": share,
        }
        for keys, smoothing, share in ((128, 0.0, 0.4), (128, 0.1, 0.0), (1024, 0.0, 0.347), (1024, 0.1, 0.001))
    ]
    assert table_of("denominators", rows, tmp_path) == [
        "| attention | keys | smoothing 0 | smoothing 0.1 |",
        "|---|---|---|---|",
        "| `rbf-rks` | 128 | 40.0% | 0.0% |",
        "| `rbf-rks` | 1,024 | 34.7% | 0.1% |",
    ]


def test_the_demonstration(tmp_path):
    rows = [
        {"attention": name, "learned": learned, "num_frequencies": count, "accuracy": 0.5793, "seconds": 5.6}
        for name, learned, count in (("softmax", False, None), ("performer", False, 256), ("atoms-prf", True, 64))
    ]
    lines = table_of("demo", [{"setting": "demo", **row, "long_seconds": 0.0312} for row in rows], tmp_path)
    assert lines[0] == "| attention | kernel | features R | accuracy | seconds | s at 16,384 tokens |"
    assert lines[2:] == [
        "| `softmax` | none |  | 57.9% | 6 | 0.031 |",
        "| `performer` | fixed | 256 | 57.9% | 6 | 0.031 |",
        "| `atoms-prf` | learned | 64 | 57.9% | 6 | 0.031 |",
    ]


def step(processes, seconds, *, allocator="", **other):
    """A row of `klformer bench sequence`."""
    return {
        "setting": "steps",
        "length": 4096,
        "causal": False,
        "processes": processes,
        "allocator": allocator,
        "seconds": seconds,
        "peak_bytes": 2**30 / processes,
        "peak_bytes_above_start": 2**29,
        "counted_bytes_a_layer": {"maxima": 1000.0, "sums": 2500.0},
        "predicted_bytes_a_layer": 3500,
        "predicted_bytes_sent_a_step": 5000.0,
        "interface": None,
        "interface_bytes_a_step": None,
    } | other


def test_traffic_counted_and_predicted(tmp_path):
    through = {"interface": "lo", "interface_bytes_a_step": 10_500.0}
    rows = [step(2, 1.0, **through), step(2, 1.0, causal=True, **through)]
    assert table_of("traffic", rows, tmp_path) == [
        "| tokens | direction | processes | sent a layer | sent a layer, predicted | through lo a step "
        "| through lo a step, predicted | counted / predicted |",
        "|---|---|---|---|---|---|---|---|",
        "| 4,096 | bidirectional | 2 | 3,500 | 3,500 | 10,500 | 10,000 | 1.05 |",
        "| 4,096 | causal | 2 | 3,500 | 3,500 | 10,500 | 10,000 | 1.05 |",
    ]
    assert table_of("sequence-steps", rows, tmp_path)[2] == "| 4,096 | bidirectional | 2 | 1.00 | 512 | 512 |"


def test_several_processes_beside_one(tmp_path):
    keeps = allocator_variables(KEEP_FREED_MEMORY | {"HOME": "/"})
    rows = [step(1, 4.0), step(2, 2.0), step(1, 6.0), step(2, 2.0), step(1, 3.0, allocator=keeps)]
    assert table_of("processes", rows, tmp_path)[2:] == [
        "| 4,096 | glibc's defaults | 1 | 2 | 5.00 (4.00 to 6.00) |  | 1,024 |  |",
        "| 4,096 | glibc's defaults | 2 | 2 | 2.00 | 2.50 (2.00 to 3.00) | 512 | 0.50 |",
        "| 4,096 | keeps freed memory | 1 | 1 | 3.00 |  | 1,024 |  |",
    ]
    with pytest.raises(ArgumentError, match="4,096 tokens, keeps freed memory: 1 rows of 2 processes and 0 of one"):
        table_of("processes", [step(2, 3.0, allocator=keeps)], tmp_path)

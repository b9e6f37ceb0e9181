"""Tables of the docs on trials, from rows as their commands write them."""

import json

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
    assert table_of("benchmarks.fastfood:fastfood_table", rows, tmp_path) == [
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
    assert table_of("benchmarks.denominators:denominator_table", rows, tmp_path) == [
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
    lines = table_of(
        "klformer.lab.cli.demo:demo_table",
        [{"setting": "demo", **row, "long_seconds": 0.0312} for row in rows],
        tmp_path,
    )
    assert lines[0] == "| attention | kernel | features R | accuracy | seconds | s at 16,384 tokens |"
    assert lines[2:] == [
        "| `softmax` | none |  | 57.9% | 6 | 0.031 |",
        "| `performer` | fixed | 256 | 57.9% | 6 | 0.031 |",
        "| `atoms-prf` | learned | 64 | 57.9% | 6 | 0.031 |",
    ]

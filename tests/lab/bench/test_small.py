"""Small benchmarks of the product: what they count and time, what they print, and what they write."""

import json

import pytest
import torch

from benchmarks.few_queries import WAYS
from benchmarks.launches import PRODUCTS, count_launches
from benchmarks.shares import CALLS, OTHER, group_of, measure_shares
from klformer.lab.bench.subjects import Sizes
from klformer.lab.cli.main import main
from klformer.ops.spectral_product.chunked import pairs


def run_bench(capsys, file, *arguments):
    """What a benchmark prints, and the rows that it writes."""
    main(["bench", *arguments, "--json", str(file)])
    report = json.loads(file.read_text())
    assert {"klformer", "torch", "python", "processor", "threads", "date"} <= report["environment"].keys()
    assert report["command"]
    return capsys.readouterr().out, report["results"]


def test_one_query_is_timed_both_ways(tmp_path, capsys, monkeypatch):
    taken, forward = [], pairs.forward
    monkeypatch.setattr(pairs, "forward", lambda *a: taken.append(a) or forward(*a))
    sizes = ["--heads", "1", "--frequencies", "4", "--head-dims", "8", "--repeats", "2"]
    out, rows = run_bench(capsys, tmp_path / "few.json", "few-queries", "--keys", "30", "40", *sizes)
    cases = [(feature_map, 8, keys) for feature_map in ("prf", "rks") for keys in (30, 40)]
    assert [(row["feature_map"], row["head_dim"], row["keys"]) for row in rows] == cases
    assert len(taken) == len(cases) * 3, "each case by pairs in every round, and the first warms up"
    for row in rows:
        ratio = row["state_over_pairs"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert all(row[way]["median"] > 0 for way in WAYS)
    assert "state / pairs" in out


def test_launches_are_counted_without_a_gpu(tmp_path, capsys):
    sizes = ["--length", "256", "--heads", "2", "--head-dim", "8", "--frequencies", "16"]
    out, rows = run_bench(capsys, tmp_path / "launches.json", "launches", *sizes)
    expected = Sizes(batch=1, heads=2, length=256, head_dim=8, value_dim=8, frequencies=16)
    assert {row["name"]: row["launches"] for row in rows} == {name: count_launches(name, expected) for name in PRODUCTS}
    assert "prf flash" in out


def test_shares_of_the_product(tmp_path, capsys):
    arguments = ["--products", "prf", "rks causal", "--head-dims", "4", "8", "--length", "64", "--heads", "1"]
    out, rows = run_bench(
        capsys, tmp_path / "s.json", "operator-shares", *arguments, "--frequencies", "4", "--repeats", "1"
    )
    assert [row["name"] for row in rows] == [f"{name}, D={dim}" for name in ("prf", "rks causal") for dim in (4, 8)]
    check_shares(rows)
    assert rows[0]["shares"]["powers of two"] > 0 == rows[0]["shares"]["sines, cosines"]
    assert rows[2]["shares"]["sines, cosines"] > 0
    assert "other passes" in out
    with pytest.raises(SystemExit):
        main(["bench", "operator-shares", "--products", "softmax"])
    assert "products must be one of" in capsys.readouterr().err


def test_shares_of_a_layer(tmp_path, capsys):
    arguments = ["--batch", "2", "--length", "16", "--heads", "2", "--model-dim", "8", "--ffn-dim", "8"]
    names = ["gmm-rks:num_frequencies=4", "softmax"]
    out, rows = run_bench(
        capsys, tmp_path / "s.json", "layer-shares", "--attentions", *names, *arguments, "--repeats", "1"
    )
    assert [row["name"] for row in rows] == names
    check_shares(rows)
    assert all(row["shares"][group] > 0 for row in rows for group in ("mm", "GELU", "layer norms"))
    assert "softmax" in out


def check_shares(rows):
    for row in rows:
        assert row["seconds"] > 0
        assert sum(row["shares"].values()) == pytest.approx(1)


def test_operators_are_in_groups():
    operators = {
        "aten::baddbmm_": "bmm",
        "aten::addmm": "mm",
        "aten::cos": "sines, cosines",
        "aten::exp2_": "powers of two",
        "aten::amax": "sums, maxima",
        "aten::mul_": OTHER,
        "aten::view": CALLS,
        "klformer::spectral_product": CALLS,
        "MmBackward0": CALLS,
    }
    assert {name: group_of(name) for name in operators} == operators
    x = torch.randn(8, 8)
    shares = measure_shares(lambda: x @ x, repeats=2)["shares"]
    assert shares["mm"] + shares[CALLS] == pytest.approx(1)

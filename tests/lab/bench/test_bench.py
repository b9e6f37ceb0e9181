"""The benchmarks run, compare like with like, and write what they print."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import klformer
from benchmarks import fastfood
from klformer.kernels import FastFoodSpectrum
from klformer.lab.bench import attention, measure, ops
from klformer.lab.bench.attention import forward_and_backward as forward_and_backward_of_attention
from klformer.lab.bench.attention import length_table, summarise
from klformer.lab.bench.decode import DecodeBench
from klformer.lab.bench.decode import run as main_of_decode
from klformer.lab.bench.measure import (
    Shape,
    crossover,
    growth_power,
    in_own_process,
    log_log_slope,
    round_times,
    spread,
)
from klformer.lab.bench.subjects import ATTENTIONS, Operands, Sizes, forward_and_backward, matrix_products
from klformer.lab.cli.main import main
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import SpectralKernel, attend

SMALL = Sizes(batch=1, heads=2, length=40, head_dim=4, value_dim=3, frequencies=6)


def run_bench(capsys, *arguments):
    """What a benchmark prints that is typed as a user would."""
    main(["bench", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("feature_map", ["rks", "prf"])
def test_fused_and_materialised_compute_the_same(feature_map):
    operands = Operands.random(SMALL)
    fused, plain = ATTENTIONS[feature_map](operands), ATTENTIONS[f"{feature_map} materialised"](operands)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)
    for a, b in zip(
        torch.autograd.grad(fused, operands.inputs(), operands.d_out),
        torch.autograd.grad(plain, operands.inputs(), operands.d_out),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_subject_runs(name):
    forward_and_backward(name, Operands.random(SMALL))()


class MatrixProducts(TorchDispatchMode):
    """Counts the multiplications of the batched matrix products that run."""

    def __init__(self):
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm", "baddbmm_"):
            left, right = args[-2:]
            self.multiplications += left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature_map", ["rks", "prf"])
def test_the_floors_are_the_products_of_the_fused_op(feature_map):
    sizes = Sizes(batch=1, heads=2, length=200, head_dim=16, value_dim=16, frequencies=32)
    operands = Operands.random(sizes)
    q, k, v, omega = (x.detach() for x in operands.inputs())
    fmap = FEATURE_MAPS[feature_map]
    counts, inputs = {}, [x.requires_grad_() for x in (q, k, v, omega)]
    with MatrixProducts() as ours, torch.autograd.set_multithreading_enabled(False):
        out, _ = attend(SpectralKernel(fmap, omega), q, k, v, backend="chunked")
        torch.autograd.grad(out, inputs, operands.d_out)
    for lean in (True, False):
        with MatrixProducts() as floor:
            matrix_products(sizes, parts=fmap.parts, lean=lean)()
        counts[lean] = floor.multiplications
    assert counts[True] <= ours.multiplications < 1.1 * counts[True], "ours has at most a column or a row more"
    assert counts[True] < counts[False] < 1.1 * counts[True], "the old one has a column of ones"


def test_ops_prints_ratios_and_writes_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "in_own_process", in_this_process)
    target = tmp_path / "ops.json"
    out = run_bench(
        capsys,
        *["ops", "--lengths", "64", "128", "256", "--frequencies", "8", "16", "--heads", "2", "--head-dim", "8"],
        *["--repeats", "1", "--no-memory", "--json", str(target)],
    )
    assert "rks causal" in out
    assert "time grows as L^" in out
    report = json.loads(target.read_text())
    assert report["command"]
    assert len(report["results"]) == 6 * 13
    assert report["results"][0]["result_and_gradients"] == 4 * 2 * 64 * 2 * (8 + 64)  # bytes, heads, tokens, sizes
    product = next(r for r in report["results"] if r["name"] == "rks")
    plain = next(r for r in report["results"] if r["name"] == "rks materialised")
    assert product["ratios"]["materialised_over_ours"] == pytest.approx(
        plain["processor"]["median"] / product["processor"]["median"]
    )
    assert product["kept"]["processor"]["median"] > 0
    causal = next(r for r in report["results"] if r["name"] == "prf causal")
    rival = next(r for r in report["results"] if r["name"] == "softmax causal")
    assert causal["ratios"]["softmax_over_ours"] == pytest.approx(
        rival["processor"]["median"] / causal["processor"]["median"]
    )
    assert {item["of"] for item in report["growth"]} == {"seconds"}
    assert all(row["seconds"] > 0 for row in report["results"])


def test_memory_of_one_subject_is_measured_in_its_own_process():
    sizes = Sizes(batch=1, heads=4, length=4096, head_dim=16, value_dim=16, frequencies=256)
    out = {name: in_own_process(ops.measure_memory, name, sizes) for name in ("rks", "rks materialised")}
    features = 2 * 4 * 4096 * 512 * 4
    assert out["rks materialised"] > features
    assert out["rks"] < features / 2


def test_peak_memory_is_seen():
    size = 64 * 2**20
    script = "import torch; from klformer.memory import extra_peak_memory as peak; torch.ones(9).sum(); "
    script += f"print(peak(lambda: torch.ones({size // 4}).sum()))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 0.9 * size < int(out) < 1.5 * size


def test_medians_and_slopes():
    runs = []
    times = round_times({"a": lambda: runs.append("a"), "b": lambda: runs.append("b")}, repeats=2)
    assert runs == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert log_log_slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert growth_power([1, 2, 4], [3, 0, 48]) == pytest.approx(2)
    assert growth_power([1], [3]) is None


def test_crossover():
    lengths = [64, 256, 1024]
    # 64 L against L^2 / 2: equal at L = 128.
    linear, quadratic = [64 * length for length in lengths], [length**2 / 2 for length in lengths]
    assert crossover(lengths, linear, quadratic) == pytest.approx(128)
    assert crossover(lengths, [1, 1, 1], quadratic) == 64
    assert crossover(lengths, quadratic, linear) is None
    # Not the first of two: what counts is from where on it stays below.
    assert crossover(lengths, [1, 4, 1], [2, 2, 2]) == pytest.approx(512)


def test_growth_and_crossover_of_every_attention():
    lengths = (64, 256, 1024)
    times = {
        "softmax": lambda length: length**2 / 2,
        "linear": lambda length: 64 * length,
        "fast": lambda length: length,
        "slow": lambda length: length**3,
    }
    rows = [
        {"name": name, "length": length, "seconds": {"median": seconds(length)}, "memory": length**2}
        for length in lengths
        for name, seconds in times.items()
    ]
    softmax, linear, fast, slow = summarise(rows)
    assert softmax["time_slope"] == pytest.approx(2)
    assert softmax["memory_slope"] == pytest.approx(2)
    assert softmax["faster_than_softmax"] is None
    assert linear["crossover"] == pytest.approx(128)
    assert linear["faster_than_softmax"] == "from about 128"
    assert (fast["crossover"], fast["faster_than_softmax"]) == (None, "everywhere")
    assert (slow["crossover"], slow["faster_than_softmax"]) == (None, "not up to 1,024")
    alone = summarise([row | {"memory": None} for row in rows if row["name"] == "linear"])
    assert (alone[0]["memory_slope"], alone[0]["faster_than_softmax"]) == (None, None)


def test_columns_of_times_and_memory():
    rows = [
        {
            "name": name,
            "length": length,
            "seconds": {"median": seconds, "low": seconds / 2, "high": 2 * seconds},
            "memory": memory * 2**20,
            "result_and_gradients": 2**20,
        }
        for name, length, seconds, memory in [
            ("softmax", 64, 0.1, 1),
            ("linear", 64, 0.2, 2),
            ("softmax", 256, 1.6, 4),
            ("linear", 256, 0.4, 5),
        ]
    ]
    assert columns_of(length_table(rows)) == {
        "attention": ["softmax", "linear"],
        "L=64": ["100", "200"],
        "L=256": ["1,600", "400"],
        "lowest to highest, longest": ["800 to 3,200", "200 to 800"],
        "grows as": ["L^2.00", "L^0.50"],
        "faster than softmax": ["", "from about 102"],  # a third of the way in logarithms: 64 * 4^(1/3)
        "softmax / it, longest": ["1.0x", "4.0x"],
    }
    assert columns_of(length_table(rows, "memory")) == {
        "attention": ["softmax", "linear"],
        "L=64": ["1", "2"],
        "L=256": ["4", "5"],
        "grows as": ["L^1.00", "L^0.66"],
        "growth, 64 to 256": ["4.0x", "2.5x"],
        "of result and gradients, longest": ["4.00x", "5.00x"],
    }
    medians = [row | {"seconds": {"median": 1.0}} for row in rows if row["name"] == "linear"]
    assert list(columns_of(length_table(medians))) == ["attention", "L=64", "L=256", "grows as"]


def columns_of(table):
    cells = zip(*table.rows, strict=True)
    return {column.title: [cell.plain() for cell in mine] for column, mine in zip(table.columns, cells, strict=True)}


def test_transforming_tokens_equals_the_matrix_product():
    spectrum = FastFoodSpectrum(num_heads=1, head_dim=16, num_frequencies=16).double()
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(fastfood.transform_tokens(spectrum, x), x @ spectrum.frequencies()[0].T)


def test_small_benchmarks_print_their_tables(capsys, tmp_path):
    written = tmp_path / "report.json"
    assert "transform" in run_bench(
        capsys, "fastfood", "--head-dims", "8", "16", "--length", "64", "--repeats", "1", "--json", str(written)
    )
    report = json.loads(written.read_text())
    assert [(row["head_dim"], row["length"]) for row in report["results"]] == [(8, 64), (16, 64)]
    assert report["results"][0]["product"].keys() == {"median", "low", "high"}
    assert {"command", "environment"} <= report.keys()
    sizes = ["--lengths", "32", "64", "--heads", "2", "--head-dim", "8"]
    assert "gmm-rks" in run_bench(capsys, "denominators", *sizes, "--json", str(written))
    report = json.loads(written.read_text())
    assert {"command", "environment"} <= report.keys()
    assert len(report["results"]) == 4 * 2 * 3
    assert all(0 <= row["negative_share"] <= 1 for row in report["results"])
    assert "peak memory" in run_bench(capsys, "layer", "--length", "2000", "--heads", "2", "--head-dim", "8")


def test_steps_with_sequences_in_parts_are_reported(capsys, tmp_path, monkeypatch):
    for name, value in measure.KEEP_FREED_MEMORY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["klformer", "bench", "sequence"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sizes = ["--num-layers", "1", "--num-heads", "2", "--model-dim", "8", "--ffn-dim", "8", "--repeats", "1"]
    written = tmp_path / "sequence.json"
    out = run_bench(capsys, "sequence", "--lengths", "32", "64", *sizes, "--causal", "--json", str(written))
    assert "peak MiB" in out
    report = json.loads(written.read_text())
    assert [(row["length"], row["processes"], row["causal"]) for row in report["results"]] == [
        (32, 1, True),
        (64, 1, True),
    ]
    keeps = "MALLOC_MMAP_MAX_=0 MALLOC_TOP_PAD_=67108864 MALLOC_TRIM_THRESHOLD_=1099511627776"
    assert report["command"] == f"{keeps} klformer bench sequence"
    assert {row["allocator"] for row in report["results"]} == {keeps}


def in_this_process(run, *arguments, environment=None):
    """What a function gives, without a process of its own, which takes seconds to start."""
    return run(*arguments)


def test_attentions_are_measured_in_one_table_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention, "in_own_process", in_this_process)
    monkeypatch.setattr(measure, "in_own_process", in_this_process)
    sizes = ["--heads", "1", "--head-dim", "4", "--num-frequencies", "4", "--lengths", "32", "64", "--repeats", "2"]
    out = run_bench(capsys, "attention", "--attentions", "softmax", "gmm-prf", *sizes, "--out", str(tmp_path))
    report = json.loads((tmp_path / "attention.json").read_text())
    assert [(row["name"], row["length"]) for row in report["results"]] == [
        (name, length) for length in (32, 64) for name in ("softmax", "gmm-prf")
    ]
    for row in report["results"]:
        assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["memory"] >= 0
        assert row["result_and_gradients"] == 4 * row["length"] * 4 * 4  # tensors, tokens, head size, bytes
    assert [row["name"] for row in report["summary"]] == ["softmax", "gmm-prf"]
    assert report["caption"]
    assert report["command"]
    assert {"klformer", "torch", "processor", "threads", "date", "machine"} <= report["environment"].keys()
    assert "of result and gradients" in out
    assert "softmax / it" in out
    assert "freed memory kept" in out
    assert all(row["seconds_kept"]["median"] > 0 for row in report["results"])
    assert "faster than softmax" in out
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert "gmm-prf" in (tmp_path / "attention.svg").read_text()


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_attention_can_be_measured(name):
    forward_and_backward_of_attention(name, Shape(heads=2, head_dim=4, num_frequencies=4), 70)()


@pytest.mark.parametrize("name", ["gmm-rks", "gmm-prf"])
def test_a_kernel_takes_hardly_more_than_its_result_and_gradients(name):
    peak = in_own_process(attention.measure_memory, name, Shape(), 16_384)
    assert peak < 1.1 * attention.result_and_gradients(name, Shape(), 16_384)


def test_an_unknown_attention_is_named():
    with pytest.raises(ValueError, match=r"attentions must be one of .* got 'sofmax'; did you mean 'softmax'"):
        attention.run(attention.AttentionBench(attentions=("sofmax",)))


def test_decoding_is_measured(tmp_path, capsys):
    sizes = ["--heads", "1", "--head-dim", "4", "--num-frequencies", "4", "--positions", "8", "--steps", "3"]
    target = tmp_path / "decode.json"
    arguments = ["--attentions", "gmm-prf", "linear-elu", "--batch-sizes", "1", "2", "--repeats", "2", *sizes]
    out = run_bench(capsys, "decode", *arguments, "--json", str(target))
    report = json.loads(target.read_text())
    rows = report["results"]
    assert report["command"]
    kinds = [f"{name}, {kind}" for name in ("gmm-prf", "linear-elu") for kind in ("prepared", "step")]
    assert [(row["batch"], row["name"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in (*kinds, "softmax, preallocated cache, 8")
    ]
    for row in rows:
        assert 0 < row["tokens_per_second"]["low"] <= row["tokens_per_second"]["high"]
        assert row["processor_microseconds_a_step"]["median"] > 0
    assert "lowest to highest" in out
    assert "default allocator" in out


def test_an_attention_without_steps_is_refused():
    with pytest.raises(ValueError, match="attentions: 'linformer' can't decode step by step"):
        main_of_decode(DecodeBench(attentions=("linformer",)))


def test_lengths_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"lengths must rise, got \(64, 32\)"):
        attention.run(attention.AttentionBench(lengths=(64, 32)))

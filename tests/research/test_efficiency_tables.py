"""Tables of speed and memory are made of what benchmarks write, kept as the docs keep it."""

import json

import pytest

import benchmarks  # noqa: F401
from klformer.errors import ArgumentError
from klformer.lab.bench import peers
from klformer.lab.bench.model import command as model
from klformer.lab.bench.model.step import Seconds
from klformer.lab.bench.ops import PRODUCTS
from klformer.lab.cli.main import main
from klformer.memory import MEBIBYTE
from research.evidence.keep import keep
from research.evidence.pages import render

OPERATORS = "klformer.lab.bench.ops:operator_table"
DECODING = "klformer.lab.bench.decode:decoding_table"
EMPTY = {"caption": "Nothing.", "environment": {}, "commands": {}, "rows": []}


@pytest.fixture
def table(tmp_path):
    """Renders a table of rows: its lines as lists of cells."""

    def make(words, rows):
        (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
        kind, _, more = words.partition(" ")
        page = f"<!-- table {kind} data.json {more} -->\n<!-- /table -->\n"
        lines = [line for line in render(page, tmp_path, "page").splitlines() if line.startswith("|")]
        return [line[2:-2].split(" | ") for line in [lines[0], *lines[2:]]]

    return make


@pytest.fixture
def kept(tmp_path):
    """The rows that a command writes, as `keep` puts them into data."""

    def make(*arguments, file="report.json", target="--json"):
        main([*arguments, target, str(tmp_path / (file if target == "--json" else "."))])
        return keep(json.loads((tmp_path / file).read_text()), EMPTY, "setting", {})["rows"]

    return make


def spread(median, low, high):
    return {"median": median, "low": low, "high": high}


def operator(name, **changes):
    ratios = dict.fromkeys(
        [
            *("materialised_over_ours", "softmax_over_ours", "ours_over_matrix_products", "ours_over_lean"),
            *("causal_over_bidirectional", "memory_of_materialised"),
        ]
    )
    row = {"setting": "s", "name": name, "length": 1024, "head_dim": 16, "seconds": 0.0284, "memory": None}
    row |= {"processor": spread(0.0281, 0.027, 0.028), "kept": None, "result_and_gradients": 2 * MEBIBYTE}
    return row | {"ratios": ratios | changes.pop("ratios", {})} | changes


def test_operators_as_the_command_prints_them(table):
    kept = {"ratios": {"materialised_over_ours": 1.539}}
    rows = [
        operator("rks", ratios={"materialised_over_ours": 1.908, "ours_over_lean": 2.65}, kept=kept),
        operator("rks causal", ratios={"causal_over_bidirectional": 1.8}),
        operator("rks matrix products") | {"ratios": None},
    ]
    assert table(OPERATORS, rows) == [
        ["L", "kernel", "ms", "processor ms", "materialised", "kept", "lean floor", "bidirectional"],
        ["1,024", "rks", "28", "28 (27 to 28)", "1.91x", "1.54x", "2.65x", ""],
        ["1,024", "rks causal", "28", "28 (27 to 28)", "", "", "", "1.80x"],
    ]
    both = table(
        'klformer.lab.bench.ops:operator_table "show=D,L,processor ms"', [operator("prf", head_dim=64), *rows[:1]]
    )
    assert both == [["D", "L", "processor ms"], ["16", "1,024", "28 (27 to 28)"], ["64", "1,024", "28 (27 to 28)"]]
    weighed = [operator("prf", memory=3 * MEBIBYTE, ratios={"memory_of_materialised": 0.5})]
    assert table(
        'klformer.lab.bench.ops:operator_table "show=kernel,MiB,of materialised,of result and gradients"', weighed
    )[1:] == [["prf", "3", "0.50x", "1.50x"]]
    with pytest.raises(ArgumentError, match="columns must be some of L, kernel, ms, processor ms; got MiB"):
        table(f"{OPERATORS} show=kernel,MiB", [operator("prf")])


def test_rows_of_the_product(table, kept):
    sizes = ["--heads", "1", "--head-dim", "4", "--value-dim", "4", "--frequencies", "4", "--repeats", "1"]
    rows = kept("bench", "ops", "--lengths", "16", "32", *sizes, "--no-kept", "--no-memory")
    headings, *lines = table(OPERATORS, rows)
    assert headings[:4] == ["L", "kernel", "ms", "processor ms"]
    assert [line[:2] for line in lines] == [[length, name] for length in ("16", "32") for name in PRODUCTS]


def test_few_queries_launches_and_shares(table, kept):
    sizes = ["--keys", "20", "--heads", "1", "--frequencies", "4", "--head-dims", "4", "--repeats", "1"]
    headings, *lines = table("benchmarks.few_queries:few_query_table", kept("bench", "few-queries", *sizes))
    assert headings[:3] == ["feature map", "D = E", "queries"]
    assert [line[:3] for line in lines] == [["prf", "4", "1"], ["rks", "4", "1"]]
    rows = kept("bench", "launches", "--length", "64", "--heads", "1", "--head-dim", "4", "--frequencies", "4")
    assert table("benchmarks.launches:launch_table", rows)[2] == ["prf", str(rows[1]["launches"])]
    shares = {"bmm": 0.514, "GELU": 0.0, "copies": 0.004, "calls": 0.482}
    rows = [{"setting": "s", "name": "prf, D=16", "seconds": 0.0161, "shares": shares}]
    assert table("benchmarks.shares:share_table", rows) == [["", "ms", "bmm", "calls"], ["prf, D=16", "16", "51", "48"]]


def test_decoding(table, kept):
    rows = [
        {"name": name, "batch": batch, "tokens_per_second": spread(6150.2, 6000, 7000)}
        | {"processor_microseconds_a_step": spread(162, 162, 162)}
        for name, batch in (("x, prepared", 1), ("x, prepared", 32), ("softmax, preallocated cache, 8", 1))
    ]
    head, first, second = table(DECODING, rows)
    assert head[-1] == "B=32: processor µs a step"
    assert first == ["x, prepared", "6,150 (6,000 to 7,000)", "162", "6,150 (6,000 to 7,000)", "162"]
    assert second[0] == "softmax, preallocated cache, 8"
    sizes = ["--heads", "1", "--head-dim", "4", "--num-frequencies", "4", "--positions", "8", "--steps", "2"]
    measured = kept("bench", "decode", "--attentions", "gmm-prf", "--batch-sizes", "1", "--repeats", "1", *sizes)
    assert [line[0] for line in table(DECODING, measured)[1:]] == [row["name"] for row in measured]


def test_peers(table, kept, monkeypatch):
    seconds = {"klformer": [1.0, 2.0, 4.0], "torch": [3.0, 4.0, 4.0], "materialised": [0.5, 2.0, 8.0]}
    monkeypatch.setattr(peers, "both_times", lambda subjects, **_: {c: (seconds[c.maker],) * 2 for c in subjects})
    sizes = ["--lengths", "13", "--heads", "1", "--head-dim", "4", "--num-frequencies", "4", "--levels", "attention"]
    arguments = ["bench", "peers", "--attentions", "gmm-rks", *sizes, "--no-memory", "--no-kept"]
    rows = kept(*arguments, file="peers.json", target="--out")
    assert table("klformer.lab.bench.peers:peer_table show=peer,klformer,time,rounds", rows) == [
        ["peer", "klformer", "time", "rounds"],
        ["torch scaled_dot_product_attention", "`gmm-rks`", "2.00 (1.00 to 3.00)", "3"],
        ["gmm-rks, features materialised", "`gmm-rks`", "1.00 (0.50 to 2.00)", "3"],
    ]


def test_models(table, kept, monkeypatch):
    def step(asked):
        if asked.attention == "local":
            raise RuntimeError("killed")
        return Seconds(0.25, 0.5) if asked.steps else 3 * MEBIBYTE

    monkeypatch.setattr(model, "measure_in_own_process", step)
    arguments = ["--tasks", "image", "--lengths", "--device", "cpu", "--attentions", "softmax", "local"]
    rows = kept("bench", "model", *arguments, file="model.json", target="--out")
    assert table("klformer.lab.bench.model.output:speed_table", rows) == [
        ["attention", "steps / s", "processor s a step", "relative to softmax", "relative, processor", "MiB"],
        ["`softmax`", "4", "0.5", "1.00", "1.00", "3"],
        ["`local`", "not run (killed)", "", "", "", ""],
    ]


def test_profile(table, kept):
    row = {"attention": "softmax", "seconds": 3.764, "attention_seconds": 2.67, "peak_bytes": 409.2 * MEBIBYTE}
    assert table("research.evidence.printed:profiles", [row]) == [
        ["attention", "a step", "of it in the attention product", "MiB above the model"],
        ["`softmax`", "3.76 s", "71%", "409"],
    ]
    tasks = [row | {"task": task} for task in ("text", "image")]
    assert [line[:2] for line in table("research.evidence.printed:profiles", tasks)] == [
        ["task", "attention"],
        ["text", "`softmax`"],
        ["image", "`softmax`"],
    ]
    rows = kept("profile", "--task", "sparsity", "--preset", "laptop", "--batch-size", "1", "--attention", "linear-elu")
    assert table("research.evidence.printed:profiles", rows)[1][0] == "`linear-elu`"


def test_kept_memory_is_measured_again(kept, table, monkeypatch):
    again = []

    def measured(run, options):
        again.append(run.__module__)
        ratios = {"seconds": 1.0, "processor": spread(1, 1, 1), "ratios": {"materialised_over_ours": 2.5}}
        return [{"name": "prf", "length": 16, "frequencies": 4} | ratios]

    monkeypatch.setattr("klformer.lab.bench.ops.with_kept_memory", measured)
    sizes = ["--heads", "1", "--head-dim", "4", "--value-dim", "4", "--frequencies", "4", "--repeats", "1"]
    rows = kept("bench", "ops", "--lengths", "16", *sizes, "--no-memory")
    assert again == ["klformer.lab.bench.ops"]
    assert [line[1] for line in table(f"{OPERATORS} show=kernel,kept", rows)[1:] if line[1]] == ["2.50x"]

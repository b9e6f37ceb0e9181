"""Tables of pages are made of data, and what can't be made is refused."""

import json
from pathlib import Path

import pytest

from klformer.errors import ArgumentError, FileError
from research.evidence.pages import render
from research.mse.command import compare_formulas

ROOT = Path(__file__).parents[2]
DATA = ROOT / "research/data"
TIMES = "klformer.lab.bench.attention:length_table"
ROW = {
    "setting": "a: accuracy, %",
    "attention": "gmm-rks",
    "draw": "redrawn",
    "seeds": 3,
    "learned": 90.0,
    "learned_std": 1.0,
    "frozen": 80.0,
    "frozen_std": 2.0,
    "difference": 10.0,
    "standard_error": 1.5,
    "pairs": 3,
}


def rows_of(file):
    return json.loads(file.read_text())["rows"]


def test_a_table_is_made_of_the_rows_that_are_asked_for(tmp_path):
    rows = [ROW, ROW | {"draw": "kept", "standard_error": 6.0}, ROW | {"setting": "b"}]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    page = 'before\n<!-- table learned data.json "setting=a: accuracy, %" -->\nold\n<!-- /table -->\nafter\n'
    lines = render(page, tmp_path, "page").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert [line for line in lines if line.startswith("| `")] == [
        "| `gmm-rks` | redrawn | 3 | 90.00 +- 0.58 | 80.00 +- 1.15 | **+10.00 +- 1.50** |",
        "| `gmm-rks` | kept | 3 | 90.00 +- 0.58 | 80.00 +- 1.15 | +10.00 +- 6.00 |",
    ]
    assert render("\n".join(lines), tmp_path, "page") == "\n".join(lines)


def test_when_and_where_a_setting_was_measured(tmp_path):
    here = {"date": "2026-11-18", "processor": "P", "threads": 1, "torch": "3"}
    known = {"environment": here, "differs": {"b": {"threads": 2}}, "commands": {"a": "x", "b": "y"}, "rows": []}
    (tmp_path / "data.json").write_text(json.dumps(known))
    page = "<!-- table measured data.json setting={} -->\n<!-- /table -->\n"
    assert "\n*Measured: 2026-11-18, P, one thread, torch 3.*\n" in render(page.format("a"), tmp_path, "page")
    assert "P, 2 threads," in render(page.format("b"), tmp_path, "page")
    for words in ("c", "a,b", "a name=x"):
        with pytest.raises(ArgumentError, match="page: `measured` must have setting= one of a, b; got"):
            render(page.format(words), tmp_path, "page")


def test_all_fields_as_they_are(tmp_path):
    rows = [
        {"setting": "a", "attention": "softmax", "right": 94.0},
        {"setting": "a", "attention": "x", "seconds": 3},
    ]
    (tmp_path / "data.json").write_text(json.dumps({"rows": [*rows, {"setting": "b", "attention": "y"}]}))
    made = render("<!-- table fields data.json setting=a -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    assert [line for line in made if line.startswith("|")] == [
        "| attention | right | seconds |",
        "|---|---|---|",
        "| `softmax` | 94.0 |  |",
        "| `x` |  | 3 |",
    ]


def runs(setting, attention, *values, over_draws=None):
    name = {"setting": setting, "attention": attention, "over_draws": over_draws}
    return [name | {"seed": seed, "value": value} for seed, value in enumerate(values)]


def test_attentions_against_others_seed_by_seed(tmp_path):
    rows = [
        *runs("a: %", "softmax", 50.0, 60.0, 70.0),
        *runs("a: %", "gmm-rks", 61.0, 70.0, 82.0, over_draws=1.5),
        *runs("a: %", "gmm-rks:frozen=true", 40.0, 80.0, 60.0),
        *runs("a: %", "linear-elu", 90.0),
    ]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render('<!-- table against data.json "setting=a: %" -->\n<!-- /table -->\n', tmp_path, "page").splitlines()
    assert [line for line in made if line.startswith("|")] == [
        "| rank | attention | seeds | mean | over draws | - softmax | - linear-elu | - frozen self |",
        "|---|---|---|---|---|---|---|---|",
        "| 1 to 4 | `linear-elu` | 1 | 90.00 |  | +40.00 |  |  |",
        "| 1 to 3 | `gmm-rks` | 3 | 71.00 +- 6.08 | 1.50 | **+11.00 +- 0.58** | -29.00 | +11.00 +- 10.50 |",
        "| 2 to 4 | `softmax` | 3 | 60.00 +- 5.77 |  |  | -40.00 |  |",
        "| 1 to 4 | `gmm-rks:frozen=true` | 3 | 60.00 +- 11.55 |  | +0.00 +- 10.00 | -50.00 |  |",
    ]


def test_runs_are_compared_with_their_frozen_selves(tmp_path):
    rows = [*runs("a: %", "gmm-rks", 61.0, 70.0, 82.0), *runs("a: %", "gmm-rks:frozen=true", 60.0, 68.0, 79.0)]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render("<!-- table learned data.json -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    assert made[-2] == "| `gmm-rks` | redrawn | 3 | 71.00 +- 6.08 | 69.00 +- 5.51 | **+2.00 +- 0.58** |"


def test_settings_side_by_side(tmp_path):
    rows = [*runs("a: %", "softmax", 50.0, 60.0), *runs("b: %", "softmax", 3.0), *runs("b: %", "linear-elu", 4.0, 6.0)]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render("<!-- table settings data.json -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    assert [line for line in made if line.startswith("|")] == [
        "| attention | a | b |",
        "|---|---|---|",
        "| `softmax` | 55.00 +- 5.00 (2) | 3.00 (1) |",
        "| `linear-elu` | - | 5.00 +- 1.00 (2) |",
    ]


def test_tasks_have_their_mean_and_the_best_is_first(tmp_path):
    rows = [*runs("a: %", "softmax", 50.0, 60.0), *runs("a: %", "local", 90.0), *runs("a: %", "linear-elu", 70.0)]
    (tmp_path / "first.json").write_text(json.dumps({"rows": rows}))
    rows = [*runs("b: %", "softmax", 3.0), *runs("b: %", "linear-elu", 4.0, 6.0)]
    (tmp_path / "second.json").write_text(json.dumps({"rows": rows}))
    page = "<!-- table tasks first.json,second.json -->\n<!-- /table -->\n"
    assert [line for line in render(page, tmp_path, "page").splitlines() if line.startswith("|")] == [
        "| attention | a | b | mean of all | - softmax |",
        "|---|---|---|---|---|",
        "| `linear-elu` | 70.00 (1) | 5.00 +- 1.00 (2) | 37.50 | +10.50 (1) |",  # 70 and 4 less 50 and 3
        "| `softmax` | 55.00 +- 5.00 (2) | 3.00 (1) | 29.00 |  |",
        "| `local` | 90.00 (1) | - | - |  |",
    ]


def test_columns_that_a_page_chooses_are_means_over_seeds(tmp_path):
    known = {"setting": "a", "task": "text"}
    rows = [known | {"attention": "gmm-rks", "seed": seed, "rsd": rsd, "pi": 1234.0} for seed, rsd in ((0, 1), (1, 3))]
    rows += [known | {"attention": "gmm-prf", "seed": 0, "rsd": 0.01234, "pi": None}]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    page = '<!-- table means data.json task=text by=task,attention "show=rsd:RSD, mean,pi" -->\n<!-- /table -->\n'
    assert [line for line in render(page, tmp_path, "page").splitlines() if line.startswith("|")] == [
        "| task | attention | values | RSD, mean | pi |",
        "|---|---|---|---|---|",
        "| text | `gmm-rks` | 2 | 2.00 +- 1.00 | 1,234 +- 0 |",
        "| text | `gmm-prf` | 0 to 1 | 0.0123 |  |",
    ]


def lines_of(page, rows, tmp_path):
    """The rows of a table without its heading."""
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render(f"<!-- table {page} -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    return [line for line in made if line.startswith("|")][2:]


def test_heads_of_a_run_are_one_value_and_a_change_is_marked(tmp_path):
    values = {0: [(1, 2), (3, 6)], 1: [(2, 5), (4, 7)], 2: [(3, 6), (5, 8)]}
    rows = [
        {"attention": "gmm-rks", "seed": seed, "before": before, "after": after}
        for seed, heads in values.items()
        for before, after in heads
    ]
    words = "means data.json by=attention show=before,after,after-before:change"
    # Means over heads: 2, 3, 4 before and 4, 6, 7 after; they change by 2, 3 and 3.
    changed = "3.00 +- 0.58 | 5.67 +- 0.88 | **+2.67 +- 0.33** |"
    assert lines_of(f"{words} within=seed", rows, tmp_path) == [f"| `gmm-rks` | 3 | {changed}"]
    assert lines_of(words, rows, tmp_path)[0].startswith("| `gmm-rks` | 6 | 3.00 +- 0.58 |")


def test_differences_of_pairs_that_a_page_chooses(tmp_path):
    rows = [{"task": "a", **row} for row in [*runs("s: %", "gmm-rks", 1.0, 2.0, 3.0), *runs("s: %", "x", 7, 7)]]
    rows += [{"task": "a", **row} for row in runs("s: %", "gmm-prf", 3.0, 5.0, 5.0)]
    rows += [{"task": "b", **row} for row in runs("s: %", "gmm-prf", 0.75, None)]
    rows += [{"task": "b", **row} for row in runs("s: %", "gmm-rks", 0.5, 9.0)]
    words = "paired data.json show=value:accuracy"
    assert lines_of(f"{words} by=task of=gmm-prf,x minus=gmm-rks,gmm-rks", rows, tmp_path) == [
        "| a | `gmm-prf` - `gmm-rks` | 3 | **+2.33 +- 0.33** |",
        "| a | `x` - `gmm-rks` | 2 | +5.50 +- 0.50 |",
        "| b | `gmm-prf` - `gmm-rks` | 1 | +0.250 |",
    ]
    # 1, 2 and 3 at a; 0.5 and 9 at b.
    assert lines_of(f"{words} by=setting,attention between=task of=a minus=b attention=gmm-rks", rows, tmp_path) == [
        "| s | `gmm-rks` | a - b | 2 | -3.25 +- 3.75 |"
    ]
    assert lines_of(f"{words} across=task of=gmm-prf,x minus=gmm-rks,gmm-rks", rows, tmp_path) == [
        "| `gmm-prf` - `gmm-rks` | 1 to 3 | **+2.33 +- 0.33** | +0.250 |",
        "| `x` - `gmm-rks` | 2 | +5.50 +- 0.50 |  |",
    ]
    with pytest.raises(ArgumentError, match=r"across=.*must be one field"):
        lines_of(f"{words},seed across=task of=x minus=gmm-rks", rows, tmp_path)
    with pytest.raises(ArgumentError, match="must be as many"):
        lines_of(f"{words} of=gmm-prf,x minus=gmm-rks", rows, tmp_path)


def timed(name, length, milliseconds):
    return {"name": name, "length": length, "seconds": {"median": milliseconds / 1000}}


def test_times_of_attentions_as_their_benchmark_prints_them(tmp_path):
    rows = [timed("softmax", 64, 1), timed("x", 64, 2), timed("softmax", 256, 16), timed("x", 256, 8)]
    assert lines_of(f"{TIMES} data.json", rows, tmp_path) == [
        "| `softmax` | 1 | 16 | L^2.00 |  | 1.0x |",
        "| `x` | 2 | 8 | L^1.00 | from about 128 | 2.0x |",
    ]
    some = lines_of(
        'klformer.lab.bench.attention:length_table data.json "without=grows as,faster than softmax" length=256',
        rows,
        tmp_path,
    )
    assert some == ["| `softmax` | 16 | 1.0x |", "| `x` | 8 | 2.0x |"]


def test_simulations_as_their_command_prints_them(tmp_path):
    cases = [row for row in rows_of(DATA / "theorem3.json") if row["setting"] == "cases"]
    lines = lines_of("research.mse.command:compare_formulas data.json", cases, tmp_path)
    for line, row in zip(lines, compare_formulas(cases), strict=True):
        assert line.startswith(f"| {row['map']} | {row['formula']} | {row['cases']} | {row['within 2 s.e.']} |")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("pie data.json", ArgumentError, "page: unknown kind of table 'pie'; known are learned"),
        ("os:remove data.json", ArgumentError, "must be in one of klformer, benchmarks, research; got os:remove"),
        ("klformer:pie data.json", ArgumentError, "there is no function klformer:pie"),
        ("learned data.json draw=never", ArgumentError, "page: data.json has no row with draw=never"),
        ("learned gone.json", FileError, "gone.json can't be read as data of a table"),
    ],
)
def test_what_can_not_be_rendered_is_refused(tmp_path, words, error, message):
    (tmp_path / "data.json").write_text(json.dumps({"rows": [ROW]}))
    with pytest.raises(error, match=message):
        render(f"<!-- table {words} -->\n<!-- /table -->\n", tmp_path, "page")

"""Tables of the docs are what the data says, and what can't be made is refused."""

import json
from pathlib import Path

import pytest

from klformer.analysis.evidence.pages import render
from klformer.errors import ArgumentError, FileError

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_pages_are_as_their_data_says(page):
    text = page.read_text()
    assert render(text, ROOT, str(page)) == text, "make evidence renders it again"


def test_a_table_is_made_of_the_rows_that_are_asked_for(tmp_path):
    rows = [ROW, ROW | {"draw": "kept", "standard_error": 6.0}, ROW | {"setting": "b"}]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    page = 'before\n<!-- table learned data.json "setting=a: accuracy, %" -->\nold\n<!-- /table -->\nafter\n'
    lines = render(page, tmp_path, "page").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert [line for line in lines if line.startswith("| `")] == [
        "| `gmm-rks` | redrawn | 3 | 90.00 +- 1.00 | 80.00 +- 2.00 | **+10.00 +- 1.50** |",
        "| `gmm-rks` | kept | 3 | 90.00 +- 1.00 | 80.00 +- 2.00 | +10.00 +- 6.00 |",
    ]
    assert render("\n".join(lines), tmp_path, "page") == "\n".join(lines)


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
        "| rank | attention | seeds | mean | over draws | - softmax | - frozen self |",
        "|---|---|---|---|---|---|---|",
        "| 1 to 4 | `linear-elu` | 1 | 90.00 |  | +40.00 |  |",
        "| 1 to 3 | `gmm-rks` | 3 | 71.00 +- 6.08 | 1.50 | **+11.00 +- 0.58** | +11.00 +- 10.50 |",
        "| 2 to 4 | `softmax` | 3 | 60.00 +- 5.77 |  |  |  |",
        "| 1 to 4 | `gmm-rks:frozen=true` | 3 | 60.00 +- 11.55 |  | +0.00 +- 10.00 |  |",
    ]


def test_runs_are_compared_with_their_frozen_selves(tmp_path):
    rows = [*runs("a: %", "gmm-rks", 61.0, 70.0, 82.0), *runs("a: %", "gmm-rks:frozen=true", 60.0, 68.0, 79.0)]
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render("<!-- table learned data.json -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    assert made[-2] == "| `gmm-rks` | redrawn | 3 | 71.00 +- 10.54 | 69.00 +- 9.54 | **+2.00 +- 0.58** |"


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


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("pie data.json", ArgumentError, "page: unknown kind of table 'pie'; known are learned"),
        ("learned data.json draw=never", ArgumentError, "page: data.json has no row with draw=never"),
        ("learned gone.json", FileError, "gone.json can't be read as data of a table"),
    ],
)
def test_what_can_not_be_rendered_is_refused(tmp_path, words, error, message):
    (tmp_path / "data.json").write_text(json.dumps({"rows": [ROW]}))
    with pytest.raises(error, match=message):
        render(f"<!-- table {words} -->\n<!-- /table -->\n", tmp_path, "page")

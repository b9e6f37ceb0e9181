"""What commands write is put into the data of the docs."""

import json
import sys

import pytest

from klformer.errors import ArgumentError
from klformer.lab.analysis.output import write_results
from klformer.lab.environment import typed_command
from research.evidence.keep import as_text, keep, main, together

HERE = {"klformer": "2", "torch": "3", "python": "3.12", "processor": "P", "threads": 1, "date": "2026-11-17"}
REPORT = {
    "environment": HERE | {"date": "2026-11-17T10:00:00+00:00", "machine": "P, 1 threads"},
    "command": "OMP_NUM_THREADS=1 klformer bench attention --lengths 64 --out bench --repeats 1",
    "results": [
        {"name": "softmax", "length": 64, "seconds": {"median": 0.123456789}},
        {"name": "performer", "length": 64, "seconds": {"median": 2.0}},
    ],
}
DATA = {
    "caption": "Times.",
    "environment": HERE | {"klformer": "1"},
    "differs": {"memory": {"threads": 2}},
    "commands": {"time": "klformer bench attention", "memory": "klformer bench attention --repeats 1"},
    "rows": [
        {"setting": "time", "name": "old"},
        {"setting": "memory", "name": "old"},
        {"setting": "time", "name": "x"},
    ],
}


def test_rows_take_the_place_of_a_settings():
    kept = keep(REPORT, DATA, "time", {"name": ["softmax"]})
    assert kept["rows"] == [
        {"setting": "time", "name": "softmax", "length": 64, "seconds": {"median": 0.12346}},
        {"setting": "memory", "name": "old"},
    ]
    assert kept["commands"]["time"] == "OMP_NUM_THREADS=1 klformer bench attention --lengths 64 --repeats 1"
    assert kept["environment"] == HERE
    assert kept["differs"] == {"memory": {"klformer": "1", "threads": 2}}
    again = keep(REPORT, kept, "memory", {})
    assert "differs" not in again
    assert [row["name"] for row in again["rows"]] == ["softmax", "softmax", "performer"]
    assert [row["name"] for row in keep(REPORT, DATA, "new", {})["rows"]] == ["old", "old", "x", "softmax", "performer"]
    with pytest.raises(ArgumentError, match="no row of the report has"):
        keep(REPORT, DATA, "time", {"name": ["softmacks"]})


def test_rows_of_others_stay_beside_new_ones():
    old = DATA | {"rows": [{"setting": "time", "name": name} for name in ("softmax", "other", "performer")]}
    kept = keep(REPORT, old, "time", {}, beside="name")
    assert [(row["name"], "seconds" in row) for row in kept["rows"]] == [
        ("softmax", True),
        ("performer", True),
        ("other", False),
    ]
    assert [row["name"] for row in keep(REPORT, old, "time", {})["rows"]] == ["softmax", "performer"]


def test_runs_bring_their_setting_and_what_made_them():
    rows = [{"setting": f"{name}: accuracy, %", "attention": "softmax", "value": 1.0} for name in ("time", "other")]
    report = {"environment": REPORT["environment"], "command": "klformer analyze evidence runs", "rows": rows}
    old = DATA | {"rows": [{"setting": "time: error", "value": 0.0}, *DATA["rows"]]}
    kept = keep(report, old, "time", {}, before=["klformer compare", "klformer compare --seeds 1"])
    assert kept["rows"] == [rows[0], {"setting": "memory", "name": "old"}]
    made = "klformer compare\nklformer compare --seeds 1\nklformer analyze evidence runs"
    assert kept["commands"]["time"] == made
    with pytest.raises(ArgumentError, match="is of the setting 'memory'"):
        keep(report, old, "memory", {})


def test_several_reports_are_one_setting(tmp_path, monkeypatch):
    more = REPORT | {"command": "klformer bench peers --json x.json", "results": [{"name": "x"}]}
    for name, report in (("first", REPORT), ("second", more)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"caption": "New.", "environment": {}, "commands": {}, "rows": []}))
    monkeypatch.setattr(
        "sys.argv", ["keep", f"{tmp_path / 'first.json'},{tmp_path / 'second.json'}", str(data), "both"]
    )
    main()
    kept = json.loads(data.read_text())
    assert [(row["setting"], row["name"]) for row in kept["rows"]] == [
        ("both", name) for name in ("softmax", "performer", "x")
    ]
    assert kept["commands"]["both"].splitlines() == [
        "OMP_NUM_THREADS=1 klformer bench attention --lengths 64 --repeats 1",
        "klformer bench peers",
    ]
    assert kept["environment"] == HERE
    elsewhere = REPORT | {"environment": REPORT["environment"] | {"threads": 2}}
    with pytest.raises(ArgumentError, match="reports of one setting must be from one environment"):
        together([REPORT, elsewhere])


@pytest.mark.parametrize("name", ["rows", "results", "comparisons", "speed"])
def test_rows_by_the_names_that_commands_give_them(name):
    report = {"environment": HERE, "command": "klformer bench x", "subjects": [{"name": "y"}], name: [{"name": "x"}]}
    assert keep(report, DATA, "new", {})["rows"][-1] == {"setting": "new", "name": "x"}


def test_a_report_without_rows_is_refused():
    with pytest.raises(ArgumentError, match=r"must have its rows as one of rows, results, .* got environment, command"):
        keep({"environment": HERE, "command": "klformer bench x"}, DATA, "new", {})


def test_runs_of_a_sweep_get_a_name_of_their_own():
    names = [f"a-laptop training.resample_every={every}: accuracy, %" for every in (1, 10)]
    rows = [{"attention": "gmm-rks", "setting": name, "value": 1.0} for name in names]
    report = {"environment": REPORT["environment"], "command": "klformer analyze evidence runs", "rows": rows}
    kept = keep(report, DATA, "every step", {}, of="a-laptop training.resample_every=1")
    assert kept["rows"][-1] == {"setting": "every step: accuracy, %", "attention": "gmm-rks", "value": 1.0}
    assert next(iter(kept["rows"][-1])) == "setting"
    assert len(kept["rows"]) == len(DATA["rows"]) + 1
    assert kept["commands"]["every step"] == "klformer analyze evidence runs"
    with pytest.raises(ArgumentError, match=r"'a-laptop'; it has a-laptop training\.resample_every=1, a-laptop"):
        keep(report, DATA, "every step", {}, of="a-laptop")


def test_files(tmp_path, monkeypatch):
    report, data = tmp_path / "report.json", tmp_path / "data.json"
    report.write_text(json.dumps(REPORT))
    data.write_text(json.dumps(DATA))
    monkeypatch.setattr("sys.argv", ["keep", str(report), str(data), "time", "name=softmax,performer", "length=64"])
    main()
    expected = keep(REPORT, DATA, "time", {})
    assert json.loads(data.read_text()) == expected
    assert data.read_text() == as_text(expected)
    assert sum('"setting"' in line for line in data.read_text().splitlines()) == len(expected["rows"])


def test_analyses_say_what_was_typed(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--plugin", "research", "analyze", "mse"]
    monkeypatch.setattr(sys, "argv", ["/usr/lib/klformer/__main__.py", *words, "--out", "a b"])
    assert typed_command() == "OMP_NUM_THREADS=1 klformer --plugin research analyze mse --out 'a b'"
    write_results(tmp_path, "numbers", caption="Numbers.", rows=[{"number": 1}], settings={})
    assert json.loads((tmp_path / "numbers.json").read_text())["command"] == typed_command()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/klformer", *words])
    assert typed_command() == "klformer --plugin research analyze mse"
    monkeypatch.setattr(sys, "argv", ["tests/faults/kill.py", "--kills", "2"])
    assert typed_command() == "python tests/faults/kill.py --kills 2"
    words = ["--plugin", "research", "analyze", "mse"]
    monkeypatch.setattr(sys, "argv", ["/usr/lib/klformer/__main__.py", *words, "--out", "a b"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert typed_command() == "torchrun --nproc-per-node 2 -m klformer --plugin research analyze mse --out 'a b'"

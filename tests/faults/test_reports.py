"""The scripts that attack klformer write what they found, as research/pages/robustness.md shows it."""

import json
import sys
from pathlib import Path

import pytest

from research.evidence.pages import render

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
sys.path.insert(0, str(Path(__file__).parent))

import fuzz
import kill
import soak


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Runs a script with arguments, and gives its exit code and what it wrote."""

    def call(script, *arguments):
        file = tmp_path / "report.json"
        monkeypatch.setattr("sys.argv", [f"tests/{Path(script.__file__).name}", *arguments, "--json", str(file)])
        with pytest.raises(SystemExit) as ended:
            script.main()
        written = json.loads(file.read_text())
        assert written["command"].endswith(f"--json {file}")
        assert "torch" in written["environment"]
        return ended.value.code, written["rows"]

    return call


def table_of(kind, rows, tmp_path):
    """The lines of a table, without its headings."""
    (tmp_path / "data.json").write_text(json.dumps({"rows": rows}))
    made = render(f"<!-- table {kind} data.json -->\n<!-- /table -->\n", tmp_path, "page").splitlines()
    return [line for line in made if line.startswith("|")][2:]


class Door:
    """A door.

    More of it.
    """

    def __init__(self, folder):
        self.calls = 0

    def __call__(self, random):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("a bug")
        if self.calls > 1:
            raise fuzz.UserError("a refusal")


def test_what_became_of_inputs(report, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz.resource, "setrlimit", lambda *limits: None)
    monkeypatch.setitem(fuzz.TARGETS, "config", Door)
    code, (row,) = report(fuzz, "--targets", "config", "--inputs", "4")
    assert code == 1
    assert (row["inputs"], row["read"], row["refused"], row["crashed"]) == (4, 1, 1, 2)
    assert list(row["places"].values()) == [2], "one place, first seen with the third input"
    (line,) = table_of("fuzzing", [row | {"processor_seconds": 1234.5}], tmp_path)
    assert line == "| `config` | A door | 4 | 1,234 | 1 | 1 | 2 inputs, at 1 places |"
    assert table_of("fuzzing", [row | {"crashed": 0, "places": {}}], tmp_path)[0].endswith("| 1 | 1 | nothing |")


class Loser:
    """Loses its first round."""

    def __init__(self, folder):
        self.rounds = 0

    def round(self, chance, count):
        self.rounds += 1
        count()
        assert self.rounds > 1, "lost"


def test_kills_and_losses(report, tmp_path, monkeypatch):
    monkeypatch.setitem(kill.COMMANDS, "training", Loser)
    monkeypatch.setitem(kill.COMMANDS, "report", Loser)
    code, rows = report(kill, "--kills", "6", "--commands", "training", "report")
    assert code == 1
    assert [(row["command"], row["kills"], row["lost"]) for row in rows] == [("training", 3, 1), ("report", 3, 1)]
    assert table_of("kills", rows, tmp_path)[0] == "| training | Loses its first round | 3 | 1 times |"
    assert table_of("kills", [rows[0] | {"lost": 0}], tmp_path)[0].endswith("| 3 | nothing |")


def test_memory_and_files_of_a_long_run(report, tmp_path):
    _, rows = report(soak, "--steps", "24")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert {13, 24} <= set(steps), "the first of the second half, and the last"
    assert all(row["resident_mib"] > 10 and row["open_files"] > 0 for row in rows)
    assert len(table_of("long-run", rows, tmp_path)) == len(rows)


def test_all_in_short(tmp_path):
    moments = [(250, 341.8, 9), (25_000, 344.0, 9), (25_250, 344.6, 9), (50_000, 344.7, 10)]
    rows = [
        *({"inputs": 1500, "crashed": crashed, "places": {"x": 1} if crashed else {}} for crashed in (0, 3)),
        *({"kills": 40, "lost": 0} for _ in range(5)),
        *({"step": step, "resident_mib": mib, "open_files": files} for step, mib, files in moments),
    ]
    assert table_of("robustness", rows, tmp_path) == [
        "| files that are nearly right | 3,000 inputs | 3 inputs, at 1 places |",
        "| kills at random moments | 200 kills | nothing |",
        "| a long run | 50,000 steps | +0.1 MiB and +1 files in its second half |",
    ]

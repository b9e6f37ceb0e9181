"""The scripts that attack klformer write what they found, as research/pages/robustness.md shows it."""

import json
import sys
from pathlib import Path

import pytest

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
    assert (row["target"], row["what"]) == ("config", "A door")


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
    assert rows[0]["what"] == "Loses its first round"


def test_memory_and_files_of_a_long_run(report, tmp_path):
    _, rows = report(soak, "--steps", "24")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert {13, 24} <= set(steps), "the first of the second half, and the last"
    assert all(row["resident_mib"] > 10 and row["open_files"] > 0 for row in rows)
    assert soak.second_half([*rows[:-1], rows[-1] | {"resident_mib": 1e6}])[0] > 1e5

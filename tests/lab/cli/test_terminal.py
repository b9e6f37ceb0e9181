"""What is printed fits where it goes."""

import os
import pty
import subprocess
import sys

from cli_support import run

from klformer.lab.terminal import make_console


def test_a_terminals_own_width_goes_first(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console(110).width == 110
    monkeypatch.setenv("COLUMNS", "40")
    assert make_console(110).width == 40


def test_values_that_one_would_copy_are_not_cut(home, capsys, monkeypatch):
    for width in ("40", "110"):
        monkeypatch.setenv("COLUMNS", width)
        out = run(capsys, "list")
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= int(width)


def test_no_color_is_no_color():
    leader, follower = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "TERM": "xterm"}
    command = [sys.executable, "-m", "klformer", "eval"]
    subprocess.run(command, env=environment, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    assert b"\x1b[" not in os.read(leader, 10_000)

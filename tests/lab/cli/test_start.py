"""The first moments of the command: what it imports, how Ctrl-C ends it, and what it says of a bug."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import fails, run
from pydantic import BaseModel

import klformer
from klformer.errors import ArgumentError, ArgumentTypeError, DataError
from klformer.lab.cli import listing

HEAVY = {"matplotlib", "datasets", "tensorboard", "accelerate", "tyro", "rich", "pandas", "torch", "numpy", "pydantic"}

#: Runs command lines one after the other, and says what they have imported of what is watched.
WATCHED = """
import contextlib, io, sys
from klformer.lab.cli.main import main

watched, *lines = sys.argv[1:]
for line in lines:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line.split())
    print(*(name for name in watched.split() if name in sys.modules))
"""


def imported(watched, *lines):
    """What of the watched modules is imported after each command line."""
    command = [sys.executable, "-c", WATCHED, " ".join(watched), *lines]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in printed.splitlines()]


def test_what_needs_no_command_imports_nothing_heavy():
    assert imported(HEAVY, "--version", "--help", "trian", "--plugin x --help", "") == [set()] * 5


def test_commands_import_what_they_need_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watched = {"matplotlib", "accelerate", "datasets", "klformer.lab.bench.peers", "klformer.lab.bench.layer"}
    assert imported(watched, "list", "train --training.batch-size 0", "bench layer --help") == [
        set(),
        {"accelerate"},
        {"accelerate", "klformer.lab.bench.layer"},
    ]


def test_the_version_takes_a_moment():
    script = "import sys, time; from klformer.lab.cli.main import main; main(['--version']); print(time.process_time())"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert float(printed.split()[-1]) < 0.75


@pytest.mark.parametrize("command", [[sys.executable, "-m", "klformer"], [Path(sys.executable).parent / "klformer"]])
def test_the_installed_command(command):
    printed = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert printed == f"klformer {klformer.__version__}\n"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_reader_that_leaves_is_no_error(argument):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "klformer", argument], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.fixture
def interrupts():
    """Processes that are started can be interrupted, also where the tests themselves were told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


#: A torch that says when its import begins, takes long, and turns an interrupt into an error of its own.
SLOW_TORCH = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    raise ImportError("initialization failed")
"""


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_during_imports_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(klformer.__file__).parent.parent}"}
    with subprocess.Popen(
        [sys.executable, "-m", "klformer", "train"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert errors == "klformer: interrupted\n"
    assert process.returncode == 130


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("seconds", [0.1, 0.5])
def test_an_interrupt_at_an_early_moment_is_one_line(seconds):
    command = [sys.executable, "-c", "from klformer.lab.cli.main import main; print(flush=True); main()", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors == "klformer: interrupted\n"
    assert process.returncode == 130


def raising(error):
    def function(*arguments, **keywords):
        raise error

    return function


def test_a_bug_keeps_its_traceback_and_says_what_to_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLFORMER_PLUGINS", "")
    monkeypatch.setattr(listing, "attention_options", raising(ValueError("a shape is wrong")))
    (tmp_path / "some plug.py").touch()
    error = fails(capsys, 1, "--plugin", "some plug.py", "list")
    *trace, last = error.splitlines()
    assert "Traceback" in trace[0]
    assert trace[-1] == "ValueError: a shape is wrong"
    assert "bug of klformer" in last
    assert klformer.__version__ in last
    assert last.endswith("klformer --plugin 'some plug.py' list")
    assert "klformer: a shape is wrong" not in error


def validation_error():
    class Model(BaseModel):
        size: int

    with pytest.raises(ValueError, match="size") as caught:
        Model(size="x")
    return caught.value


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArgumentError("size must be 1"), 2, "klformer: size must be 1\n"),
        (ArgumentTypeError("size must be an int"), 2, "klformer: size must be an int\n"),
        (DataError("has no rows", file=Path("a.csv")), 1, "klformer: a.csv: has no rows\n"),
        (FileNotFoundError(2, "No such file or directory", "a.csv"), 1, "klformer: a.csv: No such file or directory\n"),
        (KeyboardInterrupt(), 130, "klformer: interrupted\n"),
        (validation_error(), 2, None),
    ],
)
def test_what_the_user_can_put_right_is_one_line(capsys, monkeypatch, error, code, message):
    monkeypatch.setattr(listing, "attention_options", raising(error))
    said = fails(capsys, code, "list")
    assert said == message or (message is None and said.startswith("klformer: size: Input should be a valid integer"))
    assert said.count("\n") == 1


def test_ctrl_c_is_left_to_others_after_the_imports(capsys, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    handlers = []
    monkeypatch.setattr(listing, "_tasks", lambda: handlers.append(signal.getsignal(signal.SIGINT)) or [])
    run(capsys, "list")
    assert handlers == [before]
    assert signal.getsignal(signal.SIGINT) is before

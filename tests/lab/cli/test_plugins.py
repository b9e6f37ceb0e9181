"""Plugins: modules that register attentions and tasks, named by a flag, the environment or an installed package."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from cli_support import fails, run
from support import TINY

from klformer import plugins
from klformer.attention.registry import ATTENTIONS
from klformer.errors import ArgumentError
from klformer.lab.tasks import TASKS
from klformer.plugins import PluginError, load_plugin, load_plugins

ATTENTION = """
from klformer.attention.registry import register_attention
from klformer.attention.softmax import SoftmaxAttention

register_attention("{name}", SoftmaxAttention, "softmax by another name")
"""
TASK = """
from klformer.lab.tasks import TASKS, Sparsity

class Sums(Sparsity):
    name = "sums"
    summary = "sums of somebody else"

TASKS.add("sums", Sums)
"""


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch):
    """What a plugin registers and imports is forgotten after the test."""
    monkeypatch.setattr(ATTENTIONS, "_entries", dict(ATTENTIONS._entries))
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.ENVIRONMENT, "")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "plug" in name:
            del sys.modules[name]


def write(folder, name, text):
    (folder / f"{name}.py").write_text(text)


def test_what_a_plugin_registers_is_listed_and_trained(home, capsys):
    write(home, "my_plug", ATTENTION.format(name="mine") + TASK)
    out = run(capsys, "--plugin", "my_plug", "list")
    assert "softmax by another name" in out
    assert "sums of somebody else" in out
    assert os.environ["KLFORMER_PLUGINS"] == "my_plug"
    assert "test accuracy" in run(capsys, "--plugin=my_plug", "train", "--attention", "mine", *TINY)


def test_several_plugins_as_files_and_modules_are_each_imported_once(home, capsys):
    (home / "folder").mkdir()
    write(home / "folder", "random", ATTENTION.format(name="first"))
    write(home, "second_plug", ATTENTION.format(name="second"))
    (home / "link").symlink_to(home / "folder")
    names = ["folder/random.py", "second_plug", "second_plug.py", home / "folder" / "random.py", "link/random.py"]
    out = run(capsys, *(part for name in names for part in ("--plugin", name)), "list")
    assert out.count("softmax by another name") == 2
    assert load_plugin("folder/random.py") is load_plugin(str(home / "folder" / "random.py"))
    assert load_plugin("second_plug.py") is load_plugin("second_plug")


def test_processes_that_are_started_get_the_same_plugins(home, capsys):
    write(home, "child_plug", "print('hello from the plugin')")
    run(capsys, "--plugin", "child_plug.py", "list")
    assert os.environ["KLFORMER_PLUGINS"] == str(home / "child_plug.py")
    (home / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "klformer.lab.bench", "no-such-measurement"],
        capture_output=True,
        text=True,
        cwd=home / "elsewhere",
        check=False,
    )
    assert done.stdout == "hello from the plugin\n"


def test_the_environment_names_plugins(home, capsys, monkeypatch):
    write(home, "one_plug", ATTENTION.format(name="one"))
    write(home, "two_plug", ATTENTION.format(name="two"))
    monkeypatch.setenv("KLFORMER_PLUGINS", "one_plug, two_plug.py,")
    assert run(capsys, "--plugin", "one_plug", "list").count("softmax by another name") == 2
    assert os.environ["KLFORMER_PLUGINS"] == f"one_plug,{home / 'two_plug.py'}"


def test_a_plugin_that_is_not_there_says_what_was_looked_for(home, capsys):
    error = fails(capsys, 2, "--plugin", "no_such_plug", "list")
    assert f"there is no plugin 'no_such_plug': no module of that name is installed or in {home}" in error
    assert "there is no plugin 'a/b.py': no file" in fails(capsys, 2, "--plugin", "a/b.py", "list")
    assert "there is no plugin 'no_such.plug'" in fails(capsys, 2, "--plugin", "no_such.plug", "list")
    assert "--plugin needs a module" in fails(capsys, 2, "--plugin")
    for strange in ("a,b", "", ".", "a\0.py"):
        assert f"without a comma or null, got {strange!r}" in fails(capsys, 2, "--plugin", strange, "list")


@pytest.mark.parametrize("name", ["bad_plug", "bad_plug.py", "bad_plug_package.inside"])
def test_an_error_inside_of_a_plugin_is_shown_and_named(home, capsys, name):
    write(home, "bad_plug", "def helper():\n    import no_such_dependency\n\nhelper()\n")
    (home / "bad_plug_package").mkdir()
    write(home / "bad_plug_package", "__init__", "import bad_plug")
    write(home / "bad_plug_package", "inside", "")
    error = fails(capsys, 1, "--plugin", name, "list")
    first, second, *_, cause, last = error.splitlines()
    assert first == "Traceback (most recent call last):"
    assert str(home) in second
    assert cause == "ModuleNotFoundError: No module named 'no_such_dependency'"
    assert last == f"klformer: the plugin {name!r} failed: {cause}"
    assert "importlib" not in error


def test_installed_packages_bring_plugins_and_a_broken_one_is_named(home, capsys, monkeypatch):
    write(home, "entry_plug", ATTENTION.format(name="installed"))
    write(home, "broken_plug", "1 / 0")
    monkeypatch.syspath_prepend(home)
    found = [EntryPoint("one", "entry_plug", plugins.ENTRY_POINTS)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "klformer.plugins" else [])
    assert "installed" in run(capsys, "list")
    assert "installed" in run(capsys, "list")
    found.append(EntryPoint("two", "broken_plug", plugins.ENTRY_POINTS))
    error = fails(capsys, 1, "list")
    assert "the plugin 'broken_plug', which an unknown package brings, failed: ZeroDivisionError" in error
    assert "1 / 0" in error
    assert "klformer 0" in run(capsys, "--version")


def test_no_plugin_is_imported_for_help_and_version(home, capsys):
    write(home, "loud_plug", "raise SystemExit('imported')")
    assert run(capsys, "--plugin", "loud_plug", "--version").startswith("klformer ")
    assert fails(capsys, 0, "--plugin", "loud_plug", "--help") == ""


def test_unknown_names_may_come_from_a_plugin(home, capsys):
    hint = "if it comes from a plugin, give --plugin MODULE before the command"
    for arguments in (
        ["train", "--task", "sums"],
        ["train", "--attention", "mine"],
        ["data", "check", "--task", "sums"],
    ):
        error = fails(capsys, 2, *arguments)
        assert "unknown" in error
        assert hint in error


def test_library_users_can_load_plugins_too(home):
    write(home, "own_plug", "value = 7")
    assert load_plugin("own_plug").value == 7
    with pytest.raises(ArgumentError, match="no module of that name"):
        load_plugin("other_plug")
    write(home, "failing_plug", "raise KeyError('x')")
    with pytest.raises(PluginError, match=r"'failing_plug\.py' failed: KeyError"):
        load_plugins(["failing_plug.py"])


def test_what_a_plugin_gives_is_not_taken_for_ours(home, capsys):
    write(home, "bad_plug", BAD)
    error = fails(capsys, 1, "--plugin", "bad_plug", "train", "--task", "beyond", "--attention", "softmax", *TINY[2:])
    assert "train of beyond has the token id 8; ids must be below 3, the size of the vocabulary" in error
    shape = "must be floating-point of shape (4 or 1,"
    for name, message in (
        ("misshapen", "Misshapen must give a tensor of shape (16, 4, 1, 4), gave (16, 1, 1, 4)"),
        ("flat-prf", f"Flat.frequencies() {shape} R, 4), got torch.float32 of shape (4, 64)"),
        ("nothing-rks", f"Nothing.frequencies() {shape} R, 4), got NoneType"),
        ("heavy-prf", f"Heavy.log_weights() {shape} 64), got torch.float32 of shape (3,)"),
    ):
        error = fails(capsys, 2, "--plugin", "bad_plug", "train", "--task", "sparsity", "--attention", name, *TINY)
        assert error.endswith(f"klformer: {message}\n")
        assert "Traceback" not in error
    error = fails(capsys, 1, "--plugin", "bad_plug", "train", "--task", "failing", "--attention", "softmax", *TINY[2:])
    assert error.endswith("\nklformer: the plugin bad_plug failed: ZeroDivisionError: division by zero\n")


def test_memory_that_is_not_there_is_no_bug(home, capsys, monkeypatch):
    def greedy(*args, **kwargs):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("klformer.lab.runs.train.build_model", greedy)
    error = fails(capsys, 1, "train", "--attention", "softmax", *TINY)
    assert "\nklformer: out of memory (err == 0. DefaultCPUAllocator: can't allocate memory): a smaller" in error
    assert "Traceback" not in error


BAD = """
import numpy as np
import torch
import klformer
from klformer.attention.softmax import SoftmaxAttention
from klformer.lab.data import Examples, Sequences


class Misshapen(SoftmaxAttention):
    def attend(self, q, k, v, *, key_mask, causal):
        return v[:, :1, :1]


@klformer.register_task
class Beyond(klformer.Task):
    name, title, summary = "beyond", "Beyond", "ids beyond the vocabulary"
    num_classes, vocab_size, default_max_len = 2, 3, 9

    def read(self, part):
        ids = np.arange(900).reshape(100, 9) % 9
        return Examples(Sequences.from_matrix(ids), np.arange(100) % 2)


@klformer.register_task
class Failing(Beyond):
    name = "failing"

    def read(self, part):
        return 1 / 0


class Flat(klformer.SpectralDistribution):
    def __init__(self, *, num_heads, head_dim, num_frequencies=8):
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        self.omega = torch.nn.Parameter(torch.ones(num_heads, num_frequencies, head_dim))

    def resample(self, generator=None):
        pass

    def frequencies(self):
        return self.omega[..., 0]


class Nothing(Flat):
    def frequencies(self):
        return None


class Heavy(Flat):
    def frequencies(self):
        return self.omega

    def log_weights(self):
        return self.omega[0, 0, :3]


for spectrum in (Flat, Nothing, Heavy):
    klformer.register_spectrum(spectrum.__name__.lower(), spectrum)
klformer.register_attention("misshapen", Misshapen, "a result of another shape")
"""

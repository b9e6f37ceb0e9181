"""Python blocks of all pages run as they stand, page by page, and print what stands below them.

A block that can't be run here has a comment above it: <!-- not run: why -->. A block of text right after a Python block
is what it prints.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from klformer.attention.registry import ATTENTIONS
from klformer.kernels import SPECTRA
from klformer.lab.cli.main import COMMANDS
from klformer.lab.tasks import TASKS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")]
)
#: Pages whose blocks another test runs.
ELSEWHERE = {"docs/tutorials/convert.md": "tests/conversion/test_tutorial.py"}
#: Plugins that need no page: words for any, and folders of a clone.
THERE = {"MODULE", "my_module", "path/to/file.py", "research", "benchmarks"}
BLOCK = re.compile(
    r"(?P<comment><!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
#: A command with a plugin, in a block or between backticks: the plugin, and what follows it.
PLUGIN = re.compile(r"(?:^ {4}|`)klformer --plugin (\S+) ([^`\n]+)", re.MULTILINE)
WITH_CODE = [page for page in PAGES if "```python" in page.read_text() and str(page.relative_to(ROOT)) not in ELSEWHERE]


def plugins_of(page):
    """The plugins that a page writes: its blocks of commands use them."""
    return set(re.findall(r"^ {4}klformer --plugin (\S+)", page.read_text(), flags=re.MULTILINE)) - THERE


def commands_with(plugins):
    """What follows these plugins in commands of all pages, in blocks, sentences and tables."""
    for page in PAGES:
        for plugin, line in PLUGIN.findall(page.read_text()):
            if plugin in plugins:
                yield line


def test_plugins_of_commands_are_written_on_some_page():
    written = set().union(*map(plugins_of, WITH_CODE))
    for page in PAGES:
        assert {plugin for plugin, _ in PLUGIN.findall(page.read_text())} <= written | THERE, page


def test_commands_with_a_plugin_are_found_in_tables():
    assert "train --task recall --attention laplace-rks" in commands_with({"laplace.py"})
    assert PLUGIN.findall("| a | `klformer --plugin a.py list` |") == [("a.py", "list")]


def test_every_block_of_python_is_seen():
    for page in WITH_CODE:
        text = page.read_text()
        assert len(list(BLOCK.finditer(text))) == text.count("```python"), page


def test_pages_that_are_run_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert (ROOT / page).exists()
        assert Path(page).name in (ROOT / test).read_text()


def test_the_readme_runs_as_a_script_without_a_warning(tmp_path):
    block = next(BLOCK.finditer((ROOT / "README.md").read_text()))
    script = tmp_path / "example.py"
    script.write_text(block["code"])
    result = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "torch.Size([2, 1000, 64])\n"


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run_and_print_what_the_page_says(page, home, monkeypatch):
    for registry in (ATTENTIONS, SPECTRA, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(page.read_text()):
        if block["comment"]:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], str(page), "exec"), names)
        if block["output"] is not None:
            assert printed.getvalue() == block["output"]
    # What the page registers is known now: commands with its plugin are read, too, here and on other pages.
    for line in commands_with(plugins_of(page)):
        name, *arguments = shlex.split(line, comments=True)
        import_module(COMMANDS[name].module).COMMAND.parse(arguments, f"klformer {name}")

"""What the docs say is there: links lead somewhere, named files exist, and the command line reads the commands."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from klformer.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:klformer|tests|docs|examples)/[\w./*-]+)`")
#: Commands inside of sentences and tables.
INLINE = re.compile(r"`(klformer [^`]+)`")
#: Where an argument stands for whatever the reader has.
PLACEHOLDER = re.compile(r"^[A-Z][A-Z_]+$")


def code_blocks(text):
    """The lines of indented and fenced blocks, with continued lines joined."""
    fenced = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    without = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = [line[4:] for line in without.splitlines() if line.startswith("    ")]
    for block in [*fenced, "\n".join(indented)]:
        yield from block.replace("\\\n", " ").splitlines()


def commands_of(page):
    for line in code_blocks(page.read_text()):
        if line.startswith("klformer "):
            words = shlex.split(line, comments=True)
            if "--plugin" not in words:
                yield words[1:]
    for line in INLINE.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        words = line.split()
        # In a sentence commands may be named without their arguments.
        if (
            not {"--plugin", "--help", "--version", "\\|", "|"} & set(words)
            and "..." not in line
            and (len(words) > 3 or "--" in line)
        ):
            yield words[1:]


def anchor(heading):
    """The name that a heading has as the target of a link."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page.name} links to {target}, which has no such heading"


@every_page
def test_files_that_are_named_exist(page):
    missing = [name for name in NAMED_FILE.findall(page.read_text()) if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


@every_page
def test_commands_are_read_by_the_command_line(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, *arguments in commands_of(page):
        assert name in COMMANDS, f"{page.name}: klformer {name} is no command"
        if any(PLACEHOLDER.match(argument) for argument in arguments if argument not in ("DATA", "RUN", "RUNS")):
            continue
        # There is no run to go on with here; what else is said must be read all the same.
        arguments = [argument for argument in arguments if argument != "--resume"]
        import_module(COMMANDS[name].module).COMMAND.parse(arguments, f"klformer {name}")

"""What the docs say is there: links lead somewhere, named files exist, and the command line reads the commands."""

import argparse
import inspect
import json
import re
import runpy
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

import benchmarks  # noqa: F401
import research  # noqa: F401
from klformer.lab.cli.analyze import ANALYSES
from klformer.lab.cli.bench import BENCHMARKS
from klformer.lab.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")])
MEASURED = ("klformer/lab/analysis/measured.json", "examples/conversion/measured.json")
DATA = [*sorted((ROOT / "research/data").glob("*.json")), *(ROOT / name for name in MEASURED)]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

COMMENT = re.compile(r"<!--.*?-->", flags=re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:klformer|research|benchmarks|tests|docs|examples)/[\w./*-]+)`")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
#: What may stand before a command: variables of the environment, and torchrun with its own flags.
PREFIX = r"(?:\w+=\S* +)*(?:torchrun .*?-m +)?"
#: Plugins of this repository: they are registered here.
OWN = "(?:--plugin (?:research|benchmarks) +)?"
COMMAND = re.compile(rf"^{PREFIX}klformer +{OWN}(?P<rest>.+)$")
#: Commands inside of sentences and tables.
INLINE = re.compile(rf"`{PREFIX}klformer +{OWN}([^`]+)`")
#: What the commands of data may be instead: a script or a test of the project, or the place of other commands.
SCRIPT = re.compile(r"^(?:\w+=\S* +)*python (?:-m pytest )?(?P<file>[\w./-]+\.py)\b")
MODULE = re.compile(r"^python -m (?P<module>(?:klformer|research)[\w.]+)\b")
ELSEWHERE = re.compile(r"^see (?P<file>[\w./-]+\.json)$")
#: A script of the project with arguments.
EXAMPLE = re.compile(r"^ {4}python (examples/[\w/]+\.py +\S.*)$", flags=re.MULTILINE)
LOOP = re.compile(r"^for (?P<variable>\w+) in (?P<values>.+); do$")
#: Words that stand for whatever the reader has, where the command line knows the choices. Others are folders and files.
DUMMIES = {"TASK": "listops", "NAME": "gmm-rks", "FEATURES": "difference", "N": "2"}
#: Flags that read a run, which is not there: what else is said must be read all the same.
NEEDS_A_RUN = re.compile(r" --resume\b| --init-from \S+")


def code_blocks(text):
    """The lines of indented and fenced blocks, with continued lines joined."""
    shells = [block for language, block in FENCED.findall(text) if language in ("", "bash", "sh", "console")]
    indented = "\n".join(line[4:] for line in FENCED.sub("", text).splitlines() if line.startswith("    "))
    for block in [*shells, indented]:
        yield from block.replace("\\\n", " ").splitlines()


def commands_of(text):
    """The words of every command after `klformer`. A loop of the shell gives one command for each of its values."""
    loop = None
    for line in map(str.strip, code_blocks(text)):
        if line == "done":
            loop = None
        elif starts := LOOP.match(line):
            loop = starts
        elif found := COMMAND.match(line):
            variable = f"${loop['variable']}" if loop else ""
            for value in loop["values"].split() if loop else [""]:
                yield words_of(found["rest"].replace(variable, value) if variable else found["rest"])
    for line in INLINE.findall(FENCED.sub("", text)):
        words = words_of(line)
        # In a sentence commands may be named without their arguments.
        if not {"--help", "--version", "\\|", "|"} & set(words) and (len(words) > 2 or "--" in line):
            yield words


def words_of(line):
    words = shlex.split(NEEDS_A_RUN.sub("", line), comments=True)
    return [DUMMIES.get(word, word).removesuffix("...") for word in words if word != "..."]


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
    for words in commands_of(page.read_text()):
        if words[0] != "--plugin":  # tests/docs/test_code.py reads those, once the plugin is registered
            read_by_the_command_line(words, page)


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.name)
def test_commands_of_data_are_read_by_the_command_line(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for line in "\n".join(json.loads(file.read_text())["commands"].values()).splitlines():
        if found := COMMAND.match(line):
            read_by_the_command_line(words_of(found["rest"]), file)
        elif found := SCRIPT.match(line) or ELSEWHERE.match(line):
            assert (ROOT / found["file"]).exists(), f"{file.name}: {line}"
        else:
            found = MODULE.match(line)
            assert found, f"{file.name}: {line} is no command"
            assert find_spec(found["module"]), f"{file.name}: {line}"


def read_by_the_command_line(words, place):
    name, *arguments = words
    assert name in COMMANDS, f"{place.name}: klformer {name} is no command"
    import_module(COMMANDS[name].module).COMMAND.parse(arguments, f"klformer {name}")


class ArgumentsReadError(Exception):
    """The arguments were read: the rest of the script is not for this test."""


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in EXAMPLE.findall(page.read_text())}))
def test_arguments_of_examples_are_read_by_their_scripts(line, monkeypatch):
    pytest.importorskip("transformers")
    script, *arguments = shlex.split(line, comments=True)
    read = argparse.ArgumentParser.parse_args

    def stop(parser):
        read(parser)
        raise ArgumentsReadError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr("sys.argv", [script, *arguments])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(ArgumentsReadError):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def first_sentence(module):
    """What the help of an analysis or a benchmark begins with."""
    options = get_type_hints(import_module(module).run)["options"]
    return inspect.getdoc(options).split("\n\n")[0].replace("\n", " ").removesuffix(".")


def test_the_reference_has_every_command_with_its_help():
    rows = re.findall(
        r"^\| \[?`([\w-]+)`[^|]*\| ([^|]+) \|", (ROOT / "docs/reference/commands.md").read_text(), re.MULTILINE
    )
    summaries = {name: entry.summary for name, entry in COMMANDS.items()}
    groups = [(name, group[name]) for group in (ANALYSES, BENCHMARKS) for name in group]
    from_a_clone = [entry for entry in groups if not entry[1].startswith("klformer.")]
    modules = [entry for entry in groups if entry not in from_a_clone] + from_a_clone
    assert rows == [*summaries.items(), *((name, first_sentence(module)) for name, module in modules)]


def test_every_command_of_the_reference_has_its_own_example():
    text = (ROOT / "docs/reference/commands.md").read_text()
    rows = re.findall(r"^\| \[?`(\w+)`[^|]*\|[^|]*\| `klformer (\w+)[^`]*` \|$", text, re.MULTILINE)
    assert rows == [(name, name) for name in COMMANDS]


def test_every_page_is_in_the_menu_of_the_site():
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def words_in(page):
    """How many words a page has, those of tables and code too, without comments and the lines of tables."""
    return sum(any(map(str.isalnum, word)) for word in COMMENT.sub("", page.read_text()).split())


def test_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
    counts = {str(page.relative_to(ROOT / "docs")): words_in(page) for page in (ROOT / "docs").rglob("*.md")}
    limits = {"evidence/efficiency.md": 1200, "evidence/conversion.md": 1000}
    assert not [name for name, count in counts.items() if count > limits.get(name, 1500)]
    assert sum(counts.values()) <= 28_000


def test_commands_are_found_behind_what_stands_before_them():
    text = """
Type `OMP_NUM_THREADS=1 klformer demo --out DIR`, or `klformer list`.

    A=1 B= klformer bench ops --lengths 1 \\
      --repeats 2            # and more
    torchrun --nproc-per-node 2 -m klformer train --task TASK --resume
    for kernel in periodic gaussian; do
      klformer compare --data.kernel $kernel
    done
    klformer: an error message

```python
klformer train
```

```text
klformer = 1
```

    klformer curves RUN...
"""
    assert [" ".join(words) for words in commands_of(text)] == [
        "bench ops --lengths 1 --repeats 2",
        "train --task listops",
        "compare --data.kernel periodic",
        "compare --data.kernel gaussian",
        "curves RUN",
        "demo --out DIR",
    ]

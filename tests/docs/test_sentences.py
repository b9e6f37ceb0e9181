"""One sentence a line: no line of prose has two sentences, and no sentence runs over two lines.

A change of one sentence is then a change of one line. Code, tables, headings, figures and comments are no prose.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")])

FENCE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", flags=re.DOTALL)
#: Tables, headings, directives of the reference, HTML and figures by themselves.
NO_PROSE = re.compile(r"^\s*(\||#|:::|<|!\[[^\]]*\]\([^)]*\)$)")
ITEM = re.compile(r"^\s*([-*]|\d+\.) +")
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
#: Points that end no sentence.
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|al|[Ee]qs?|[Ff]igs?|[Nn]o|s\.e)\.(?=\s)|\.\.\.")
#: The end of a sentence, with the brackets, quotes and stars that close with it.
END = r"[.!?][)\]\"'*_]*"


def blocks_of(text):
    """Paragraphs and items of lists, each as its lines, without what is no prose."""
    block, code = [], False
    for line in [*COMMENT.sub("", FENCE.sub("", text)).splitlines(), ""]:
        # An indented line is code after an empty line or after code; otherwise it goes on with its paragraph.
        code = line.startswith("    ") and (code or not block) and not ITEM.match(line)
        if block and (code or not line.strip() or NO_PROSE.match(line) or ITEM.match(line)):
            yield block
            block = []
        if line.strip() and not code and not NO_PROSE.match(line):
            block.append(plain(line))


def plain(line):
    """A line without its marker of a list, with words in the place of code and of links."""
    line = LINK.sub(r"\1", CODE.sub("code", ITEM.sub("", line)))
    return ABBREVIATION.sub("abbreviation", line).strip()


def problems_of(text):
    """Lines that have two sentences, and lines that end before their sentence does."""
    for block in blocks_of(text):
        yield from (f"two sentences: {line}" for line in block if re.search(END + r"\s", line))
        for line, following in pairwise(block):
            if not re.search(END + "$", line):
                yield f"a sentence over two lines: {line} / {following}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_one_sentence_a_line(page):
    assert not list(problems_of(page.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "One sentence.\nAnother one, of `code. And more`, e.g. this, and 1.5 of 2.\n",
        "A list follows:\n- an item without an end\n- One.\n  Two.\n1. One.\n   Two.\n",
        "It prints\n\n    a. B. C.\n\n    d. e\n\nand ends.\n",
        "```text\nA. B\nc\n```\n\n| a. b | c. d |\n|---|---|\n\n# A. B\n\n<!-- A. B\nC -->\n![A. B](c.png)\n",
        "**Is it one?**\nYes (really).\n*Measured: today.*\nSee [a. b](c.md).\n".replace("a. b", "a.b"),
        "Code of a list:\n\n- One.\n\n      a. b\n",
    ],
)
def test_what_is_right(text):
    assert not list(problems_of(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("One. Two.\n", "two sentences"),
        ("**One.** Two.\n", "two sentences"),
        ("Is it? it is.\n", "two sentences"),
        ("- One (really.) Two\n", "two sentences"),
        ("A sentence that\ngoes on.\n", "over two lines"),
        ("- An item that\n  goes on.\n", "over two lines"),
        ("The end of `code`\ngoes on.\n", "over two lines"),
    ],
)
def test_what_is_wrong(text, problem):
    (found,) = problems_of(text)
    assert problem in found

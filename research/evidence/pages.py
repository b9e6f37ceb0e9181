"""Tables of the docs are made of the data that they speak of, never typed.

    python -m research.evidence.pages docs research/pages README.md   renders the pages of folders, and another page
    python -m research.evidence.pages docs --check                    says which would change, and exits with 1 if any

A table stands between two comments of a page. The first names the kind of the table, the data (a file from the
project's root, or several with commas between) and the rows to take, as field=value with the words in quotes where they
have spaces:

    <!-- table learned data/recall.json "setting=recall-laptop: accuracy, %" draw=redrawn,none -->
    <!-- /table -->

A value may be several, separated by commas without spaces. A row that nothing was measured for is not written; a
selection without any row is an error. Kinds that let a page choose their columns take them the same way:

    <!-- table means data/variance.json task=text by=attention "show=rsd:RSD,pi:PI, %" -->
    <!-- table paired data/variance.json by=task "show=pi:PI, %" of=gmm-prf minus=gmm-rks -->

The kind `measured` is no table: it is the sentence that says when and where the rows of one setting were measured.

    <!-- table measured data/efficiency.json setting=operators -->

Beside its rows a file of data has for readers:

    caption      what the rows are, in a sentence
    environment  versions, processor and date of the measurement
    differs      where a setting was measured in another environment, what is other there
    commands     for every setting what makes its rows, a command a line

keep.py puts what a command wrote into such a file.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError, FileError
from klformer.lab.analysis.cells import Row
from research.evidence.printed import printed
from research.evidence.tables import COLUMN_OPTIONS, KINDS

#: Where pages name their data from.
ROOT = Path(__file__).parents[2]
#: What is asked for as a table, and is a sentence.
MEASURED = "measured"
_TABLE = re.compile(r"(<!-- table (?P<words>.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)


def render(text: str, root: Path, place: str) -> str:
    """A page with its tables made again.

    Args:
        text: The page.
        root: Where the data is named from.
        place: What to call the page in errors.

    Raises:
        ArgumentError: a comment names no kind of tables, or a selection without rows.
        FileError: the data can't be read.
    """

    def table(found: re.Match[str]) -> str:
        kind, files, *words = shlex.split(found["words"])
        if kind == MEASURED:
            return f"{found[1]}\n{_measured(_read(root / files), words, place)}\n{found[3]}"
        if kind not in KINDS and ":" not in kind:
            known = ", ".join((*KINDS, MEASURED))
            raise ArgumentError(f"{place}: unknown kind of table {kind!r}; known are {known}, and module:function")
        conditions = conditions_of(words)
        options = COLUMN_OPTIONS.get(kind, () if kind in KINDS else ("show", "without"))
        columns = {option: conditions.pop(option) for option in options if option in conditions}
        rows = selected([row for file in files.split(",") for row in _read(root / file)["rows"]], conditions)
        if not rows:
            raise ArgumentError(f"{place}: {files} has no row with {', '.join(words)}")
        made = KINDS[kind](rows, **columns) if kind in KINDS else printed(kind, rows, **columns)
        return f"{found[1]}\n{made}\n{found[3]}"

    return _TABLE.sub(table, text)


def _read(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        data["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"{file} can't be read as data of a table: {error}") from error
    return data


def _measured(data: Mapping[str, Any], words: Sequence[str], place: str) -> str:
    """When and where a setting was measured."""
    asked = conditions_of(words)
    settings = asked.get("setting", [])
    if asked.keys() != {"setting"} or len(settings) != 1 or settings[0] not in data["commands"]:
        known = ", ".join(data["commands"])
        raise ArgumentError(f"{place}: `{MEASURED}` must have setting= one of {known}; got {' '.join(words)}")
    where = data["environment"] | data.get("differs", {}).get(settings[0], {})
    threads = "one thread" if where["threads"] == 1 else f"{where['threads']} threads"
    return f"*Measured: {where['date']}, {where['processor']}, {threads}, torch {where['torch']}.*"


def conditions_of(words: Iterable[str]) -> dict[str, list[str]]:
    """What rows must have, by field: words field=value, or several values with commas between."""
    return {field: _values(values) for field, _, values in (word.partition("=") for word in words)}


def _values(text: str) -> list[str]:
    """What stands between commas. The name of a setting has commas too, with spaces behind them."""
    return re.split(r",(?! )", text)


def selected(rows: Sequence[Row], conditions: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows that have one of the values of every field."""
    return [row for row in rows if all(str(row.get(field)) in values for field, values in conditions.items())]


def main() -> None:
    """Render pages, named from the project's root."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", type=Path, nargs="+", help="pages, or folders of pages")
    parser.add_argument("--check", action="store_true", help="change nothing, and say what would change")
    options = parser.parse_args()
    changed = []
    for place in options.places:
        for page in sorted(place.rglob("*.md")) if place.is_dir() else [place]:
            before = page.read_text()
            after = render(before, ROOT, str(page))
            if after != before:
                changed.append(str(page))
                if not options.check:
                    page.write_text(after)
    if changed:
        print(("not as the data says: " if options.check else "rendered: ") + ", ".join(changed))
    sys.exit(1 if options.check and changed else 0)


if __name__ == "__main__":
    main()

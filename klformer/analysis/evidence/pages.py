"""Tables of the docs are made of the data that they speak of, never typed.

    python -m klformer.analysis.evidence.pages docs           renders every page of a folder again
    python -m klformer.analysis.evidence.pages docs --check   says which would change, and exits with 1 if any

A table stands between two comments of a page. The first names the kind of the table, the data (a file, from the
project's root) and the rows to take, as field=value with the words in quotes where they have spaces:

    <!-- table learned data/recall.json "setting=recall-laptop: accuracy, %" draw=redrawn,none -->
    <!-- /table -->

A value may be several, separated by commas without spaces. A row that nothing was measured for is not written; a
selection without any row is an error.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError, FileError

Row = Mapping[str, Any]

_TABLE = re.compile(r"(<!-- table (?P<words>.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
#: A difference is marked where it is more than so many standard errors, of at least so many pairs.
_ERRORS, _PAIRS = 2, 3


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
        kind, file, *conditions = shlex.split(found["words"])
        if kind not in KINDS:
            raise ArgumentError(f"{place}: unknown kind of table {kind!r}; known are {', '.join(KINDS)}")
        rows = _selected(_read(root / file), conditions)
        if not rows:
            raise ArgumentError(f"{place}: {file} has no row with {', '.join(conditions)}")
        return f"{found[1]}\n{KINDS[kind](rows)}\n{found[3]}"

    return _TABLE.sub(table, text)


def learned_or_frozen(rows: Sequence[Row]) -> str:
    """An attention learned, frozen, and the difference; bold where it is more than chance. Of several settings, each
    row names its own."""
    headings = ["attention", "draw", "seeds", "learned", "frozen", "learned - frozen"]
    several = len({row["setting"] for row in rows}) > 1
    if several:
        headings = ["setting", *headings]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        difference = with_spread(row["difference"], row["standard_error"], sign=True)
        beyond = (row["standard_error"] or 0) * _ERRORS < abs(row["difference"] or 0) and row["pairs"] >= _PAIRS
        cells = [
            f"`{row['attention']}`",
            "" if row["draw"] == "none" else row["draw"],
            str(row["seeds"]),
            with_spread(row["learned"], row["learned_std"]),
            with_spread(row["frozen"], row["frozen_std"]),
            f"**{difference}**" if beyond else difference,
        ]
        if several:
            cells = [row["setting"].partition(":")[0], *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def all_fields(rows: Sequence[Row]) -> str:
    """The fields of the rows as columns, but for the setting: names are headings, and numbers have the digits that they
    have in the data. What a row does not have is empty."""
    headings = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "setting"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        cells = {name: "" if row.get(name) is None else str(row[name]) for name in headings}
        if "attention" in cells:
            cells["attention"] = f"`{cells['attention']}`"
        lines.append(f"| {' | '.join(cells.values())} |")
    return "\n".join(lines)


#: What a page may ask for, by its first word.
KINDS: Mapping[str, Callable[[Sequence[Row]], str]] = {"learned": learned_or_frozen, "fields": all_fields}


def with_spread(value: float | None, spread: float | None, *, sign: bool = False) -> str:
    """A number with its deviation or standard error; nothing where there is none."""
    if value is None:
        return ""
    digits = 2 if abs(value) >= 1 or (spread or 0) >= 1 else 4
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text if spread is None else f"{text} +- {spread:.{digits}f}"


def _read(file: Path) -> list[Row]:
    try:
        rows: list[Row] = json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"{file} can't be read as data of a table: {error}") from error
    return rows


def _selected(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    wanted = []
    for condition in conditions:
        field, _, values = condition.partition("=")
        # The name of a setting has commas with spaces.
        wanted.append((field, re.split(r",(?! )", values)))
    return [row for row in rows if all(str(row.get(field)) in values for field, values in wanted)]


def main() -> None:
    """Render the pages of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing, and say what would change")
    options = parser.parse_args()
    changed = []
    for page in sorted(options.folder.rglob("*.md")):
        before = page.read_text()
        after = render(before, options.folder.resolve().parent, str(page))
        if after != before:
            changed.append(str(page))
            if not options.check:
                page.write_text(after)
    if changed:
        print(("not as the data says: " if options.check else "rendered: ") + ", ".join(changed))
    sys.exit(1 if options.check and changed else 0)


if __name__ == "__main__":
    main()

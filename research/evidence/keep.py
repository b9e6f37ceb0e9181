"""Puts what a command wrote into the data of the docs, in the place of what a setting had.

    klformer bench attention --lengths 1024 4096 --out bench
    python -m research.evidence.keep bench/attention.json research/data/attentions.json time

Rows are kept as they were measured, numbers with five digits; field=value takes some of them, as in a page's table:

    python -m research.evidence.keep bench/attention.json research/data/readme.json attention-times \\
      name=softmax,gmm-rks,performer

The command, without the place that it wrote to, becomes that of the setting; its environment that of the file. Where
other settings were measured in another one, `differs` says so. A setting that took several commands has their reports
with commas between:

    python -m research.evidence.keep small.json,large.json research/data/efficiency.json operators

Rows that name their setting, as those of runs do, are taken where it is the one that is asked for, whatever metric
stands behind its colon. --before says what was typed before the command, such as what made the runs:

    klformer analyze evidence runs
    python -m research.evidence.keep analysis/runs.json research/data/text.json text-laptop \\
      --before "klformer compare --task text --seeds 0 1 2 --attentions softmax gmm-prf"

--beside attention,seed leaves rows of attentions and seeds that the report does not have where they are: those of
earlier runs.

--of takes the rows of another setting, under the name that is asked for, such as those of a sweep:

    python -m research.evidence.keep analysis/runs.json research/data/decisions.json \\
      "drawn every step" --of "sparsity0.5-laptop training.resample_every=1"
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError
from klformer.files import read_json, write_text
from research.evidence.pages import conditions_of, selected

#: What data says of the machine; `machine` says it again in words.
_ENVIRONMENT = ("klformer", "torch", "python", "processor", "threads", "date")
_DIGITS = 5
#: What commands call their rows; the first that a report has is taken.
_ROWS = ("rows", "results", "comparisons", "speed")


def together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several reports as one: their rows one after the other, a command a line, the environment of the last.

    Raises:
        ArgumentError: they are from different environments, apart from the date.
    """
    places = [{name: report["environment"][name] for name in _ENVIRONMENT if name != "date"} for report in reports]
    if any(place != places[0] for place in places):
        raise ArgumentError(f"reports of one setting must be from one environment, got {places}")
    return {
        "environment": reports[-1]["environment"],
        "command": "\n".join(report["command"] for report in reports),
        "rows": [row for report in reports for row in _rows(report)],
    }


def keep(
    report: Mapping[str, Any],
    data: Mapping[str, Any],
    setting: str,
    conditions: Mapping[str, Sequence[str]],
    *,
    before: Sequence[str] = (),
    beside: str | None = None,
    of: str | None = None,
) -> dict[str, Any]:
    """The data with what a command reported.

    Args:
        report: With "environment", "command" (a line each) and "rows", or what a command calls them.
        data: What the docs had before.
        setting: What these rows are called in it.
        conditions: What rows must have, by field.
        before: Commands that were typed before the one of the report.
        beside: Fields, with commas between. Old rows of the setting stay where no new one has the same there; without
            it, none stays.
        of: What the setting is called in the report, if not the same.

    Raises:
        ArgumentError: no row has it, or is of the setting; or reports are of several environments.
    """
    found, wanted = _rows(report), setting if of is None else of
    rows = [row for row in selected(found, conditions) if _setting(row) in (None, wanted)]
    if not rows:
        there = ", ".join(dict.fromkeys(name for name in map(_setting, found) if name is not None)) or "no setting"
        raise ArgumentError(
            f"no row of the report has {dict(conditions)} and is of the setting {wanted!r}; it has {there}"
        )
    rows = [_called(row, wanted, setting) for row in rows]
    replaced = [row for row in data["rows"] if _setting(row) == setting and _is_replaced(row, rows, beside)]
    commands = dict.fromkeys([*before, *map(_without_target, report["command"].splitlines())])
    new = {name: report["environment"][name] for name in _ENVIRONMENT}
    new["date"] = new["date"][:10]
    environments = {name: data["environment"] | data.get("differs", {}).get(name, {}) for name in data["commands"]}
    differs = {name: _difference(old, new) for name, old in environments.items() if name != setting}
    differs = {name: other for name, other in differs.items() if other}
    return {
        "caption": data["caption"],
        "environment": new,
        **({"differs": differs} if differs else {}),
        "commands": data["commands"] | {setting: "\n".join(commands)},
        "rows": _with(data["rows"], [rounded(row) for row in rows], in_place_of=replaced),
    }


def as_text(data: Mapping[str, Any]) -> str:
    """JSON with a row a line."""
    head = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=2, ensure_ascii=False)
    rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in data["rows"])
    return f'{head.removesuffix("}").rstrip()},\n  "rows": [\n    {rows}\n  ]\n}}\n'


def _rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = next((name for name in _ROWS if name in report), None)
    if name is None:
        raise ArgumentError(f"a report must have its rows as one of {', '.join(_ROWS)}, got {', '.join(report)}")
    rows: list[dict[str, Any]] = report[name]
    return rows


def _called(row: Mapping[str, Any], before: str, now: str) -> dict[str, Any]:
    """A row of a setting, first of all, that was called otherwise before; a metric behind it stays."""
    name = now + row.get("setting", before).removeprefix(before)
    return {"setting": name, **{field: value for field, value in row.items() if field != "setting"}}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {name: old.get(name) for name in {**new, **old} if old.get(name) != new.get(name)}


def _is_replaced(old: Mapping[str, Any], new: Sequence[Mapping[str, Any]], beside: str | None) -> bool:
    fields = (beside or "").split(",")
    return beside is None or any(all(old[field] == row[field] for field in fields) for row in new)


def _with(rows: Sequence[Mapping[str, Any]], new: Sequence[Any], *, in_place_of: Sequence[Any]) -> list[Any]:
    """The rows with new ones where the first of the old ones was, or at the end."""
    place = next((place for place, row in enumerate(rows) if row in in_place_of), len(rows))
    return [*rows[:place], *new, *(row for row in rows[place:] if row not in in_place_of)]


def _setting(row: Mapping[str, Any]) -> str | None:
    """The setting of a row without its metric; None if it names none."""
    return row["setting"].partition(":")[0] if "setting" in row else None


def rounded(value: Any) -> Any:
    """A row, or an entry of it, with as many digits as data keeps."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _without_target(command: str) -> str:
    """A command without the place that it writes to."""
    words = shlex.split(command)
    for flag in ("--out", "--json"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    return shlex.join(words)


def main() -> None:
    """Put what a command wrote into a file of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="the JSON that a command wrote, or several with commas between")
    parser.add_argument("data", type=Path, help="the file of data, which is there")
    parser.add_argument("setting", help="whose rows these are")
    parser.add_argument("conditions", nargs="*", help="field=value, of the rows to take")
    parser.add_argument("--before", action="append", default=[], help="what was typed before, a command each")
    parser.add_argument("--beside", help="fields by which old rows of the setting stay, such as attention,seed")
    parser.add_argument("--of", help="what the setting is called in the report, if not the same")
    options = parser.parse_args()
    report = together([read_json(Path(name)) for name in options.report.split(",")])
    data, conditions = read_json(options.data), conditions_of(options.conditions)
    kept = keep(report, data, options.setting, conditions, before=options.before, beside=options.beside, of=options.of)
    write_text(options.data, as_text(kept))


if __name__ == "__main__":
    main()

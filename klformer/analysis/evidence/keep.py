"""Puts what a command wrote into the data of the docs, in the place of what a setting had.

    klformer bench attention --lengths 1024 4096 --out bench
    python -m klformer.analysis.evidence.keep bench/attention.json docs/evidence/data/attentions.json time

Rows are kept as they were measured, numbers with five digits; field=value takes some of them, as in a page's table:

    python -m klformer.analysis.evidence.keep bench/attention.json docs/evidence/data/readme.json attention-times \\
      name=softmax,gmm-rks,performer

The command, without the place that it wrote to, becomes that of the setting; its environment that of the file. Where
other settings were measured in another one, `differs` says so.

Rows that name their setting, as those of runs do, are taken where it is the one that is asked for, whatever metric
stands behind its colon. --before says what was typed before the command, such as what made the runs:

    klformer analyze evidence runs
    python -m klformer.analysis.evidence.keep analysis/runs.json docs/evidence/data/text.json text-laptop \\
      --before "klformer compare --task text --seeds 0 1 2 --attentions softmax gmm-prf"

--of takes the rows of another setting, under the name that is asked for, such as those of a sweep:

    python -m klformer.analysis.evidence.keep analysis/runs.json docs/evidence/data/decisions.json "drawn every step" \\
      --of "sparsity0.5-laptop training.resample_every=1"

--more takes the rows of further reports as well, where a setting is of several commands, or of one that ran repeatedly.
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klformer.analysis.evidence.pages import conditions_of, selected
from klformer.errors import ArgumentError
from klformer.files import read_json, write_text

#: What data says of the machine; `machine` says it again in words.
_ENVIRONMENT = ("klformer", "torch", "python", "processor", "threads", "date")
_DIGITS = 5


def keep(
    report: Mapping[str, Any],
    data: Mapping[str, Any],
    setting: str,
    conditions: Mapping[str, Sequence[str]],
    *,
    before: Sequence[str] = (),
    of: str | None = None,
    more: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The data with what a command reported.

    Args:
        report: With "environment", "command" and "rows", or "results" in their place.
        data: What the docs had before.
        setting: What these rows are called in it.
        conditions: What rows must have, by field.
        before: Commands that were typed before the one of the report.
        of: What the setting is called in the report, if not the same.
        more: Further reports, of the same environment at whatever time; their rows follow, in this order.

    Raises:
        ArgumentError: no row has it, or is of the setting; or reports are of several environments.
    """
    reports = [report, *more]
    found = [row for one in reports for row in (one["rows"] if "rows" in one else one["results"])]
    wanted = setting if of is None else of
    rows = [row for row in selected(found, conditions) if _setting(row) in (None, wanted)]
    if not rows:
        there = ", ".join(dict.fromkeys(name for name in map(_setting, found) if name is not None)) or "no setting"
        raise ArgumentError(
            f"no row of the report has {dict(conditions)} and is of the setting {wanted!r}; it has {there}"
        )
    rows = [_called(row, wanted, setting) for row in rows]
    new = _environment(report)
    for other in map(_environment, more):
        if difference := _difference(other, new | {"date": other["date"]}):
            raise ArgumentError(f"reports must be of one environment; another of them has {difference}")
    commands = dict.fromkeys([*before, *(_without_target(one["command"]) for one in reports)])
    environments = {name: data["environment"] | data.get("differs", {}).get(name, {}) for name in data["commands"]}
    differs = {name: _difference(old, new) for name, old in environments.items() if name != setting}
    differs = {name: other for name, other in differs.items() if other}
    return {
        "caption": data["caption"],
        "environment": new,
        **({"differs": differs} if differs else {}),
        "commands": data["commands"] | {setting: "\n".join(commands)},
        "rows": _replaced(data["rows"], [_rounded(row) for row in rows], setting),
    }


def as_text(data: Mapping[str, Any]) -> str:
    """JSON with a row a line."""
    head = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=2, ensure_ascii=False)
    rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in data["rows"])
    return f'{head.removesuffix("}").rstrip()},\n  "rows": [\n    {rows}\n  ]\n}}\n'


def _environment(report: Mapping[str, Any]) -> dict[str, Any]:
    """Of a report, with the day in place of the time."""
    found = {name: report["environment"][name] for name in _ENVIRONMENT}
    return found | {"date": found["date"][:10]}


def _called(row: Mapping[str, Any], before: str, now: str) -> dict[str, Any]:
    """A row of a setting, first of all, that was called otherwise before; a metric behind it stays."""
    name = now + row.get("setting", before).removeprefix(before)
    return {"setting": name, **{field: value for field, value in row.items() if field != "setting"}}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {name: old.get(name) for name in {**new, **old} if old.get(name) != new.get(name)}


def _replaced(rows: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], setting: str) -> list[Any]:
    """The rows with new ones of a setting where the first of the old ones was, or at the end."""
    place = next((place for place, row in enumerate(rows) if _setting(row) == setting), len(rows))
    return [*rows[:place], *new, *(row for row in rows[place:] if _setting(row) != setting)]


def _setting(row: Mapping[str, Any]) -> str | None:
    """The setting of a row without its metric; None if it names none."""
    return row["setting"].partition(":")[0] if "setting" in row else None


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
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
    parser.add_argument("report", type=Path, help="the JSON that a command wrote")
    parser.add_argument("data", type=Path, help="the file of data, which is there")
    parser.add_argument("setting", help="whose rows these are")
    parser.add_argument("conditions", nargs="*", help="field=value, of the rows to take")
    parser.add_argument("--before", action="append", default=[], help="what was typed before, a command each")
    parser.add_argument("--of", help="what the setting is called in the report, if not the same")
    parser.add_argument("--more", action="append", default=[], type=Path, help="a further report, whose rows follow")
    options = parser.parse_args()
    report, data = read_json(options.report), read_json(options.data)
    conditions = conditions_of(options.conditions)
    more = [read_json(file) for file in options.more]
    kept = keep(report, data, options.setting, conditions, before=options.before, of=options.of, more=more)
    write_text(options.data, as_text(kept))


if __name__ == "__main__":
    main()

"""Tables of the docs on what was attacked, made of the rows that the scripts of tests/fuzz and tests/faults wrote.

fuzzing     inputs by target, and what became of them (tests/fuzz/fuzz.py)
kills       kills by command, and what was lost (tests/faults/kill.py)
long-run    memory and open files on the way (tests/faults/soak.py)
robustness  all three in short
"""

from collections.abc import Callable, Mapping, Sequence

from klformer.lab.analysis.cells import Row, markdown

_NOTHING = "nothing"


def fuzzing(rows: Sequence[Row]) -> str:
    """A row for every target."""
    headings = ["target", "what it is", "inputs", "processor seconds", "read", "refused", "crashed"]
    lines = []
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("read", "refused")]
        seconds = f"{row['processor_seconds']:,.0f}"
        lines.append([f"`{row['target']}`", row["what"], f"{row['inputs']:,}", seconds, *counts, _crashes([row])])
    return markdown(headings, lines)


def kills(rows: Sequence[Row]) -> str:
    """A row for every command."""
    lines = [[row["command"], row["what"], f"{row['kills']:,}", _lost([row])] for row in rows]
    return markdown(["command", "what must hold", "kills", "lost"], lines)


def long_run(rows: Sequence[Row]) -> str:
    """A row for every moment that was looked at."""
    lines = [
        [f"{row['step']:,}", f"{row['seconds']:,.0f}", f"{row['resident_mib']:,.1f}", str(row["open_files"])]
        for row in rows
    ]
    return markdown(["step", "seconds", "resident memory, MiB", "open files"], lines)


def in_short(rows: Sequence[Row]) -> str:
    """What was tried of each kind, and what came of it."""
    inputs, killed, moments = ([row for row in rows if name in row] for name in ("inputs", "kills", "resident_mib"))
    lines = []
    if inputs:
        tried = f"{sum(row['inputs'] for row in inputs):,} inputs"
        lines.append(["files that are nearly right", tried, _crashes(inputs)])
    if killed:
        lines.append(["kills at random moments", f"{sum(row['kills'] for row in killed):,} kills", _lost(killed)])
    if moments:
        grown, more = second_half(moments)
        left = f"{grown:+.1f} MiB and {more:+d} files in its second half"
        lines.append(["a long run", f"{moments[-1]['step']:,} steps", left])
    return markdown(["attack", "tried", "lost, crashed or grown"], lines)


def second_half(rows: Sequence[Row]) -> tuple[float, int]:
    """By how many MiB and open files a run has grown since the first moment of its second half."""
    last = rows[-1]
    first = next(row for row in rows if 2 * row["step"] > last["step"])
    return last["resident_mib"] - first["resident_mib"], last["open_files"] - first["open_files"]


def _crashes(rows: Sequence[Row]) -> str:
    crashed, places = sum(row["crashed"] for row in rows), sum(len(row["places"]) for row in rows)
    return f"{crashed:,} inputs, at {places} places" if crashed else _NOTHING


def _lost(rows: Sequence[Row]) -> str:
    lost = sum(row["lost"] for row in rows)
    return f"{lost:,} times" if lost else _NOTHING


ROBUSTNESS: Mapping[str, Callable[..., str]] = {
    "fuzzing": fuzzing,
    "kills": kills,
    "long-run": long_run,
    "robustness": in_short,
}

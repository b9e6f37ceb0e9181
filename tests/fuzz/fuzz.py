"""Fuzz the doors of klformer: files and names of other people, nearly right, for as long as one likes.

    python tests/fuzz/fuzz.py --targets config tables runs tensors plugins --seconds 1200

Every input has a number, and is made from it alone: `--first NUMBER --inputs 1` makes one again. What is not a refusal
in words (a UserError), and what takes longer than ten seconds of the processor, is a crash; crashes at one place count
as one. --json FILE writes a row a target, for research/pages/robustness.md.
"""

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from targets import TARGETS  # noqa: E402

from klformer.errors import UserError  # noqa: E402
from klformer.files import write_json  # noqa: E402
from klformer.lab.environment import describe_environment, typed_command  # noqa: E402

#: No input is so large that reading it may take longer, in seconds of the processor, or more memory.
SLOW, MEMORY = 10, 6 * 2**30
#: Nor may it wait longer for anything, in seconds; on a busy machine that is no fault of the input.
WAITS = 300


class TooSlow(Exception):  # noqa: N818 - raised by the alarm
    """An input has taken too long."""


def too_slow(number, frame):
    raise TooSlow


def place(error):
    """Where it came from, in our own code."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/klformer/" in frame.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "outside"
    return f"{type(error).__name__} at {where}"


def fuzz(name, folder, *, seconds=None, inputs=None, first=0):
    """Call a target with inputs until time or number are over; returns what became of them."""
    target = TARGETS[name](folder)
    counts, crashes, started, number = Counter(), {}, time.monotonic(), first
    for kind in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(kind, too_slow)
    while (seconds is None or time.monotonic() - started < seconds) and (inputs is None or number < first + inputs):
        signal.alarm(WAITS)
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                target(random.Random(f"{name} {number}"))
            counts["read"] += 1
        except UserError:
            counts["refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            counts["crashed"] += 1
            crashes.setdefault(place(error), (number, "".join(traceback.format_exception(error))))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        number += 1
    return counts, crashes, time.monotonic() - started, number - first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what became of the inputs to this file")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    failed, rows = False, []
    for name in options.targets:
        with tempfile.TemporaryDirectory() as folder:
            before = time.process_time()
            limit = None if options.inputs else options.seconds
            counts, crashes, seconds, inputs = fuzz(
                name, Path(folder), seconds=limit, inputs=options.inputs, first=options.first
            )
            row = {
                "target": name,
                "what": TARGETS[name].__doc__.partition("\n")[0].removesuffix("."),
                "inputs": inputs,
                "seconds": seconds,
                "processor_seconds": time.process_time() - before,
                **{kind: counts[kind] for kind in ("read", "refused", "crashed")},
                "places": {where: number for where, (number, _) in crashes.items()},
            }
        print(
            f"{name}: {inputs:,} inputs in {seconds:.0f} s ({row['processor_seconds']:.0f} s of processor time): "
            f"{row['read']:,} read, {row['refused']:,} refused in words, {row['crashed']:,} crashed "
            f"at {len(crashes)} places",
            flush=True,
        )
        rows.append(row)
        for where, (number, text) in crashes.items():
            failed = True
            print(f"--- {where}: --targets {name} --first {number} --inputs 1\n{text}", flush=True)
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "command": typed_command(), "rows": rows})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

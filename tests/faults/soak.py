"""Train for very many tiny steps, and see that memory and file handles stay flat.

    python tests/faults/soak.py --steps 50000

Evaluates and saves all the time, as a run of a day does. Prints memory (resident, MiB) and open files on the way; exits
with 1 if the second half of the run has grown by more than 2% of the memory, or by a file. --json FILE writes what it
prints, for research/pages/robustness.md.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from run_support import tiny  # noqa: E402

from klformer.files import write_json  # noqa: E402
from klformer.lab.environment import describe_environment, typed_command  # noqa: E402
from klformer.lab.runs.train import train_run  # noqa: E402
from klformer.lab.training.progress import SilentReporter  # noqa: E402


def second_half(rows):
    """By how many MiB and open files a run has grown since the first moment of its second half."""
    last = rows[-1]
    first = next(row for row in rows if 2 * row["step"] > last["step"])
    return last["resident_mib"] - first["resident_mib"], last["open_files"] - first["open_files"]


class Watcher(SilentReporter):
    """Notes memory and files at every line of the record."""

    def __init__(self):
        self.seen, self.started = [], time.monotonic()

    def step(self, step, **figures):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        files = len(os.listdir("/proc/self/fd"))
        seconds = time.monotonic() - self.started
        self.seen.append({"step": step, "seconds": seconds, "resident_mib": resident, "open_files": files})

    def some(self):
        """About ten moments, among them the first of the second half and the last."""
        count = len(self.seen)
        places = {*range(0, count, max(1, count // 10)), count // 2, count - 1}
        return [self.seen[place] for place in sorted(places)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--json", type=Path, help="write memory and open files to this file")
    options = parser.parse_args()
    watcher = Watcher()
    every = max(1, options.steps // 200)
    with tempfile.TemporaryDirectory() as folder:
        config = tiny(
            Path(folder), max_steps=options.steps, evaluate_every=every, checkpoint_every=every, log_every=every
        )
        train_run(config, Path(folder) / "run", resume=False, reporter=watcher)
    seconds, rows = time.monotonic() - watcher.started, watcher.some()
    for row in rows:
        print(f"step {row['step']:7,}: {row['resident_mib']:7.1f} MiB, {row['open_files']} files")
    grown, more = second_half(rows)
    print(f"{options.steps:,} steps in {seconds:.0f} s; second half: {grown:+.1f} MiB, {more:+d} files")
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "command": typed_command(), "rows": rows})
    at_half = rows[-1]["resident_mib"] - grown
    sys.exit(1 if grown > 0.02 * at_half or more > 0 else 0)


if __name__ == "__main__":
    main()

"""Train for very many tiny steps, and see that memory and file handles stay flat.

    python tests/faults/soak.py --steps 50000

Evaluates and saves all the time, as a run of a day does. Prints memory (resident, MiB) and open files on the way; exits
with 1 if the second half of the run has grown by more than 2% of the memory, or by a file.
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

from klformer.runs.train import train_run  # noqa: E402
from klformer.training.progress import SilentReporter  # noqa: E402


class Watcher(SilentReporter):
    """Notes memory and files at every line of the record."""

    def __init__(self):
        self.seen = []

    def step(self, step, **figures):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        self.seen.append((step, resident, len(os.listdir("/proc/self/fd"))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    options = parser.parse_args()
    watcher, started = Watcher(), time.monotonic()
    every = max(1, options.steps // 200)
    with tempfile.TemporaryDirectory() as folder:
        config = tiny(
            Path(folder), max_steps=options.steps, evaluate_every=every, checkpoint_every=every, log_every=every
        )
        train_run(config, Path(folder) / "run", resume=False, reporter=watcher)
    for step, resident, files in watcher.seen[:: max(1, len(watcher.seen) // 10)]:
        print(f"step {step:7,}: {resident:7.1f} MiB, {files} files")
    half = watcher.seen[len(watcher.seen) // 2 :]
    grown, more = half[-1][1] - half[0][1], half[-1][2] - half[0][2]
    seconds = time.monotonic() - started
    print(f"{options.steps:,} steps in {seconds:.0f} s; second half: {grown:+.1f} MiB, {more:+d} files")
    sys.exit(1 if grown > 0.02 * half[0][1] or more > 0 else 0)


if __name__ == "__main__":
    main()

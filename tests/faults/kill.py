"""Kill klformer at random moments, again and again, and see that nothing is lost.

    python tests/faults/kill.py --kills 200

A round kills one command with SIGKILL at random moments, going on as a user would, and compares what it leaves with
what it leaves undisturbed: training and pretraining (weights, optimiser and result bit for bit, and no checkpoint
lost), generation of data (the files), evaluation (its output, and the run untouched) and a report (the page is whole at
every moment). Exits with 1 if anything differs. --json FILE writes a row a command, for research/pages/robustness.md.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from run_support import TINY_FLAGS, assert_same_state, contents, final_state  # noqa: E402

from klformer.files import write_json  # noqa: E402
from klformer.lab.environment import describe_environment, typed_command  # noqa: E402
from klformer.lab.training.checkpoint import CheckpointStore  # noqa: E402

#: So many kills of a command before it may end by itself, and the round with it.
KILLS_A_ROUND = 8
PYTHON = [sys.executable, "-m", "klformer"]
STEPS = ["--training.max-steps", "400", "--training.checkpoint-seconds", "0.2", "--training.evaluate-every", "50"]


def call(arguments, *, kill_after=None):
    """Run a command; returns its exit code and output, and whether it was killed in time."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*PYTHON, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return -9, "", True
    return process.returncode, out, False


def timed(do):
    """How long something takes."""
    started = time.monotonic()
    do()
    return time.monotonic() - started


class Victim:
    """A command that is killed; `seconds` is about how long it takes."""

    seconds: float

    def strike(self, chance, arguments):
        """Run a command, and kill it at a random moment: seldom while it still imports, which is about half of it.
        Returns its output, and whether it was killed before it ended by itself."""
        _, out, killed = call(arguments, kill_after=chance.uniform(0.4, 1.1) * self.seconds)
        # The machine may be busier or less busy than it was: aim earlier after a miss, a little later after a hit.
        self.seconds *= 1.02 if killed else 0.85
        return out, killed


class Training(Victim):
    """A run that goes on after every kill is the undisturbed one; what a checkpoint has reached is never lost."""

    command = "train"
    attention = "gmm-rks:num_frequencies=8"

    def __init__(self, folder):
        self.folder, self.number = folder / self.command, 0
        self.folder.mkdir(exist_ok=True)
        self.straight = self.folder / "straight"
        self.seconds = timed(lambda: None if self.straight.exists() else self._finish(self._command("straight")))

    def task(self):
        """The task, its data and sizes."""
        return ["--task", "sparsity", f"--data.root={self.folder / 'data'}", *TINY_FLAGS]

    def _command(self, name, *, resume=False):
        where = [self.command, "--out", self.folder, "--name", name, "--quiet"]
        return [*where, "--resume"] if resume else [*where, "--attention", self.attention, *self.task(), *STEPS]

    def _finish(self, command):
        code, out, _ = call(command)
        assert code == 0, out

    def round(self, chance, count):
        self.number += 1
        name = f"run{self.number}"
        run, reached = self.folder / name, 0
        for _ in range(KILLS_A_ROUND):
            resume = (run / "config.json").exists()
            out, killed = self.strike(chance, self._command(name, resume=resume))
            now = _newest(run)
            assert now >= reached, f"a checkpoint was lost: step {reached} was there, now {now}. {out}"
            reached = now
            if not killed or count():
                break
        if not (run / "result.json").exists():
            self._finish(self._command(name, resume=(run / "config.json").exists()))
        assert_same_state(final_state(self.straight), final_state(run))
        results = [
            re.sub(r'"(name|train_(?:processor_)?seconds|tokens_per_second|peak_memory_bytes|date)": [^\n]*', "", text)
            for text in ((self.folder / one / "result.json").read_text() for one in ("straight", name))
        ]
        assert results[0] == results[1]
        shutil.rmtree(run)


class Pretraining(Training):
    """The same for masked language modelling, whose masks are drawn anew in every step."""

    command = "pretrain"
    attention = "fastfood-prf:num_frequencies=8"

    def task(self):
        text = self.folder / "book.txt"
        text.write_text("the kernel of attention is learned from data\nand a text is a sequence of letters\n" * 40)
        sizes = [flag for flag in TINY_FLAGS if flag.startswith("--model.") and "head-hidden" not in flag]
        data = [f"--data.train={text}", "--data.max-len=24", "--data.tokens.kind=characters"]
        return [*data, *sizes, "--training.batch-size=8", "--training.evaluation-draws=2"]


def _newest(run):
    newest = CheckpointStore(run / "checkpoints", lambda message: None).newest("step")
    return 0 if newest is None else newest.step


class Generation(Victim):
    """Data that is generated is all there, or is generated again."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0
        started = time.monotonic()
        assert call(self._command("straight"))[0] == 0
        self.seconds = time.monotonic() - started
        self.whole = self._files("straight")

    def _command(self, name):
        return ["data", "generate", "--task", "listops", "--data.num-examples", 300, "--data.root", self.folder / name]

    def _files(self, name):
        return {path.relative_to(self.folder / name): content for path, content in contents(self.folder / name).items()}

    def round(self, chance, count):
        self.number += 1
        name = f"data{self.number}"
        for _ in range(KILLS_A_ROUND):
            if not self.strike(chance, self._command(name))[1] or count():
                break
        code, out, _ = call(self._command(name))
        assert code == 0, out
        found = self._files(name)
        assert {path: found.get(path) for path in self.whole} == self.whole
        shutil.rmtree(self.folder / name)


class Evaluation(Victim):
    """An evaluation leaves the run as it is, and says the same afterwards."""

    def __init__(self, folder):
        self.run = Training(folder).straight
        started = time.monotonic()
        self.said = call(["eval", self.run])[1]
        self.seconds = time.monotonic() - started
        self.before = contents(self.run)

    def round(self, chance, count):
        for _ in range(KILLS_A_ROUND):
            if not self.strike(chance, ["eval", self.run])[1] or count():
                break
        assert contents(self.run) == self.before
        assert call(["eval", self.run])[1] == self.said


class Report(Victim):
    """A page is the one before or the one after, never a part of one; runs are left as they are."""

    def __init__(self, folder):
        self.run, self.page = Training(folder).straight, folder / "page" / "report.html"
        started = time.monotonic()
        assert call(self._command())[0] == 0
        self.seconds = time.monotonic() - started
        self.before = contents(self.run)

    def _command(self):
        return ["report", self.run, "--out", self.page]

    def round(self, chance, count):
        for _ in range(KILLS_A_ROUND):
            if not self.strike(chance, self._command())[1] or count():
                break
            assert self.page.read_text().rstrip().endswith("</html>")
        assert contents(self.run) == self.before
        assert call(self._command())[0] == 0


COMMANDS = {
    "training": Training,
    "pretraining": Pretraining,
    "generation": Generation,
    "evaluation": Evaluation,
    "report": Report,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, with fewer kills")
    parser.add_argument("--json", type=Path, help="write kills and losses to this file")
    options = parser.parse_args()
    chance, kills, lost, started = random.Random(options.seed), Counter(), Counter(), time.monotonic()
    rows = []
    share = -(-options.kills // len(options.commands))
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.commands, start=1):
            began = time.monotonic()
            victim = COMMANDS[name](Path(folder))
            until = started + 60 * options.minutes * number / len(options.commands)

            def count(name=name, until=until):
                """One more kill; says whether they were enough."""
                kills[name] += 1
                return kills[name] >= share or time.monotonic() > until

            while kills[name] < share and time.monotonic() < until:
                try:
                    victim.round(chance, count)
                except AssertionError as error:
                    lost[name] += 1
                    print(f"LOST in {name}: {error}", flush=True)
            seconds = time.monotonic() - began
            print(f"{name}: {kills[name]} kills, {lost[name]} losses, {seconds:.0f} s", flush=True)
            what = COMMANDS[name].__doc__.partition("\n")[0].removesuffix(".")
            rows.append({"command": name, "what": what, "kills": kills[name], "lost": lost[name], "seconds": seconds})
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "command": typed_command(), "rows": rows})
    sys.exit(1 if lost.total() else 0)


if __name__ == "__main__":
    main()

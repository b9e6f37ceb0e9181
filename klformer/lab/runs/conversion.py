"""What is said while a model is converted: progress, the time that is left, how to go on, and how fast it became."""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import nn

from klformer.conversion.hosts import Batch, evaluating
from klformer.conversion.resume import saved_step
from klformer.lab.training.signals import STOPPING


class StageProgress:
    """Lines about the steps of each stage: the first, the last, and one every few seconds between them."""

    def __init__(self, *, seconds_between: float = 10.0) -> None:
        self._seconds_between, self._stage, self._first, self._began, self._last = seconds_between, "", 0, 0.0, 0.0

    def __call__(self, stage: str, step: int, steps: int, error: float) -> None:
        now = time.monotonic()
        if is_new := stage != self._stage or step <= self._first:
            self._stage, self._first, self._began = stage, step, now
        if not is_new and step < steps and now - self._last < self._seconds_between:
            return
        self._last = now
        words = "" if math.isnan(error) else f"  error {error:.4g}"
        if not is_new and step < steps:
            words += "  at most" if stage == "prune" else " "  # which ends when no layer has more to lose
            words += f" {(now - self._began) / (step - self._first) * (steps - step) / 60:.1f} min left"
        print(f"{stage} {step}/{steps}{words}", flush=True)


@contextmanager
def going_on(state: Path) -> Iterator[None]:
    """End what is inside at SIGINT, SIGTERM or SIGHUP, with a line that says from where the same command goes on."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {kind: signal.signal(kind, stop) for kind in STOPPING if signal.getsignal(kind) is not signal.SIG_IGN}
    if step := saved_step(state):
        print(f"going on after {step}")
    try:
        yield
    except KeyboardInterrupt as interrupt:
        where = f"after {step}" if (step := saved_step(state)) else "from the start"
        print(f"klformer: interrupted by {interrupt}: the same command goes on {where}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@torch.no_grad()
def speed_beside(teacher: nn.Module, model: nn.Module, batches: Sequence[Batch]) -> str:
    """Return a sentence on the time of a converted model beside its teacher's, on some batches."""
    inputs, seconds = [{name: each for name, each in batch.items() if name != "labels"} for batch in batches], []
    for each in (teacher, model):
        with evaluating(each):
            each(**inputs[0])
            began = time.process_time()
            for batch in inputs:
                each(**batch)
            seconds.append(time.process_time() - began)
    tokens, ratio = int(median(batch["input_ids"].shape[1] for batch in batches)), seconds[1] / max(seconds[0], 1e-9)
    slower = ": SLOWER than softmax; --lengths 512 2048 says from where on it pays" if ratio > 1 else ""
    return f"on these texts ({tokens} tokens in the middle) it takes {ratio:.2f} times the teacher's time{slower}"

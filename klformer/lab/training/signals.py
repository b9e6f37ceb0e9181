"""SIGINT, SIGTERM and SIGHUP: the first asks for a stop after the step, a second one stops at once.

A signal that the process was started to ignore, as `nohup` does with SIGHUP, stays ignored.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator

from klformer.errors import Interrupted

#: Ctrl-C, a batch system that wants its machine back, and a terminal that is gone.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """The signal that this process got, if any. Other processes may not have got it: only what all agree on is acted
    on."""

    def __init__(self) -> None:
        self.number = 0

    @property
    def name(self) -> str:
        """The signal's name; SIGTERM if another process got it."""
        return signal.Signals(self.number or signal.SIGTERM).name

    def hang_up(self) -> None:
        """Act as if the terminal were gone: whoever read the output has left."""
        self.number = self.number or signal.SIGHUP

    def came_to_any(self, accelerator: Accelerator) -> bool:
        """Return whether a process was asked to stop; the same in all of them."""
        asked = torch.tensor(float(self.number), device=accelerator.device)
        return bool(accelerator.reduce(asked, "sum").item())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note signals inside, and handle them as before afterwards."""

        def ask(number: int, _frame: FrameType | None) -> None:
            if self.number:
                raise Interrupted("stopped at once, in the middle of a step; what was saved before it is whole")
            self.number = number

        watched = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

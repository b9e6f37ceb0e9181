"""SIGINT and SIGTERM: the first asks for a stop after the step, a second one stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator

from klformer.errors import Interrupted


class StopSignal:
    """The signal that this process got, if any. Other processes may not have got it: only what all agree on is acted
    on."""

    def __init__(self) -> None:
        self.number = 0

    @property
    def name(self) -> str:
        """The signal's name; SIGTERM if another process got it."""
        return signal.Signals(self.number or signal.SIGTERM).name

    def came_to_any(self, accelerator: Accelerator) -> bool:
        """Whether a process was asked to stop; the same in all of them."""
        asked = torch.tensor(float(self.number), device=accelerator.device)
        return bool(accelerator.reduce(asked, "sum").item())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Signals are noted inside, and handled as before afterwards.

        Raises:
            Interrupted: a second one came.
        """

        def ask(number: int, _frame: FrameType | None) -> None:
            if self.number:
                raise Interrupted("stopped at once, in the middle of a step; what was saved before it is whole")
            self.number = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

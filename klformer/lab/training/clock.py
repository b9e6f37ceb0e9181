"""When a checkpoint is due by time: however slow the steps are, little is lost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Between two checkpoints so many times as much time passes as one takes.
REST = 20


class CheckpointClock:
    """Runs from the beginning of training, and again from every checkpoint.

    Args:
        seconds: The age of the last checkpoint at which another is due; never if None.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._cost = 0.0
        self.start()

    def start(self) -> None:
        """Now nothing is lost yet."""
        self._since = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        if self._seconds is None:
            return False
        return time.monotonic() - self._since >= max(self._seconds, REST * self._cost)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        self.start()
        yield
        self._cost = time.monotonic() - self._since
        self.start()

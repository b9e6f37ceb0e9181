"""How long the parts of a conversion take."""

import time


class Clock:
    """Wall time of parts, and processor time of all."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()
        self._first = time.process_time()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def processor_seconds(self) -> float:
        return time.process_time() - self._first

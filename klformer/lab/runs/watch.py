"""A process that dies ends the others, with its name and the reason, and not after half an hour of waiting.

torch's collectives wait for whoever does not come. Beside them, every process counts up a number at the store that
torchrun's processes meet at, and looks at the numbers of the others. One that stands still for too long is gone:
killed, out of memory, or behind a cable that was cut. One that fails leaves a word at the store, and the others end
with it.

Two threads: one speaks to the store and may itself be left without an answer; the other only looks at the clock.
"""

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from klformer.errors import Interrupted, OtherProcessFailedError, RunError

#: How often a process is heard of while others are patient.
BEATS = 12
#: What the backends' errors have in them where another process is gone.
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_ADVICE = "What was saved is whole: the same command with --resume goes on, on as many processes as there are"

_started = 0


@dataclass(frozen=True)
class _Name:
    """Who a process is: for people, and for others on the same machine."""

    rank: int
    host: str
    machine: str
    pid: int

    @staticmethod
    def own(rank: int) -> "_Name":
        boot = Path("/proc/sys/kernel/random/boot_id")
        space = Path("/proc/self/ns/pid")
        # Numbers of processes mean the same where both are the same.
        machine = f"{boot.read_text().strip()} {os.readlink(space)}" if boot.exists() and space.exists() else ""
        return _Name(rank, platform.node(), machine, os.getpid())

    @staticmethod
    def read(text: str) -> "_Name":
        rank, host, machine, pid = text.split("|")
        return _Name(int(rank), host, machine, int(pid))

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    def written(self) -> str:
        return f"{self.rank}|{self.host}|{self.machine}|{self.pid}"

    def is_gone(self, seen_from: "_Name") -> bool:
        """Whether a process on the machine of another is not there any more; False if that can't be seen from it."""
        if not self.machine or self.machine != seen_from.machine:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True


class Watch:
    """Looks after the other processes of a group.

    Args:
        connect: Gives a connection to the store; called once.
        rank: Of this process.
        world: How many there are.
        patience: Seconds without a word after which a process counts as gone.
        end: Called with what has happened, from another thread, if it can't go on.
    """

    def __init__(
        self, connect: Callable[[], Store], *, rank: int, world: int, patience: float, end: Callable[[str], None]
    ) -> None:
        self._store, self._rank, self._world = connect(), rank, world
        self._patience, self._end = patience, end
        self._own = _Name.own(rank)
        self._names: dict[int, _Name] = {rank: self._own}
        self._counts: dict[int, int] = {}
        now = time.monotonic()
        self._heard = {other: now for other in range(world) if other != rank}
        self._answered = now
        self._left: set[int] = set()
        self._word: str | None = None
        self._stop = threading.Event()
        self._store.set(f"name/{rank}", self._own.written())
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._speak, self._look)]
        for thread in self._threads:
            thread.start()

    def say_why(self, reason: str) -> None:
        """Leave a word for the others, if nobody has left one: this process ends."""
        self._store.compare_set("end", "", f"{self._own} has failed: {reason}")

    def leave(self) -> None:
        """Tell the others that this process is done, and stop looking."""
        try:
            self._store.set(f"left/{self._rank}", "1")
        except dist.DistError:
            return  # whoever keeps the store has left before: nobody is there to be told
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()

    def verdict(self) -> str | None:
        """What has become of another process, after waiting for it to show; None if nothing does."""
        last, found = time.monotonic() + self._patience + 1, None
        while (now := time.monotonic()) < last:
            if found is None and self._problem() is not None:
                # One that has ended may have left a word, which is heard with the next answer of the store.
                found, last = now, now + 3 * self._patience / BEATS
            if found is not None and self._answered > found + self._patience / BEATS:
                break
            time.sleep(0.02)
        return self._problem()

    def _speak(self) -> None:
        """Count up, and look at the others' counts, until the end."""
        while not self._stop.is_set():
            try:
                self._store.add(f"alive/{self._rank}", 1)
                for other in self._heard:
                    self._ask_for(other)
                if self._store.check(["end"]):
                    self._word = self._store.get("end").decode()
                self._answered = time.monotonic()
            except (dist.DistError, RuntimeError):
                pass  # no answer: the clock says when that has been too long
            self._stop.wait(self._patience / BEATS)

    def _ask_for(self, other: int) -> None:
        count = self._store.add(f"alive/{other}", 0)
        if count != self._counts.get(other):
            self._counts[other], self._heard[other] = count, time.monotonic()
        if other not in self._names and self._store.check([f"name/{other}"]):
            self._names[other] = _Name.read(self._store.get(f"name/{other}").decode())
        if other not in self._left and self._store.check([f"left/{other}"]):
            self._left.add(other)

    def _look(self) -> None:
        """End, if another has."""
        while not self._stop.wait(self._patience / BEATS):
            problem = self._problem()
            # A little later: who gets to know in an orderly way says it better.
            if problem is not None and not self._stop.wait(min(5.0, self._patience / 4)):
                self._end(problem)
                return

    def _problem(self) -> str | None:
        if self._word is not None:
            return self._word
        now = time.monotonic()
        for other, heard in self._heard.items():
            name = self._names.get(other)
            if other in self._left:
                continue
            if name is not None and name.is_gone(self._own):
                return f"{name} has ended without a word: it was killed, or was out of memory"
            if now - heard > self._patience and now - self._answered < self._patience / 2:
                who = name or f"rank {other}"
                return f"{who} was not heard of for {now - heard:.0f} s: it was killed or hangs, or its network is cut"
        if now - self._answered > self._patience:
            keeper = self._names.get(0, "rank 0")
            return (
                f"{keeper}, where all processes meet, does not answer for {now - self._answered:.0f} s: "
                "its machine is down, or the network is cut"
            )
        return None


@contextmanager
def watching(*, patience: float) -> Iterator[None]:
    """Inside, the end of another process is the end of this one, within about `patience` seconds.

    For processes that torchrun has started; a single one has nobody to look after.

    Raises:
        RunError: a collective has failed because another process is gone; it is named.
    """
    global _started
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:  # met in another way: torch's own timeouts hold
        yield
        return
    _started += 1
    place = f"klformer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_started}"

    def connect() -> Store:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=patience))
        return PrefixStore(place, store)

    rank, world = dist.get_rank(), dist.get_world_size()
    watch = Watch(connect, rank=rank, world=world, patience=patience, end=_end_now)
    try:
        yield
    except (OtherProcessFailedError, Interrupted, KeyboardInterrupt, SystemExit):
        watch.leave()  # all know of it
        raise
    except Exception as error:
        verdict = watch.verdict() if _is_lost(error) else None
        if verdict is not None:
            raise RunError(f"{verdict}. {_ADVICE}") from error
        watch.say_why(f"{type(error).__name__}: {error}")
        raise
    else:
        watch.leave()
    finally:
        watch.stop()


def _is_lost(error: Exception) -> bool:
    """Whether a collective has failed for want of another process."""
    text = str(error)
    return isinstance(error, dist.DistError | RuntimeError) and any(word in text for word in _LOST)


def _end_now(problem: str) -> None:
    """End, whatever the main thread waits for: it can't be reached."""
    print(f"klformer: {problem}. {_ADVICE}", file=sys.stderr, flush=True)
    os._exit(1)

"""Things that are chosen by name: one registry for each kind of thing."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from klformer.checks import suggestion
from klformer.errors import ArgumentError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for, in the order of registration. A name is given once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Raises ValueError if the name is taken."""
        if name in self._entries:
            raise ArgumentError(f"the {self._kind} {name!r} is registered already")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        """Raises ValueError, with the nearest name, if there is no such entry."""
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ArgumentError(f"unknown {self._kind} {name!r}{suggestion(name, self._entries)} Known: {known}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

"""Things that are chosen by name: one registry for each kind of thing."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from klformer.checks import unknown
from klformer.errors import ArgumentError

T = TypeVar("T")

#: What an unknown name may be, besides a mistake.
PLUGIN_HINT = "if it comes from a plugin, give --plugin MODULE before the command"


class Registry(Generic[T]):
    """Names and what they stand for, in the order of registration. A name is given once.

    Args:
        kind: What the names are of, for messages.

    Examples:
        >>> from klformer.registry import Registry
        >>> colours = Registry("colour")
        >>> colours.add("red", "#f00")
        >>> colours["red"], "blue" in colours, list(colours), len(colours)
        ('#f00', False, ['red'], 1)
        >>> colours.check("red")
        'red'
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Give a name to something.

        Args:
            name: A name that is not taken.
            entry: What it stands for.

        Raises:
            ArgumentError: the name is taken.
        """
        if name in self._entries:
            raise ArgumentError(f"the {self._kind} {name!r} is registered already")
        self._entries[name] = entry

    def check(self, name: str) -> str:
        """The name, if it is known.

        Args:
            name: A name, right or wrong.

        Raises:
            ArgumentError: there is no such entry; the message has the nearest name, and all of them.
        """
        if name not in self._entries:
            raise ArgumentError(f"{unknown(self._kind, name, self._entries)}; {PLUGIN_HINT}")
        return name

    def __getitem__(self, name: str) -> T:
        """Raises as `check`."""
        return self._entries[self.check(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

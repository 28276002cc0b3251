"""`Recent`: a mapping that keeps the entries that were used last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 4096
"""Entries that are kept by default, one for each set of shapes or sizes (some hundred bytes each)."""


class Recent(Generic[K, V]):
    """A mapping of a limited size: the entry that was least recently used is dropped first.

    Args:
        most: how many entries it holds, at least 1.

    Example:
        >>> found = Recent(2)
        >>> found["a"], found["b"] = 1, 2
        >>> found.get("a")
        1
        >>> found["c"] = 3
        >>> list(found)
        ['a', 'c']
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._entries: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value, which counts as used; ``None`` where there is none."""
        if key not in self._entries:
            return None
        value = self._entries[key] = self._entries.pop(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry, which counts as used then."""
        if key not in self._entries:
            return False
        self._entries[key] = self._entries.pop(key)
        return True

    def __iter__(self) -> Iterator[K]:
        """The keys, the one that was used last at the end."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, wanted: Callable[[K, V], bool]) -> None:
        """Forget all entries that are not wanted."""
        self._entries = {key: value for key, value in self._entries.items() if wanted(key, value)}

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

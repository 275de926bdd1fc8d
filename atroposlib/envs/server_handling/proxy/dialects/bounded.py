"""A mapping that forgets what was longest unused; pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Bounded"]

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Bounded(Generic[KeyT, ValueT]):
    """Keeps up to `max_entries` values by their keys."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, key: KeyT, value: ValueT) -> None:
        """Keep a value, in place of an older one under that key."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.max_entries:
            self._entries.popitem(last=False)

    def recall(self, key: KeyT) -> ValueT | None:
        """Return the value of a key, which counts as use; None for an unknown one."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

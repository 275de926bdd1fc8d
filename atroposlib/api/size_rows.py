"""Queued groups of one sender, or of all, in one row per size; pure.

Packs consist of groups of one size, so a pack is a run of a row:

    row of size 2:  [a b] [c d] [e        packs of largest = 4, and one group that waits
    row of size 4:  [x] [y]

Rows do not store where packs start: that follows from the largest size when a batch is planned, so
a change of the largest size needs no update.

Invariants: a row holds entries in queue order and is never empty; `largest` is the largest size
that has a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from atroposlib.api.queued_group import QueuedGroup

__all__ = ["Entry", "Row", "SizeRows"]

Entry = tuple[int, QueuedGroup]
"""A group and its place: entries compare in queue order; places are never reused."""

_MIN_GAPS = 32
_ENTRIES_PER_GAP = 8


class Row:
    """Entries in queue order, by group id; both ends and any removal are amortized O(1).

    Dictionaries keep insertion order, but a removed entry leaves a gap that iteration skips. They
    are rebuilt once there is more than one gap per eight entries. Unlike an
    `OrderedDict`, they cost the garbage collector nothing.
    """

    __slots__ = ("_appended", "_gaps", "_prepended")

    def __init__(self) -> None:
        self._prepended: dict[int, Entry] = {}
        """Entries before all of `_appended`, the first one last."""
        self._appended: dict[int, Entry] = {}
        self._gaps = 0

    def __len__(self) -> int:
        return len(self._prepended) + len(self._appended)

    def __iter__(self) -> Iterator[Entry]:
        if not self._prepended:
            return iter(self._appended.values())
        return chain(reversed(self._prepended.values()), self._appended.values())

    def get(self, group_id: int) -> Entry | None:
        """Return the entry of a group, None if it is not in the row."""
        return self._appended.get(group_id) or self._prepended.get(group_id)

    def add(self, entry: Entry, *, at_front: bool = False) -> None:
        """Add an entry at the end or at the front; its group must not be in the row."""
        (self._prepended if at_front else self._appended)[entry[1].group_id] = entry

    def pop(self, group_id: int) -> Entry | None:
        """Remove and return the entry of a group, None if it is not in the row."""
        entry = self._appended.pop(group_id, None) or self._prepended.pop(group_id, None)
        if entry is not None:
            self._gaps += 1
            if self._gaps > _MIN_GAPS + len(self) // _ENTRIES_PER_GAP:
                self._prepended = _without_gaps(self._prepended)
                self._appended = _without_gaps(self._appended)
                self._gaps = 0
        return entry


def _without_gaps(entries: dict[int, Entry]) -> dict[int, Entry]:
    """Rebuild the entries; copying a dictionary may copy its gaps, filling a new one does not."""
    filled: dict[int, Entry] = {}
    filled.update(entries)
    return filled


class SizeRows:
    """One row of queued groups per size; every change is O(1), `largest` amortized."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self.largest = 0
        """Sequences in the largest group, 0 if empty."""

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield every size with its row."""
        return iter(self._rows.items())

    def row(self, size: int) -> Row:
        """Return the row of one size, which may be empty."""
        return self._rows.get(size) or Row()

    def add(self, entry: Entry, *, at_front: bool = False) -> int:
        """Add a group at the end or front of the row of its size; return the length of the row."""
        group = entry[1]
        size = group.num_sequences
        row = self._rows.get(size)
        if row is None:
            row = self._rows[size] = Row()
            self.largest = max(self.largest, size)
        row.add(entry, at_front=at_front)
        return len(row)

    def remove(self, group: QueuedGroup) -> None:
        """Remove a group that is in its row."""
        size = group.num_sequences
        row = self._rows[size]
        row.pop(group.group_id)
        if not len(row):
            del self._rows[size]
            if size == self.largest:
                self.largest = max(self._rows, default=0)

    def packable_rows(self, largest: int) -> list[tuple[int, Row]]:
        """Return the rows that hold at least one pack of `largest` sequences."""
        return [
            (size, row)
            for size, row in self._rows.items()
            if largest % size == 0 and len(row) * size >= largest
        ]

    def unpackable_sequences(self) -> int:
        """Sequences in groups whose size never adds up to the largest."""
        return sum(size * len(row) for size, row in self._rows.items() if self.largest % size)

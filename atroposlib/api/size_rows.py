"""Queued groups of one sender, or of all, in one row per size; pure.

Which groups make a pack depends on their size alone, so packs are runs of a row:

    row of size 2:  [a b] [c d] [e        packs of largest = 4, and one group that waits
    row of size 4:  [x] [y]

Rows do not know where packs begin: that follows from the largest size when a batch is planned, and
needs no bookkeeping when the largest size changes.

Invariants: a row holds entries in queue order and is never empty; `largest` is the largest size
that has a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from atroposlib.api.queued_group import QueuedGroup

__all__ = ["Entry", "Row", "SizeRows"]

Entry = tuple[int, QueuedGroup]
"""A group and its place: entries compare as they are queued; places are never used twice."""

Row = OrderedDict[int, Entry]
"""Group id → entry, oldest first. Either end is reached, and any entry removed, in O(1)."""


class SizeRows:
    """One row of queued groups per size; every change is O(1), `largest` amortised."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self.largest = 0
        """Sequences in the largest group, 0 when there is none."""

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield every size with its row."""
        return iter(self._rows.items())

    def row(self, size: int) -> Row:
        """Return the row of one size, an empty one when there is none."""
        return self._rows.get(size) or OrderedDict()

    def add(self, entry: Entry, *, at_front: bool = False) -> int:
        """Add a group behind all others of its size, or before them; return how many there are."""
        group = entry[1]
        size = group.num_sequences
        row = self._rows.get(size)
        if row is None:
            row = self._rows[size] = OrderedDict()
            self.largest = max(self.largest, size)
        row[group.group_id] = entry
        if at_front:
            row.move_to_end(group.group_id, last=False)
        return len(row)

    def remove(self, group: QueuedGroup) -> None:
        """Remove a group that is in its row."""
        size = group.num_sequences
        row = self._rows[size]
        del row[group.group_id]
        if not row:
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

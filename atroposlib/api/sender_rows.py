"""Queued groups by sender and size, with iteration over packable ones, oldest first; pure.

    size 4, packs of 8:   sender 0 [a d] [e      ─► packable: a d    in queue order over all
                          sender 1 [b c] [f g]   ─► packable: b c f g    senders: a b c d f g

Invariants, while `_pack_size` is set and but for rows in `_changed`: `_heads[size]` holds every
sender whose row of that size has a pack, with the place of its oldest group; `_heaps[size]` holds
at least those, ordered by place. Entries of a heap that `_heads` does not confirm, or that repeat
another, are stale; a plan starts with at most about half of the heap stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from atroposlib.api.queued_group import QueuedGroup
from atroposlib.api.size_rows import Entry, Row, SizeRows

__all__ = ["SenderRows"]

_Head = tuple[int, int | None]
"""Place of the oldest group of a row, and its sender."""

_SPARE_HEADS = 16


class SenderRows:
    """Rows of every sender; changes are O(1), and applied by the next plan in O(log senders) each.

    The first plan after the pack size changed costs O(rows).
    """

    def __init__(self) -> None:
        self._senders: dict[int | None, SizeRows] = {}
        self._pack_size = 0
        """The pack size for which `_heads` is valid; 0 if unused since the last change."""
        self._heads: dict[int, dict[int | None, int]] = {}
        self._heaps: dict[int, list[_Head]] = {}
        self._changed: set[tuple[int | None, int]] = set()
        """Senders and sizes whose head in `_heads` may be outdated."""

    def get(self, sender: int | None) -> SizeRows | None:
        """Return the rows of one sender, None if it has no queued groups."""
        return self._senders.get(sender)

    def add(self, entry: Entry, *, at_front: bool = False) -> int:
        """Add a group to its row; return how many groups the row holds."""
        _, group = entry
        rows = self._senders.get(group.env_id)
        if rows is None:
            rows = self._senders[group.env_id] = SizeRows()
        in_row = rows.add(entry, at_front=at_front)
        if self._pack_size and (at_front or in_row * group.num_sequences == self._pack_size):
            self._changed.add((group.env_id, group.num_sequences))
        return in_row

    def remove(self, group: QueuedGroup) -> None:
        """Remove a group that is in its row."""
        rows = self._senders[group.env_id]
        rows.remove(group)
        if self._pack_size:
            self._changed.add((group.env_id, group.num_sequences))
        if not len(rows):
            del self._senders[group.env_id]

    def packable_sizes(self, pack_size: int) -> list[int]:
        """Return the sizes of which some sender has a pack; prepares `packable`."""
        if pack_size != self._pack_size:
            self._pack_size = pack_size
            self._find_heads()
        for sender, size in self._changed:
            self._note_head(sender, size)
        self._changed.clear()
        return [size for size, heads in self._heads.items() if heads]

    def packable(self, size: int) -> Iterator[Entry]:
        """Yield the groups of one size that are part of a pack, oldest first.

        Must follow `packable_sizes`; costs O(log senders) per group. Traverses the heap without
        changing it: the children of an entry come after it.
        """
        heap = self._cleaned_heap(size)
        frontier: list[tuple[int, int, Iterator[Entry] | None]] = [(heap[0][0], 0, None)]
        following: dict[int, Entry] = {}
        opened: set[int | None] = set()
        while frontier:
            place, index, row = heappop(frontier)
            if row is None:
                for below in range(2 * index + 1, min(2 * index + 3, len(heap))):
                    heappush(frontier, (heap[below][0], below, None))
                sender = heap[index][1]
                if sender in opened or self._heads[size].get(sender) != place:
                    continue
                opened.add(sender)
                row = self._packs_of(sender, size)
                entry = next(row)
            else:
                entry = following.pop(place)
            yield entry
            upcoming = next(row, None)
            if upcoming is not None:
                following[upcoming[0]] = upcoming
                heappush(frontier, (upcoming[0], -1, row))

    def _packs_of(self, sender: int | None, size: int) -> Iterator[Entry]:
        row = self._senders[sender].row(size)
        groups_per_pack = self._pack_size // size
        return islice(row, len(row) - len(row) % groups_per_pack)

    def _note_head(self, sender: int | None, size: int) -> None:
        """Update the head of one row."""
        if self._pack_size % size:
            return
        heads = self._heads.setdefault(size, {})
        rows = self._senders.get(sender)
        row = rows.row(size) if rows else Row()
        if len(row) * size < self._pack_size:
            heads.pop(sender, None)
            return
        place = next(iter(row))[0]
        if heads.get(sender) != place:
            heads[sender] = place
            heappush(self._heaps.setdefault(size, []), (place, sender))

    def _find_heads(self) -> None:
        self._heads, self._heaps = {}, {}
        self._changed.clear()
        for sender, rows in self._senders.items():
            for size, row in rows.packable_rows(self._pack_size):
                self._heads.setdefault(size, {})[sender] = next(iter(row))[0]
        for size in self._heads:
            self._heaps[size] = self._new_heap(size)

    def _new_heap(self, size: int) -> list[_Head]:
        heap = [(place, sender) for sender, place in self._heads[size].items()]
        heapify(heap)
        return heap

    def _cleaned_heap(self, size: int) -> list[_Head]:
        heads, heap = self._heads[size], self._heaps[size]
        if len(heap) > 2 * len(heads) + _SPARE_HEADS:
            heap = self._heaps[size] = self._new_heap(size)
        while heads.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap

"""Plans the next batch from rows of equally sized groups; pure.

The rules are those of `packing`, which defines them on a whole queue. Here the cost does not grow
with the queue: B sequences per batch, S distinct sizes, R rows (the groups of one sender and size),
M the largest queued size, s the size of a row.

| function | cost | read ahead at most |
|---|---|---|
| `plan_packs` | B + S | one pack of each size: M/s groups |
| `plan_combination` | S·log B if there is none | B/s groups of each size |
| `plan_with_minimums` | B·log R + minimums | one pack of each row of a guaranteed sender |

The first plan with minimums after M changed costs R more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice

from atroposlib.api.packing import SEARCH_BITS, oldest_combination, scaled_needs
from atroposlib.api.queued_group import QueuedGroup
from atroposlib.api.sender_rows import SenderRows
from atroposlib.api.size_rows import Entry, Row, SizeRows

__all__ = ["plan_combination", "plan_packs", "plan_with_minimums"]

_Pack = tuple[int, list[Entry]]

_REACHABLE_BITS = 1 << 31
"""Bits to search before a combination counts as impossible; some tenths of a second."""


def plan_packs(rows: SizeRows, batch_size: int) -> list[QueuedGroup] | None:
    """Choose whole packs in order of completion, as `packing.pack_exact` does.

    Returns:
        Groups in order of delivery, or None when packs do not add up to `batch_size`.
    """
    largest = rows.largest
    packable = rows.packable_rows(largest)
    if sum(_packed_sequences(size, row, largest) for size, row in packable) < batch_size:
        return None
    taken: list[QueuedGroup] = []
    num_sequences = 0
    for _, pack in merge(*(_packs(row, largest // size) for size, row in packable)):
        for _, group in pack:
            taken.append(group)
            num_sequences += group.num_sequences
            if num_sequences >= batch_size:
                return taken if num_sequences == batch_size else None
    return None


def plan_combination(rows: SizeRows, batch_size: int) -> list[QueuedGroup] | None:
    """Choose the oldest groups that add up, as `packing.oldest_combination` does.

    Exact for every queue as long as the candidates fit into the search: always up to batches of
    4,096 sequences; beyond, the oldest candidates are searched.

    Returns:
        Groups in queue order, or None when no combination exists.
    """
    if not _is_reachable(rows, batch_size):
        return None
    # Among equally sized groups the oldest are preferred, so later ones are never chosen.
    ordered = merge(*(islice(row, batch_size // size) for size, row in rows.rows()))
    candidates = list(islice(ordered, SEARCH_BITS // batch_size))
    positions = oldest_combination([group.num_sequences for _, group in candidates], batch_size)
    return [candidates[position][1] for position in positions] or None


def plan_with_minimums(
    senders: SenderRows,
    largest: int,
    batch_size: int,
    minimums: Mapping[int, float],
) -> list[QueuedGroup] | None:
    """Choose a batch with guaranteed shares, as `packing.pack_with_minimums` does.

    Args:
        senders: the queued groups of every sender.
        largest: the largest queued size.
        batch_size: sequences wanted.
        minimums: sender → share of the batch.

    Returns:
        Groups in order of delivery, minimums first, or None.
    """
    shared: dict[int, list[tuple[int, Row]]] = {}
    for owner, share in minimums.items():
        if int(batch_size * share) <= 0:
            continue
        rows = senders.get(owner)
        packable = rows.packable_rows(largest) if rows else []
        if not packable:
            return None
        shared[owner] = packable
    smallest = {owner: min(size for size, _ in rows) for owner, rows in shared.items()}
    draft = _Draft(batch_size)
    for owner, need in scaled_needs(minimums, smallest, batch_size).items():
        if draft.room:
            draft.take_share(shared[owner], largest, need)
    if draft.room:
        draft.fill(senders, largest)
    return [group for _, group in draft.taken.values()] if draft.room == 0 else None


class _Draft:
    """A batch under construction; a row is skipped once its groups no longer fit."""

    def __init__(self, batch_size: int) -> None:
        self.room = batch_size
        self.taken: dict[int, Entry] = {}

    def take_share(self, rows: Sequence[tuple[int, Row]], largest: int, need: int) -> None:
        """Take packs of one sender in order of completion until `need` sequences are held."""
        held = 0
        for _, pack in merge(*(self._fitting_packs(size, row, largest) for size, row in rows)):
            for entry in pack:
                size = entry[1].num_sequences
                if held >= need:
                    return
                if size <= self.room:
                    self._take(entry)
                    held += size

    def fill(self, senders: SenderRows, largest: int) -> None:
        """Take packable groups of all senders in queue order until the batch is full."""
        sizes = senders.packable_sizes(largest)
        for entry in merge(*(self._fitting(size, senders.packable(size)) for size in sizes)):
            if entry[1].num_sequences <= self.room and entry[1].group_id not in self.taken:
                self._take(entry)
                if self.room == 0:
                    return

    def _fitting_packs(self, size: int, row: Row, largest: int) -> Iterator[_Pack]:
        packs = _packs(row, largest // size)
        while size <= self.room and (pack := next(packs, None)):
            yield pack

    def _fitting(self, size: int, entries: Iterator[Entry]) -> Iterator[Entry]:
        while size <= self.room and (entry := next(entries, None)):
            yield entry

    def _take(self, entry: Entry) -> None:
        self.taken[entry[1].group_id] = entry
        self.room -= entry[1].num_sequences


def _packed_sequences(size: int, row: Row, largest: int) -> int:
    return len(row) * size // largest * largest


def _packs(row: Row, groups_per_pack: int) -> Iterator[_Pack]:
    """Yield the packs of a row, each with the place at which it is complete."""
    entries = iter(row)
    while len(pack := list(islice(entries, groups_per_pack))) == groups_per_pack:
        yield pack[-1][0], pack


def _is_reachable(rows: SizeRows, target: int) -> bool:
    """Whether some combination of groups holds exactly `target` sequences.

    Also False if the search would exceed `_REACHABLE_BITS`.
    """
    if not 0 < target <= SEARCH_BITS:
        return False
    steps_left = _REACHABLE_BITS // target
    within_target = (1 << (target + 1)) - 1
    reachable = 1
    for size, row in rows.rows():
        left = min(len(row), target // size)
        step = 1
        while left > 0:  # powers of two make every count up to `left`
            if not steps_left:
                return False
            steps_left -= 1
            step = min(step, left)
            reachable |= reachable << step * size & within_target
            left -= step
            step *= 2
    return bool(reachable >> target & 1)

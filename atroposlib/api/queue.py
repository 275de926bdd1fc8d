"""The queue of groups: first in, first out, with running counters; pure.

It holds descriptions, not payloads, so its size does not depend on the length of trajectories.

    append ──► front │ oldest … newest  ──► plan_batch, remove
               ▲     └─ the same entries in rows by size, and by sender and size
    restore_front

Invariants: a group is queued at most once; every counter and every row equals the result of a full
scan. The cost of a request does not grow with the queue: adding and removing are O(1) per group,
counters O(1), planning as `batch_plan` states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from atroposlib.api.allocation import QueueView
from atroposlib.api.batch_plan import plan_combination, plan_packs, plan_with_minimums
from atroposlib.api.queued_group import QueuedGroup
from atroposlib.api.sender_rows import SenderRows
from atroposlib.api.sender_totals import SenderTotals
from atroposlib.api.size_rows import Entry, Row, SizeRows

__all__ = ["GroupQueue", "QueuedGroup"]


class GroupQueue:
    """First in, first out queue of groups; each change costs O(1) per group."""

    def __init__(self) -> None:
        self._entries = Row()
        self._first_place = 0
        self._next_place = 0
        self._rows = SizeRows()
        self._senders = SenderRows()
        self._totals = SenderTotals()
        self._refused: tuple[int, Mapping[int, float]] | None = None
        """The last failed plan with minimums, until a change may make it succeed."""
        self.num_sequences = 0
        """Sequences in all queued groups."""
        self.num_tokens = 0
        """Tokens in all queued groups."""
        self.num_bytes = 0
        """Payload bytes of all queued groups."""
        self.groups_by_version: Counter[int] = Counter()
        """Queued groups per policy version."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedGroup]:
        for _, group in self._entries:
            yield group

    def entries(self) -> list[Entry]:
        """Copy the queue, oldest first, about a millisecond per 100,000 groups."""
        return list(self._entries)

    @property
    def largest_group(self) -> int:
        """Sequences in the largest queued group, 0 if the queue is empty."""
        return self._rows.largest

    @property
    def sequences_by_env(self) -> Mapping[int | None, int]:
        """Queued sequences per sender; senders without any are left out."""
        return self._totals.sequences

    def largest_group_of(self, env_id: int) -> int:
        """Sequences in the largest queued group of one environment, 0 when it has none."""
        rows = self._senders.get(env_id)
        return rows.largest if rows else 0

    def groups_by_size(self) -> dict[int, int]:
        """Return the number of queued groups per size."""
        return {size: len(row) for size, row in self._rows.rows()}

    def has_packable(self, env_id: int) -> bool:
        """Whether one environment has a pack for its guaranteed share."""
        rows = self._senders.get(env_id)
        return rows is not None and bool(rows.packable_rows(self.largest_group))

    @property
    def unpackable_sequences(self) -> int:
        """Sequences in groups whose size never adds up to the largest queued size."""
        return self._rows.unpackable_sequences()

    def view_of(
        self, env_id: int, *, group_size: int, batch_size: int, minimums: Mapping[int, float]
    ) -> QueueView:
        """Return the size of the queue in units of one environment, as `queue_view` does.

        O(1), except after the largest size, `batch_size` or `minimums` changed: then O(senders).

        Args:
            env_id: the asking environment.
            group_size: sequences per group of the asking environment, at least 1.
            batch_size: sequences per batch.
            minimums: guaranteed shares; the mapping must not be mutated between calls.
        """
        others = self._totals.others_packed(
            env_id,
            pack_size=max(1, self.largest_group),
            batch_size=batch_size,
            minimums=minimums,
        )
        own = self._totals.sequences.get(env_id, 0)
        return QueueView(queue_groups=(own + others) // group_size, own_groups=own // group_size)

    def get(self, group_id: int) -> QueuedGroup | None:
        """Return a queued group by its id, None if it is not queued."""
        entry = self._entries.get(group_id)
        return entry and entry[1]

    def window(self, offset: int, limit: int) -> list[QueuedGroup]:
        """Return up to `limit` groups from position `offset`, oldest first; O(offset)."""
        return [group for _, group in islice(self._entries, offset, offset + limit)]

    def append(self, group: QueuedGroup) -> None:
        """Append a group to the queue.

        Raises:
            ValueError: the group is queued already.
        """
        self._require_new(group)
        entry = (self._next_place, group)
        self._next_place += 1
        self._index(entry, at_front=False)

    def restore_front(self, groups: Sequence[QueuedGroup]) -> None:
        """Put groups back at the front, in the given order.

        Raises:
            ValueError: one of the groups is queued already; nothing has changed.
        """
        for group in groups:
            self._require_new(group)
        for group in reversed(groups):
            self._first_place -= 1
            entry = (self._first_place, group)
            self._index(entry, at_front=True)

    def remove(self, group_ids: Iterable[int]) -> list[QueuedGroup]:
        """Remove groups from any position; ids that are not queued are skipped.

        Returns:
            The removed groups, in the order of the ids.
        """
        removed = []
        for group_id in group_ids:
            entry = self._entries.pop(group_id)
            if entry is not None:
                self._unindex(entry[1])
                removed.append(entry[1])
        return removed

    def clear(self) -> None:
        """Remove every queued group."""
        self.__init__()  # type: ignore[misc]

    def plan_batch(
        self, batch_size: int, minimums: Mapping[int, float] | None = None
    ) -> list[QueuedGroup] | None:
        """Choose the next batch without changing the queue.

        Without minimums: whole packs in order of completion; when packs do not add up, the oldest
        exact combination. With minimums: see `packing.pack_with_minimums`.

        Args:
            batch_size: sequences wanted, at least 1.
            minimums: environment → guaranteed share of the batch; the mapping must not be mutated
                between calls.

        Returns:
            Groups in order of delivery that hold exactly `batch_size` sequences; None when the
            queue cannot provide them.
        """
        if self.num_sequences < batch_size:
            return None
        if not minimums:
            return plan_packs(self._rows, batch_size) or plan_combination(self._rows, batch_size)
        if self._refused == (batch_size, minimums):
            return None
        planned = plan_with_minimums(self._senders, self.largest_group, batch_size, minimums)
        self._refused = None if planned else (batch_size, minimums)
        return planned

    def plan_oldest(self, batch_size: int) -> list[QueuedGroup] | None:
        """Choose the oldest groups that together hold at most `batch_size` sequences.

        Returns:
            Groups in queue order, at least one; None while fewer than `batch_size` sequences are
            queued.
        """
        if self.num_sequences < batch_size:
            return None
        planned: list[QueuedGroup] = []
        room = batch_size
        for group in self:
            room -= group.num_sequences
            if planned and room < 0:
                break
            planned.append(group)
        return planned or None

    def take_batch(
        self, batch_size: int, minimums: Mapping[int, float] | None = None
    ) -> list[QueuedGroup] | None:
        """Remove and return the next batch, as `plan_batch` chooses it."""
        planned = self.plan_batch(batch_size, minimums)
        if planned is not None:
            self.remove(group.group_id for group in planned)
        return planned

    def _require_new(self, group: QueuedGroup) -> None:
        if self._entries.get(group.group_id) is not None:
            raise ValueError(f"group {group.group_id} is already queued")

    def _index(self, entry: Entry, *, at_front: bool) -> None:
        group = entry[1]
        former_largest = self._rows.largest
        self._entries.add(entry, at_front=at_front)
        self._rows.add(entry, at_front=at_front)
        in_row = self._senders.add(entry, at_front=at_front)
        completes_pack = in_row * group.num_sequences % self._rows.largest == 0
        if at_front or completes_pack or former_largest != self._rows.largest:
            self._refused = None
        self._count(group, 1)

    def _unindex(self, group: QueuedGroup) -> None:
        self._refused = None
        self._rows.remove(group)
        self._senders.remove(group)
        self._count(group, -1)

    def _count(self, group: QueuedGroup, sign: int) -> None:
        self.num_sequences += sign * group.num_sequences
        self.num_tokens += sign * group.num_tokens
        self.num_bytes += sign * group.num_bytes
        self._totals.add(group.env_id, sign * group.num_sequences)
        self.groups_by_version[group.version] += sign
        if not self.groups_by_version[group.version]:
            del self.groups_by_version[group.version]

"""The queue of groups that wait for a batch: first in, first out, with running counters; pure.

It holds descriptions, never payloads, so its size does not depend on how long trajectories are.

Invariants: a group is queued at most once; `num_sequences`, `sizes` and the counters per
environment always equal what a walk over the queue would find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from atroposlib.api.packing import oldest_combination, pack_exact, pack_with_minimums

__all__ = ["GroupQueue", "QueuedGroup"]

_COMBINATION_WINDOW = 2048
"""How many of the oldest groups the exact search looks at; bounds its cost."""


class QueuedGroup(NamedTuple):
    """What batching knows of a group; the store has the rest under `group_id`."""

    group_id: int
    env_id: int | None
    """Registered sender; None when nobody registered under the id it gave."""
    num_sequences: int
    num_tokens: int
    num_bytes: int = 0
    """Bytes of the stored payload."""
    lane: Literal["json", "msgpack"] = "json"
    """Encoding of the stored payload."""
    version: int = 0
    """Policy version the sender stamped, else the trainer's at admission."""
    received_at: float = 0.0
    """Unix time of admission, in seconds."""
    min_score: float = 0.0
    max_score: float = 0.0


class GroupQueue:
    """First in, first out queue of groups; counting is O(1), removing O(groups removed)."""

    def __init__(self) -> None:
        self._groups: dict[int, QueuedGroup] = {}
        self._num_sequences = 0
        self._num_tokens = 0
        self._num_bytes = 0
        self._sizes: Counter[int] = Counter()
        self._sequences_by_env: Counter[int | None] = Counter()
        self._sizes_by_env: dict[int | None, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups.values())

    @property
    def num_sequences(self) -> int:
        """Sequences in all queued groups."""
        return self._num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens in all queued groups."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all queued groups."""
        return self._num_bytes

    @property
    def largest_group(self) -> int:
        """Sequences in the largest queued group, 0 when the queue is empty."""
        return max(self._sizes, default=0)

    @property
    def sequences_by_env(self) -> Mapping[int | None, int]:
        """Queued sequences of every sender that has some."""
        return self._sequences_by_env

    def largest_group_of(self, env_id: int) -> int:
        """Sequences in the largest queued group of one environment, 0 when it has none."""
        return max(self._sizes_by_env.get(env_id, ()), default=0)

    @property
    def unpackable_sequences(self) -> int:
        """Sequences in groups whose size never adds up to the largest queued size."""
        largest = self.largest_group
        return sum(size * n for size, n in self._sizes.items() if largest % size)

    def append(self, group: QueuedGroup) -> None:
        """Queue a group behind all others.

        Raises:
            ValueError: the group is queued already.
        """
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is already queued")
        self._groups[group.group_id] = group
        self._count(group, 1)

    def get(self, group_id: int) -> QueuedGroup | None:
        """Return a queued group by its id, None when it is not queued."""
        return self._groups.get(group_id)

    def window(self, offset: int, limit: int) -> list[QueuedGroup]:
        """Return up to `limit` groups from position `offset`, oldest first."""
        return list(islice(self, offset, offset + limit))

    def remove(self, group_ids: Iterable[int]) -> list[QueuedGroup]:
        """Take groups out of the queue, wherever they are; ids that are not queued are skipped.

        Returns:
            The removed groups, in the order asked for.
        """
        removed = []
        for group_id in group_ids:
            group = self._groups.pop(group_id, None)
            if group is not None:
                self._count(group, -1)
                removed.append(group)
        return removed

    def restore_front(self, groups: Sequence[QueuedGroup]) -> None:
        """Put groups back before all others, in the order given.

        Raises:
            ValueError: one of the groups is queued already; nothing has changed.
        """
        for group in groups:
            if group.group_id in self._groups:
                raise ValueError(f"group {group.group_id} is already queued")
        restored = {group.group_id: group for group in groups}
        self._groups = restored | self._groups
        for group in restored.values():
            self._count(group, 1)

    def clear(self) -> None:
        """Forget every queued group."""
        self.__init__()  # type: ignore[misc]

    def plan_batch(
        self, batch_size: int, minimums: Mapping[int, float] | None = None
    ) -> list[QueuedGroup] | None:
        """Choose the next batch; the queue stays as it is.

        Without minimums: whole packs in order of completion; when packs do not add up, the oldest
        exact combination. With minimums: see `packing.pack_with_minimums`.

        Args:
            batch_size: sequences wanted, at least 1.
            minimums: environment → guaranteed share of the batch.

        Returns:
            Groups in order of delivery that hold exactly `batch_size` sequences; None when the
            queue cannot provide them.
        """
        if self._num_sequences < batch_size:
            return None
        return self._find_guaranteed(batch_size, minimums) if minimums else self._find(batch_size)

    def take_batch(
        self, batch_size: int, minimums: Mapping[int, float] | None = None
    ) -> list[QueuedGroup] | None:
        """Remove and return the next batch, as `plan_batch` chooses it."""
        planned = self.plan_batch(batch_size, minimums)
        if planned is not None:
            self.remove(group.group_id for group in planned)
        return planned

    def _find(self, batch_size: int) -> list[QueuedGroup] | None:
        sizes = (group.num_sequences for group in self)
        positions = pack_exact(sizes, largest=self.largest_group, batch_size=batch_size)
        if positions is None:
            window = [group.num_sequences for group in islice(self, _COMBINATION_WINDOW)]
            positions = oldest_combination(window, batch_size)
        return self._at(positions) if positions else None

    def _find_guaranteed(
        self, batch_size: int, minimums: Mapping[int, float]
    ) -> list[QueuedGroup] | None:
        positions = pack_with_minimums(
            [(group.num_sequences, group.env_id) for group in self],
            largest=self.largest_group,
            batch_size=batch_size,
            minimums=minimums,
        )
        return None if positions is None else self._at(positions)

    def _at(self, positions: Collection[int]) -> list[QueuedGroup]:
        prefix = list(islice(self, max(positions) + 1))
        return [prefix[position] for position in positions]

    def _count(self, group: QueuedGroup, sign: int) -> None:
        self._num_sequences += sign * group.num_sequences
        self._num_tokens += sign * group.num_tokens
        self._num_bytes += sign * group.num_bytes
        env_sizes = self._sizes_by_env.setdefault(group.env_id, Counter())
        for counter, key, amount in (
            (self._sizes, group.num_sequences, 1),
            (env_sizes, group.num_sequences, 1),
            (self._sequences_by_env, group.env_id, group.num_sequences),
        ):
            counter[key] += sign * amount  # type: ignore[index]
            if not counter[key]:  # type: ignore[index]
                del counter[key]  # type: ignore[arg-type]
        if not env_sizes:
            del self._sizes_by_env[group.env_id]

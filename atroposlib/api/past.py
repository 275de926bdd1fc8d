"""The groups that were delivered last, kept for inspection; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atroposlib.api.queue import QueuedGroup

__all__ = ["PastGroups"]


class PastGroups:
    """Delivered groups, oldest first, bounded in number and in payload bytes."""

    def __init__(self, *, max_groups: int, max_bytes: int) -> None:
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._groups: dict[int, QueuedGroup] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all kept groups."""
        return self._num_bytes

    def get(self, group_id: int) -> QueuedGroup | None:
        """Return a kept group, None when it is not kept."""
        return self._groups.get(group_id)

    def add(self, groups: Iterable[QueuedGroup]) -> list[int]:
        """Keep delivered groups; return the ids of those that fell out to make room."""
        for group in groups:
            known = self._groups.pop(group.group_id, None)
            self._num_bytes -= known.num_bytes if known else 0
            self._groups[group.group_id] = group
            self._num_bytes += group.num_bytes
        fallen = []
        while len(self._groups) > self._max_groups or self._num_bytes > self._max_bytes:
            oldest = self._groups.pop(next(iter(self._groups)))
            self._num_bytes -= oldest.num_bytes
            fallen.append(oldest.group_id)
        return fallen

    def clear(self) -> list[int]:
        """Forget every group; return their ids."""
        forgotten = list(self._groups)
        self._groups.clear()
        self._num_bytes = 0
        return forgotten

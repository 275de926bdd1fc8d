"""Payloads in this process's memory: fast, and gone when the process ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atroposlib.api.store.base import StoredGroup

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `GroupStore` for throw-away runs and tests; its methods never wait."""

    def __init__(self) -> None:
        self._payloads: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    async def append(self, groups: Sequence[StoredGroup]) -> None:
        """Keep the payloads."""
        self._payloads.update((group.entry.group_id, group.payload) for group in groups)

    async def fetch(self, group_ids: Sequence[int]) -> list[bytes]:
        """Return payloads in the order asked for; KeyError when one is not there."""
        return [self._payloads[group_id] for group_id in group_ids]

    async def discard(self, group_ids: Collection[int]) -> None:
        """Drop payloads; ids that are not there are skipped."""
        for group_id in group_ids:
            self._payloads.pop(group_id, None)

    async def clear(self) -> None:
        """Drop every payload."""
        self._payloads.clear()

    async def close(self) -> None:
        """Drop every payload."""
        self._payloads.clear()

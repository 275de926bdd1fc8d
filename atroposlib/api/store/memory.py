"""A run in the memory of this process, lost when the process ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atroposlib.api.store.base import Apply, Payload, PayloadCheck, Restore, applied, check_payloads

__all__ = ["MemoryRunStore"]


class MemoryRunStore:
    """A `RunStore` for temporary runs and tests; its methods never wait.

    The run lasts as long as this object: opened again, it replays its log like a store on disk.
    """

    def __init__(self) -> None:
        self._apply: Apply = _ignore
        self._snapshot: bytes | None = None
        self._first_position = 0
        self._records: list[bytes] = []
        self._num_guarded = 0
        self._payloads: dict[int, bytes] = {}
        self._next_group_id = 0

    @property
    def full_reason(self) -> str | None:
        """Always None: the store has no limit."""
        return None

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Restore the snapshot and apply the records after it."""
        self._apply = apply
        if self._snapshot is not None:
            restore(self._snapshot)
        for position, record in enumerate(self._records, start=self._first_position):
            applied(apply, position, record)

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Append a record with its payloads and apply it; False if the fence has moved."""
        if fence is not None:
            if fence < self._num_guarded:
                return False
            self._num_guarded += 1
        self._payloads.update(payloads)
        position = self._first_position + len(self._records)
        self._records.append(record)
        applied(self._apply, position, record)
        return True

    async def sync(self) -> None:
        """Do nothing: there are no other replicas."""

    async def new_group_ids(self, count: int) -> range:
        """Reserve unused ids."""
        first = self._next_group_id
        self._next_group_id += count
        return range(first, self._next_group_id)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Return payloads in the order of the ids; KeyError if one is missing."""
        contents = [self._payloads[group_id] for group_id in group_ids]
        check_payloads(group_ids, contents, checks)
        return contents

    async def discard(self, group_ids: Collection[int]) -> None:
        """Delete payloads; unknown ids are skipped."""
        for group_id in group_ids:
            self._payloads.pop(group_id, None)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Replace the records before a position by a snapshot."""
        num_records = position - self._first_position
        if num_records >= 0:
            self._snapshot = snapshot
            self._first_position = position
            del self._records[:num_records]

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return None: only this process serves the run."""
        return None

    async def close(self) -> None:
        """Do nothing: the run may be opened again while this object exists."""


def _ignore(position: int, record: bytes) -> None:
    """Placeholder for the caller's `apply` until the store is opened."""

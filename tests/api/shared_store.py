"""A store that several replicas in one process share: one log, each replica applies it by itself.

It behaves like the real ones where that matters: replicas lag until they append or sync, an append
is written in full or not at all, and a replica that is killed stops in the middle of what it did.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence

from atroposlib.api.records import decode_record
from atroposlib.api.store.base import Apply, Payload, PayloadCheck, Restore, check_payloads

__all__ = ["SharedLog", "SharedRunStore"]


class SharedLog:
    """What the replicas have in common."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.records: list[bytes] = []
        self.snapshot: tuple[int, bytes] | None = None
        self.payloads: dict[int, bytes] = {}
        self.num_guarded = 0
        self.next_group_id = 0
        self.alive: set[str] = set()


class SharedRunStore:
    """The `RunStore` of one replica."""

    full_reason = None

    def __init__(self, log: SharedLog, replica: str) -> None:
        self._log = log
        self._replica = replica
        self._applied = 0
        self._apply: Apply
        self._restore: Restore

    async def _pause(self) -> None:
        """Let others run, for a while that differs every time."""
        for _ in range(self._log.random.randrange(4)):
            await asyncio.sleep(0)

    def _catch_up(self) -> None:
        while self._applied < len(self._log.records):
            position = self._applied
            self._applied += 1
            self._apply(position, self._log.records[position])

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load what there is."""
        self._apply, self._restore = apply, restore
        self._log.alive.add(self._replica)
        await self.jump()

    async def jump(self) -> None:
        """Take over the snapshot, if there is one, and what came after it."""
        if self._log.snapshot is not None:
            self._applied, content = self._log.snapshot
            self._restore(content)
        self._catch_up()

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write, unless the fence has moved."""
        await self._pause()
        is_written = fence is None or fence == self._log.num_guarded
        if is_written:
            self._log.num_guarded += decode_record(record).is_guarded
            self._log.payloads.update(payloads)
            self._log.records.append(record)
        await self._pause()
        self._catch_up()
        return is_written

    async def sync(self) -> None:
        """Apply what others wrote."""
        await self._pause()
        self._catch_up()

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids."""
        await self._pause()
        first = self._log.next_group_id
        self._log.next_group_id += count
        return range(first, first + count)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Read payloads."""
        await self._pause()
        contents = [self._log.payloads[group_id] for group_id in group_ids]
        check_payloads(group_ids, contents, checks)
        return contents

    async def discard(self, group_ids: Collection[int]) -> None:
        """Forget payloads."""
        await self._pause()
        for group_id in group_ids:
            self._log.payloads.pop(group_id, None)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Note a snapshot; the records stay, which no reader may notice."""
        if self._log.snapshot is None or self._log.snapshot[0] < position:
            self._log.snapshot = (position, snapshot)

    async def alive_replicas(self) -> frozenset[str]:
        """Return who lives."""
        return frozenset(self._log.alive)

    async def close(self) -> None:
        """Stop to be one of the replicas."""
        self._log.alive.discard(self._replica)

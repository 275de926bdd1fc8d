"""Stores on one run for tests, each with the list of what it has applied."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from atroposlib.api.store.base import Payload
from atroposlib.api.store.redis import RedisRunStore


class Replica:
    """A store and the simplest state there is: the records applied, and how many were guarded."""

    def __init__(self, url: str, run_name: str, **options: Any) -> None:
        self.run_name = run_name
        self.store = RedisRunStore(url, run_name, **options)
        self.applied: list[bytes] = []
        self.num_restored = 0

    @property
    def num_guarded(self) -> int:
        return sum(record.startswith(b"guarded") for record in self.applied)

    async def open(self) -> Replica:
        await self.store.open(self._apply, self._restore)
        return self

    async def append_guarded(self, record: bytes) -> int:
        """Append a guarded record, deciding anew when another came first; return the attempts."""
        attempts = 1
        while not await self.store.append(b"guarded " + record, fence=self.num_guarded):
            attempts += 1
        return attempts

    async def append_group(self, content: bytes) -> int:
        (group_id,) = await self.store.new_group_ids(1)
        await self.store.append(b"group %d" % group_id, [Payload(group_id, content)])
        return group_id

    async def compact(self) -> None:
        records = [record.decode() for record in self.applied]
        await self.store.compact(json.dumps(records).encode(), position=len(records))

    def _apply(self, position: int, record: bytes) -> None:
        assert position == len(self.applied)
        self.applied.append(record)

    def _restore(self, snapshot: bytes) -> None:
        self.num_restored += 1
        self.applied = [record.encode() for record in json.loads(snapshot)]


@asynccontextmanager
async def replicas(url: str, count: int, **options: Any) -> AsyncIterator[list[Replica]]:
    """Open several replicas of a fresh run; they are closed at the end."""
    run_name = uuid.uuid4().hex
    opened = [await Replica(url, run_name, **options).open() for _ in range(count)]
    try:
        yield opened
    finally:
        for replica in opened:
            await replica.store.close()

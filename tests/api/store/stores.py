"""A run opened by a test: its store, and what the store has applied.

`stores.py` is what the conformance suite asks of a store. A further store joins with one entry in
`conftest.py`: a function that returns a store of the same run each time it is called.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from atroposlib.api.store.base import Payload, RunStore

MakeStore = Callable[[], RunStore]


class OpenRun:
    """The simplest state there is: every record in order, and how many of them are guarded."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.records: list[bytes] = []
        self.snapshot_records = 0

    @property
    def fence(self) -> int:
        return sum(record.startswith(b"guarded") for record in self.records)

    async def guarded(self, name: bytes = b"", *, fence: int | None = None) -> bool:
        """Append a guarded record under the present fence, or the one given."""
        at = self.fence if fence is None else fence
        return await self.store.append(b"guarded " + name, fence=at)

    async def group(self, content: bytes) -> int:
        """Append a record with one payload; return the id of the group."""
        (group_id,) = await self.store.new_group_ids(1)
        record = b"group %d" % group_id
        assert await self.store.append(record, [Payload(group_id, content)])
        return group_id

    async def compact(self) -> None:
        records = [record.decode() for record in self.records]
        await self.store.compact(json.dumps(records).encode(), position=len(records))

    def apply(self, position: int, record: bytes) -> None:
        assert position == len(self.records), "records are applied in order, each once"
        self.records.append(record)

    def restore(self, snapshot: bytes) -> None:
        self.records = [record.encode() for record in json.loads(snapshot)]
        self.snapshot_records = len(self.records)


@asynccontextmanager
async def opened(make_store: MakeStore) -> AsyncIterator[OpenRun]:
    """Open the run, and close it at the end."""
    run = OpenRun(make_store())
    await run.store.open(run.apply, run.restore)
    try:
        yield run
    finally:
        await run.store.close()


async def is_stored(store: RunStore, group_id: int) -> bool:
    """Tell whether a payload can be fetched."""
    try:
        await store.fetch([group_id])
    except KeyError:
        return False
    return True

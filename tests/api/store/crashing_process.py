"""A process that writes a run and notes what it was told, until it is killed.

    python -m tests.api.store.crashing_process RUN_FILE NOTES_FILE

Notes, one a line: `applied RECORD`, `acknowledged GROUP_ID`, `discarding GROUP_ID`,
`discarded GROUP_ID`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from atroposlib.api.store.base import Payload
from atroposlib.api.store.sqlite import SqliteRunStore
from tests.api.store.stores import OpenRun

NUM_WRITERS = 8
SIZES = (0, 300, 5_000, 33_000, 130_000, 300_000)


def content_of(group_id: int) -> bytes:
    """Return the payload of a group: any process can tell what it must be."""
    numbers = random.Random(group_id)
    return numbers.randbytes(numbers.choice(SIZES))


class NotedRun(OpenRun):
    """Notes what is applied; what earlier processes wrote is noted by them."""

    def __init__(self, store: SqliteRunStore, notes: int) -> None:
        super().__init__(store)
        self._notes = notes
        self.is_loading = True

    def note(self, line: str) -> None:
        os.write(self._notes, line.encode() + b"\n")

    def apply(self, position: int, record: bytes) -> None:
        super().apply(position, record)
        if not self.is_loading:
            self.note(f"applied {record.decode()}")


async def write_groups(run: NotedRun) -> None:
    mine: list[int] = []
    while True:
        (group_id,) = await run.store.new_group_ids(1)
        record = b"group %d" % group_id
        assert await run.store.append(record, [Payload(group_id, content_of(group_id))])
        run.note(f"acknowledged {group_id}")
        mine.append(group_id)
        if len(mine) > 10:
            unwanted, mine = mine[:8], mine[8:]
            for group_id in unwanted:
                run.note(f"discarding {group_id}")
            await run.store.discard(unwanted)
            for group_id in unwanted:
                run.note(f"discarded {group_id}")


async def write_others(run: NotedRun) -> None:
    while True:
        await run.guarded()
        await asyncio.sleep(0.005)
        await run.compact()


async def main(run_file: str, notes_file: str) -> None:
    notes = os.open(notes_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    run = NotedRun(SqliteRunStore(Path(run_file)), notes)
    await run.store.open(run.apply, run.restore)
    run.is_loading = False
    await asyncio.gather(*[write_groups(run) for _ in range(NUM_WRITERS)], write_others(run))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

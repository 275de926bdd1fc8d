"""The log of a run when a reply of the store is lost and others write a snapshot meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.queue import RunLimits
from atroposlib.api.records import decode_record
from atroposlib.api.run import Run
from atroposlib.api.state import RunState
from atroposlib.api.store.base import MemoryRunStore
from atroposlib.errors import RunStoreError
from atroposlib.wire import decode_group, encode_group
from tests.api.helpers import make_group

GROUP = decode_group(encode_group(make_group(2)))


class OvertakenStore(MemoryRunStore):
    """Writes records, loses the replies, and finds a snapshot of another replica in their place."""

    async def open(self, apply, restore) -> None:
        self._restore_run = restore
        self._other = RunState(RunLimits())
        await super().open(self._apply_elsewhere, restore)

    def _apply_elsewhere(self, position: int, content: bytes) -> None:
        self._other.apply(decode_record(content))

    async def append(self, record, payloads=(), *, fence=None) -> bool:
        is_written = await super().append(record, payloads, fence=fence)
        self._restore_run(snapshot(self._other))
        return is_written


async def test_groups_whose_outcome_a_snapshot_swallowed_are_a_failure_of_the_store():
    run = Run(OvertakenStore())
    await run.open()

    with pytest.raises(RunStoreError, match="idempotency key"):
        await run.admit([GROUP])

    assert len(run.state.queue) == 1  # the snapshot tells


async def test_groups_with_a_key_are_answered_from_the_snapshot():
    run = Run(OvertakenStore())
    await run.open()

    admission = await run.admit([GROUP], key="one", digest=7)

    assert [placement.buffered_sequences for placement in admission.placements] == [None]
    assert (await run.admit([GROUP], key="one", digest=7)).is_repeat


async def test_snapshot_in_the_middle_starts_the_count_of_records_anew():
    run = Run(OvertakenStore())
    await run.open()
    for position in range(3):
        run._log._num_records = 10
        await run.admit([GROUP], key=str(position))

        assert run._log._num_records == 0


class UnreachableStore(MemoryRunStore):
    """Fails every write, after a while, until it is reachable."""

    is_reachable = False
    num_attempts = 0

    async def append(self, record, payloads=(), *, fence=None) -> bool:
        self.num_attempts += 1
        await asyncio.sleep(0.01)
        if not self.is_reachable:
            raise RunStoreError("Redis at r failed after 9 attempts: timeout")
        return await super().append(record, payloads, fence=fence)


async def test_calls_that_wait_for_each_other_in_an_outage_fail_together():
    store = UnreachableStore()
    run = Run(store)
    await run.open()
    store.num_attempts = 0

    results = await asyncio.gather(*(run.reset() for _ in range(10)), return_exceptions=True)

    assert {str(result) for result in results} == {"Redis at r failed after 9 attempts: timeout"}
    assert store.num_attempts == 1
    store.is_reachable = True
    await asyncio.gather(*(run.reset() for _ in range(3)))
    assert store.num_attempts == 4

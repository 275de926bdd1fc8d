"""Whether groups come in, how many more may be started, which requests are known: tables."""

from __future__ import annotations

import pytest

from atroposlib.api.queue import (
    Placement,
    QueuedGroup,
    QueueFullError,
    RunLimits,
    Waiting,
    check_room,
    room_for,
)
from atroposlib.api.state import KeyBook, PastGroups
from atroposlib.errors import RunStoreError
from tests.api.run_helpers import decoded, env_request, started_run
from tests.api.shared_store import SharedLog, SharedRunStore


@pytest.mark.parametrize(
    ("limits", "waiting", "arriving", "is_refused"),
    [
        (RunLimits(), (10**9, 10**12), (1, 1), False),
        (RunLimits(max_queue_sequences=8), (6, 0), (2, 0), False),
        (RunLimits(max_queue_sequences=8), (6, 0), (3, 0), True),
        (RunLimits(max_queue_sequences=8), (0, 0), (9, 0), False),
        (RunLimits(max_queue_bytes=100), (1, 60), (1, 40), False),
        (RunLimits(max_queue_bytes=100), (1, 60), (1, 41), True),
        (RunLimits(max_queue_bytes=100), (0, 0), (1, 101), False),
    ],
)
def test_room_is_what_the_limits_leave(limits, waiting, arriving, is_refused):
    def check() -> None:
        check_room(
            limits, waiting=Waiting(*waiting), arriving=Waiting(*arriving), retry_after_s=3.0
        )

    if not is_refused:
        check()
        return
    with pytest.raises(QueueFullError, match="send them again in 3 s") as refusal:
        check()
    assert (refusal.value.status, refusal.value.retry_after_s) == (503, 3.0)


@pytest.mark.parametrize(
    ("limits", "waiting", "pending", "room"),
    [
        (RunLimits(), (5, 50), 8, None),
        # 100 - 5 in the queue; batches on their way take no room in the queue.
        (RunLimits(max_queue_sequences=100), (5, 50), 8, 95),
        # 8 x (2 + 1) - 5 - 8.
        (RunLimits(max_staleness_steps=2), (5, 50), 8, 11),
        # (200 - 50) bytes at 10 a sequence.
        (RunLimits(max_queue_bytes=200), (5, 50), 8, 15),
        (RunLimits(max_queue_bytes=200), (0, 0), 8, None),
        (RunLimits(max_queue_sequences=100, max_staleness_steps=2), (5, 50), 8, 11),
        (RunLimits(max_queue_sequences=3), (5, 50), 0, 0),
    ],
)
def test_room_to_produce_is_the_tightest_bound(limits, waiting, pending, room):
    found = room_for(limits, waiting=Waiting(*waiting), pending_sequences=pending, batch_size=8)

    assert found == room


def test_staleness_bounds_nothing_before_a_trainer_registered():
    limits = RunLimits(max_staleness_steps=2)

    assert room_for(limits, waiting=Waiting(9, 9), pending_sequences=0, batch_size=0) is None


def test_key_book_forgets_the_oldest_keys():
    book = KeyBook()
    for number in range(65_537):
        book.remember(f"k{number}", number, [Placement(None)])

    assert len(book) == 65_536
    assert (book.find("k0"), book.find("k1").digest) == (None, 1)


def test_key_book_is_bounded_in_bytes():
    book = KeyBook()
    many = [Placement(1)] * 1_000_000  # about 8 MB of answers; 32 MiB hold four
    for number in range(6):
        book.remember(f"k{number}", number, many)

    assert [key for key, _ in book.items()] == ["k2", "k3", "k4", "k5"]


@pytest.mark.parametrize(
    ("max_groups", "max_bytes", "kept"),
    [(3, 1000, [2, 3, 4]), (10, 25, [3, 4]), (0, 1000, []), (10, 0, [])],
)
def test_past_keeps_the_newest(max_groups, max_bytes, kept):
    past = PastGroups(max_groups=max_groups, max_bytes=max_bytes)

    fallen = past.add([QueuedGroup(i, None, 1, 1, num_bytes=10) for i in range(5)])

    assert [group.group_id for group in past] == kept
    assert fallen == [i for i in range(5) if i not in kept]
    assert past.num_bytes == 10 * len(kept)


class CompactingStore(SharedRunStore):
    """A replica whose append is answered by a snapshot that another replica wrote meanwhile."""

    other = None

    async def append(self, record, payloads=(), *, fence=None):
        if not payloads:
            return await super().append(record, payloads, fence=fence)
        await self.other.store.append(record, payloads, fence=fence)
        self.other._log._num_records = 10**6
        await self.other.tick()
        await self.jump()
        return True


async def two_replicas():
    log = SharedLog(0)
    here = await started_run(CompactingStore(log, "here"), replica="here")
    there = await started_run(SharedRunStore(log, "there"), replica="there")
    here.store.other = there
    return here, there


async def test_replica_overtaken_by_a_snapshot_goes_on_from_it():
    here, there = await two_replicas()
    await here.register_env(env_request())

    admission = await here.admit([decoded(env_id=0)], key="k", digest=1)
    await there.set_policy_version(3)
    await here.store.sync()

    assert admission.placements == [Placement(None)]
    assert len(here.state.queue) == len(there.state.queue) == 1
    assert here.state.policy_version == 3
    assert here.state.fence == there.state.fence


async def test_groups_whose_outcome_is_lost_are_not_answered_with_a_guess():
    here, there = await two_replicas()

    with pytest.raises(RunStoreError, match="before the result arrived"):
        await here.admit([decoded()])

    assert len(there.state.queue) == 1

"""Whatever a log holds, applying it ends well, and ends the same everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from atroposlib.api.journal import RunLog, restore, snapshot
from atroposlib.api.queue import RunLimits
from atroposlib.api.records import Record
from atroposlib.api.stalls import find_stalls
from atroposlib.api.state import RunState
from atroposlib.api.store.base import MemoryRunStore
from tests.adversary.forged_records import Forger

LIMITS = RunLimits(keep_past_groups=4, keep_past_bytes=45)
RECORDS_PER_RUN = 200
FEW, MANY = 600, 100_000


class Replica:
    """A run that is told what its log holds, as a store tells it."""

    def __init__(self) -> None:
        self.state = RunState(LIMITS)
        self.log = RunLog(MemoryRunStore(), self.state, on_applied=self._forget)
        self.position = 0

    def take(self, content: bytes) -> None:
        self.log._apply(self.position, content)
        self.position += 1

    def _forget(self, record: Record) -> None:
        """Nobody waits here."""


def forged_runs(num_records: int, seed: int) -> None:
    """Apply forged records in runs of a few hundred, each on two replicas."""
    rng = random.Random(seed)
    while num_records > 0:
        replica, late = Replica(), Replica()
        forger = Forger(rng, replica.state)
        restored_at = rng.randrange(RECORDS_PER_RUN)
        for number in range(min(num_records, RECORDS_PER_RUN)):
            if number == restored_at:
                restore(late.state, snapshot(replica.state))
            content = forger.any_record()
            replica.take(content)
            if number >= restored_at:
                late.take(content)
            if replica.log.failure is not None:  # of a kind that only another version knows
                replica.log.failure = late.log.failure = None
        num_records -= RECORDS_PER_RUN
        if late.position:
            assert snapshot(late.state) == snapshot(replica.state)
        check_readable(replica.state)


def admitted_runs(num_records: int, seed: int) -> None:
    """Apply what clients can bring about; nothing of it may be set aside."""
    rng = random.Random(seed)
    while num_records > 0:
        replica = Replica()
        forger = Forger(rng, replica.state)
        for _ in range(min(num_records, RECORDS_PER_RUN)):
            replica.take(forger.admitted_record())
            assert replica.state.fault is None
            assert replica.log.failure is None
        num_records -= RECORDS_PER_RUN
        assert replica.state.num_set_aside == 0
        check_readable(replica.state)


def check_readable(state: RunState) -> None:
    """Ask what requests ask; the counters of the queue equal a walk over it."""
    groups = list(state.queue)
    assert state.queue.num_sequences == sum(group.num_sequences for group in groups)
    assert state.queue.num_bytes == sum(group.num_bytes for group in groups)
    buffered = [group for env in state.envs for group in env.buffer]
    assert state.envs.buffered_sequences == sum(group.num_sequences for group in buffered)
    held = [group.group_id for group in state.tickets]
    assert len(held) == len(set(held))
    find_stalls(state.queue, state.envs, batch_size=state.batch_size)
    if state.registration is not None:
        planned = state.plan_batch()
        assert planned is None or {g.group_id for g in planned} <= {g.group_id for g in groups}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("play", [forged_runs, admitted_runs])
def test_apply_never_raises_and_replicas_agree(play: Callable[[int, int], None], seed: int):
    play(FEW, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("play", [forged_runs, admitted_runs])
def test_apply_never_raises_in_a_hundred_thousand_records(play: Callable[[int, int], None]):
    play(MANY, 1_000)

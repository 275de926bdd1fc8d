"""How the off-policy bound counts: slot use and staleness, simulated with the rule of `serve`."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.settings import ApiSettings
from atroposlib.envs.config import StragglerPolicyEnum
from atroposlib.envs.rollouts import StragglerRule, UnfinishedGroups, gather_rollouts
from atroposlib.envs.service_session import CapacityLimits, QueueStatus, worker_limit
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until, until
from tests.envs.small_environment import SmallEnv

SLOTS, GROUP, BATCH, AHEAD = 64, 8, 64, 3


def limits(straggler_batches: float, *, batch: int = BATCH) -> CapacityLimits:
    return CapacityLimits(
        group_size=GROUP,
        batch_size=batch,
        max_batches_offpolicy=AHEAD,
        max_workers=1_000,
        straggler_batches=straggler_batches,
    )


@dataclass
class SimulatedGroup:
    """A group, with the trainer step at which it was started."""

    started_at: int
    num_finished: int = 0


@dataclass
class SimulatedRun:
    """An engine with slots, a queue, and a trainer that takes each batch as soon as it is full."""

    bounds: CapacityLimits
    now: float = 0.0
    step: int = 0
    busy_s: float = 0.0
    most_started: int = 0
    """Most sequences at one time that were started and not trained on."""
    ages: list[int] = field(default_factory=list)
    """Steps from the start of each group to its batch."""
    ages_in_queue: list[int] = field(default_factory=list)
    groups: int = 0
    finished: int = 0
    _queue: deque[tuple[SimulatedGroup, int]] = field(default_factory=deque)
    _waiting: deque[SimulatedGroup] = field(default_factory=deque)
    _ends: list[tuple[float, int, SimulatedGroup]] = field(default_factory=list)

    def run(self, until_s: float, *, spread: float, seed: int = 0) -> None:
        rng = random.Random(seed)
        num_requests = 0
        while self.now < until_s:
            self._start_groups()
            while self._waiting and len(self._ends) < SLOTS:
                num_requests += 1
                length = min(10.0, rng.lognormvariate(0.0, spread))
                entry = (self.now + length, num_requests, self._waiting.popleft())
                heapq.heappush(self._ends, entry)
            ends_at, _, group = heapq.heappop(self._ends)
            self.busy_s += (len(self._ends) + 1) * (ends_at - self.now)
            self.now = ends_at
            self._finish(group)

    def _start_groups(self) -> None:
        status = QueueStatus(current_step=self.step, queue_groups=len(self._queue))
        while self.groups < worker_limit(status, self.bounds, finished_sequences=self.finished):
            self.groups += 1
            self._waiting.extend([SimulatedGroup(self.step)] * GROUP)
        self.most_started = max(self.most_started, GROUP * (self.groups + len(self._queue)))

    def _finish(self, group: SimulatedGroup) -> None:
        group.num_finished += 1
        self.finished += 1
        if group.num_finished == GROUP:
            self.finished -= GROUP
            self.groups -= 1
            self._queue.append((group, self.step))
        if len(self._queue) * GROUP >= BATCH:
            for _ in range(BATCH // GROUP):
                trained, queued_at = self._queue.popleft()
                self.ages.append(self.step - trained.started_at)
                self.ages_in_queue.append(self.step - queued_at)
            self.step += 1

    @property
    def slot_use(self) -> float:
        return self.busy_s / self.now / SLOTS

    @property
    def mean_age(self) -> float:
        return sum(self.ages) / len(self.ages)


@pytest.mark.parametrize("spread", [0.8, 0.95, 1.0])
def test_finished_rollouts_apart_keep_the_slots_busy_at_a_bound_of_three(spread: float) -> None:
    whole, apart = SimulatedRun(limits(0.0)), SimulatedRun(limits(1.0))

    whole.run(300.0, spread=spread)
    apart.run(300.0, spread=spread)

    assert whole.slot_use < 0.94  # 0.91 to 0.83
    assert apart.slot_use >= 0.97
    assert whole.mean_age <= AHEAD - 1 + 0.05
    assert apart.mean_age <= AHEAD + 0.05
    assert apart.most_started <= (AHEAD + 1) * BATCH
    assert max(apart.ages_in_queue) <= AHEAD


@given(
    queue=st.integers(0, 60),
    finished=st.integers(0, 2_000),
    straggler_batches=st.floats(0.0, 4.0),
    batch=st.integers(8, 512),
)
def test_both_counts_hold_whenever_a_group_starts(
    queue: int, finished: int, straggler_batches: float, batch: int
) -> None:
    bounds = limits(straggler_batches, batch=batch)
    status = QueueStatus(current_step=0, queue_groups=queue)

    groups = worker_limit(status, bounds, finished_sequences=finished)

    if groups:
        assert GROUP * (groups + queue) - finished <= AHEAD * batch
        assert GROUP * (groups + queue) <= (AHEAD + straggler_batches) * batch
    assert groups >= worker_limit(status, bounds)
    if not straggler_batches:
        assert groups == worker_limit(status, bounds)


def test_a_limit_of_running_sequences_does_not_count_finished_ones() -> None:
    status = QueueStatus(current_step=0, queue_groups=0, max_running_sequences=20)

    assert worker_limit(status, limits(0.0)) == 2  # 16 of 20
    assert worker_limit(status, limits(0.0), finished_sequences=12) == 4  # 32 - 12
    tiny = QueueStatus(current_step=0, queue_groups=0, max_running_sequences=1)
    assert worker_limit(tiny, limits(0.0)) == 1  # one group always runs


WAIT = StragglerRule()


class Held:
    """Rollouts that end when they are released; records what `UnfinishedGroups` reports."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.durations: list[tuple[int, int]] = []
        self.num_started = 0
        self.unfinished = UnfinishedGroups(
            add_durations=lambda used, lost: self.durations.append((len(used), len(lost)))
        )

    async def collect(self, item: Any) -> Any:
        self.num_started += 1
        if self.num_started == 1:
            await self.release.wait()
        if item == "fails":
            raise ValueError("no")
        return self.num_started

    async def start(self, item: str = "x", rule: StragglerRule = WAIT) -> Any:
        with self.unfinished.counting():
            task = asyncio.create_task(gather_rollouts(self.collect, item, group_size=4, rule=rule))
        await until(lambda: self.num_started == 4)
        return task


async def test_finished_rollouts_are_counted_until_their_group_is_done() -> None:
    held = Held()
    group = await held.start()

    await until(lambda: held.unfinished.num_finished == 3)
    held.release.set()
    await group

    assert held.unfinished.num_finished == 0
    assert held.durations == [(4, 0)]


async def test_rollouts_of_a_cancelled_group_are_no_longer_counted_and_lost() -> None:
    held = Held()
    group = await held.start()
    await until(lambda: held.unfinished.num_finished == 3)

    group.cancel()
    await asyncio.wait({group})

    assert held.unfinished.num_finished == 0
    assert held.durations == [(0, 4)]


async def test_a_failed_rollout_makes_its_group_lost() -> None:
    held = Held()
    held.release.set()
    group = await held.start("fails")

    await asyncio.wait({group})

    assert isinstance(group.exception(), ValueError)
    assert held.durations == [(0, 4)]


async def test_a_rollout_left_out_of_its_group_is_the_only_lost_one() -> None:
    held = Held()
    rule = StragglerRule(StragglerPolicyEnum.SHRINK, timeout_s=0.05, min_group_size=2)
    group = await held.start(rule=rule)

    await group

    assert held.durations == [(3, 1)]
    assert held.unfinished.num_finished == 0


@pytest.mark.slow
async def test_serve_starts_a_group_in_place_of_finished_rollouts(
    service: LiveService, make_env: Any
) -> None:
    service.start()
    # One batch of 4 sequences: two groups of 2. One rollout of each is held.
    env: SmallEnv = make_env(
        rollout_server_url=service.url,
        max_batches_offpolicy=1,
        straggler_batches=1.0,
        max_num_workers=64,
    )
    release = asyncio.Event()
    held: set[int] = set()

    async def hold_one(item: int) -> None:
        if item not in held:
            held.add(item)
            await release.wait()

    env.before_rollout = hold_one

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()

        async def act() -> None:
            # One sequence of each group runs: a third group fits into 4 running sequences.
            await until(lambda: env.num_items == 3)
            await asyncio.sleep(0.1)
            assert env.num_items == 3
            release.set()
            await until(
                lambda: env.service_session is not None and env.service_session.num_groups_sent >= 3
            )
            assert env.num_cancelled == 0

        await serve_until(env, act())


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "num_groups"), [(1.0, 4), (-1.0, 6)])
async def test_serve_keeps_to_the_sequences_that_the_engines_allow(
    service: LiveService, make_env: Any, weight: float, num_groups: int
) -> None:
    # Nothing listens on port 9, so the limit stays at most at 8 sequences: 4 groups of 2.
    settings = ApiSettings(engines=("http://127.0.0.1:9",), max_engine_sequences=8)
    service.start(settings)
    env: SmallEnv = make_env(
        rollout_server_url=service.url,
        max_batches_offpolicy=0,
        max_num_workers=6,
        inference_weight=weight,
    )
    release = asyncio.Event()
    env.before_rollout = lambda item: release.wait()

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()

        async def act() -> None:
            await until(lambda: env.num_items == num_groups)
            await asyncio.sleep(0.1)
            assert env.num_items == num_groups
            release.set()

        await serve_until(env, act())

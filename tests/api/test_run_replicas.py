"""Several replicas on one run: whatever happens in between, everything is delivered once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.records import (
    BatchAcknowledged,
    BatchFormed,
    GroupsAdmitted,
    decode_record,
)
from atroposlib.api.run import Run
from tests.api.run_helpers import Clock, decoded, env_request, open_run, registration, take
from tests.api.shared_store import SharedLog, SharedRunStore

BATCH_SIZE = 3
NUM_REQUESTS = 40


class Cluster:
    """Replicas that come and die, environments that post, a trainer that takes; all at once."""

    def __init__(self, seed: int) -> None:
        self.log = SharedLog(seed)
        self.random = self.log.random
        self.clock = Clock()
        self.replicas: dict[str, Run] = {}
        self.tasks: dict[str, set[asyncio.Task]] = {}
        self.num_started = 0
        self.num_dead = 0
        self.acknowledged: Counter[int] = Counter()

    async def start(self) -> Run:
        name = f"r{self.num_started}"
        self.num_started += 1
        run = await open_run(SharedRunStore(self.log, name), replica=name, clock=self.clock)
        self.replicas[name] = run
        self.tasks[name] = set()
        return run

    def kill(self, name: str) -> None:
        """End a replica in the middle of everything it does."""
        self.log.alive.discard(name)
        self.num_dead += 1
        run = self.replicas.pop(name)
        for task in (*self.tasks.pop(name), *run._deliveries._background):
            task.cancel()

    async def call(self, method: str, *args, **options):
        """Ask any replica; None when it died before it answered."""
        name = self.random.choice(sorted(self.replicas))
        task = asyncio.ensure_future(getattr(self.replicas[name], method)(*args, **options))
        self.tasks[name].add(task)
        task.add_done_callback(self.tasks.get(name, set()).discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            return None

    async def post(self) -> None:
        """Post groups one request after the other, each until it is answered."""
        for number in range(NUM_REQUESTS):
            groups = [decoded(content=b"%d" % number)] * self.random.choice([1, 1, 2])
            while await self.call("admit", groups, key=f"k{number}", digest=number) is None:
                pass

    async def train(self, *, until: int) -> None:
        """Take batches, answer for most of them, until every group was acknowledged."""
        for _ in range(2000):
            if sum(self.acknowledged.values()) >= until:
                return
            lease_s = self.random.choice([None, 10])
            found = await self.call("next_batch", lease_s=lease_s)
            if found is None:
                await asyncio.sleep(0)
                continue
            batch, payloads = found
            assert len(payloads) == len(batch.groups)
            fate = self.random.random()
            if fate < 0.15:
                while await self.call("return_batch", batch.token) is None:
                    pass
            elif fate < 0.25 and lease_s:
                pass  # the trainer died; its lease runs out
            else:
                await self._acknowledge(batch)
        raise AssertionError(f"{sum(self.acknowledged.values())} of {until} groups were delivered")

    async def _acknowledge(self, batch) -> None:
        result = None
        while result is None:
            result = await self.call("acknowledge", batch.token)
        if result in ("acked", "repeated"):
            self.acknowledged.update(batch.group_ids)

    async def pass_time(self) -> None:
        while True:
            self.clock.now += 1
            for name, run in list(self.replicas.items()):
                if self.random.random() < 0.1:
                    run._log._num_records = 10**6  # let it write a snapshot for those who come
                if name in self.replicas:
                    await run.tick()
            await asyncio.sleep(0)

    async def kill_and_start(self, deaths: int) -> None:
        for _ in range(deaths):
            for _ in range(self.random.randrange(20, 200)):
                await asyncio.sleep(0)
            self.kill(self.random.choice(sorted(self.replicas)))
            await self.start()


async def two_replicas(clock: Clock) -> list[Run]:
    log = SharedLog(0)
    here, there = [
        await open_run(SharedRunStore(log, name), replica=name, clock=clock) for name in ("a", "b")
    ]
    await here.register_trainer(registration(batch_size=1))
    assert await here.next_batch() is None
    await there.store.sync()
    return [here, there]


async def overtake(run: Run, other: Run) -> None:
    """Let a replica miss records that another one replaces with a snapshot."""
    other._log._num_records = 10**6
    await other.tick()
    await run.store.jump()


async def test_replica_overtaken_by_a_snapshot_does_not_expire_those_who_asked_others():
    clock = Clock()
    here, there = await two_replicas(clock)
    await there.register_env(env_request())
    await here.tick()
    for _ in range(30):
        clock.now += 30
        await there.view_for(0)
        await there.tick()
    await overtake(here, there)

    await here.tick()

    assert here.state.envs.find(0).is_connected


async def test_request_that_waits_is_woken_by_a_snapshot():
    here, there = await two_replicas(Clock())
    waiting = asyncio.create_task(here.next_batch(wait_s=60))
    await asyncio.sleep(0)
    await there.admit([decoded()])
    await overtake(here, there)

    batch, _ = await asyncio.wait_for(waiting, 60)

    assert batch.group_ids == [0]


def events(log: SharedLog, kind: type) -> list:
    return [r for r in map(decode_record, log.records) if isinstance(r, kind)]


@pytest.mark.parametrize("seed", range(25))
async def test_every_group_is_delivered_once_whoever_dies(seed):
    cluster = Cluster(seed)
    for _ in range(3):
        run = await cluster.start()
    await run.register_trainer(registration(batch_size=BATCH_SIZE))
    posting = asyncio.create_task(cluster.post())
    ticking = asyncio.create_task(cluster.pass_time())
    deaths = asyncio.create_task(cluster.kill_and_start(deaths=seed % 4))
    await posting
    admitted = await _stored_groups(cluster)
    whole = len(admitted) // BATCH_SIZE * BATCH_SIZE
    await cluster.train(until=whole)
    await deaths
    ticking.cancel()

    state = (await cluster.start()).state

    assert max(cluster.acknowledged.values()) == 1
    assert state.step == whole // BATCH_SIZE
    # Batches are formed oldest first, and each group once.
    formed = [i for record in events(cluster.log, BatchFormed) for i in record.group_ids]
    assert formed == admitted[: len(formed)]
    assert sorted(cluster.acknowledged) == sorted(formed)
    assert [group.group_id for group in state.queue] == admitted[whole:]


async def _stored_groups(cluster: Cluster) -> list[int]:
    """Return what the log says was stored: the first request under each key."""
    stored: dict[str, list[int]] = {}
    for record in events(cluster.log, GroupsAdmitted):
        stored.setdefault(record.key, [group.group_id for group in record.groups])
    return [group_id for group_ids in stored.values() for group_id in group_ids]


@pytest.mark.parametrize("seed", range(5))
async def test_replicas_that_applied_the_same_log_are_equal(seed):
    cluster = Cluster(seed)
    for _ in range(3):
        run = await cluster.start()
    await run.register_trainer(registration(batch_size=BATCH_SIZE))
    await asyncio.gather(cluster.post(), cluster.train(until=30))

    for run in cluster.replicas.values():
        await run.tick()
        await run.tick()

    assert len({snapshot(run.state) for run in cluster.replicas.values()}) == 1
    assert events(cluster.log, BatchAcknowledged)


async def test_waiting_caller_is_woken_by_what_another_replica_admitted():
    cluster = Cluster(0)
    here, there = await cluster.start(), await cluster.start()
    await here.register_trainer(registration(batch_size=1))
    await there.store.sync()
    waiting = asyncio.create_task(take(there, wait_s=5))
    await asyncio.sleep(0)

    await here.admit([decoded()])
    await there.store.sync()

    assert await waiting == [0]


async def test_fence_lets_only_one_replica_form_a_batch():
    cluster = Cluster(1)
    runs = [await cluster.start() for _ in range(3)]
    await runs[0].register_trainer(registration(batch_size=1))
    await runs[0].admit([decoded()])
    for run in runs:
        await run.store.sync()

    found = await asyncio.gather(*(run.next_batch() for run in runs))

    assert sum(batch is not None for batch in found) == 1


async def test_plain_batch_of_a_dead_replica_goes_to_another_and_a_leased_one_stays():
    cluster = Cluster(2)
    here, there = await cluster.start(), await cluster.start()
    await here.register_trainer(registration(batch_size=1))
    await here.admit([decoded(), decoded()])
    plain, _ = await here.next_batch()
    leased, _ = await here.next_batch(lease_s=60)
    cluster.kill("r0")

    await there.tick()

    assert await take(there) == plain.group_ids
    assert await there.acknowledge(leased.token) == "acked"

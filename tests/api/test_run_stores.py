"""A run on the stores people use: it survives a restart, and replicas share it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.run import Run
from atroposlib.api.store.sqlite import SqliteRunStore
from tests.api.run_helpers import decoded, env_request, open_run, registration, take

NUM_GROUPS = 120


@pytest.fixture(params=["sqlite", "redis"])
def open_store(request, tmp_path):
    """Return a function that opens the store of one run for a replica."""
    if request.param == "sqlite":
        return lambda replica: SqliteRunStore(tmp_path / "run.sqlite")
    server = request.getfixturevalue("redis_server")
    redis = pytest.importorskip("atroposlib.api.store.redis")
    name = request.node.originalname
    return lambda replica: redis.RedisRunStore(server.url, name, replica=replica)


async def test_run_survives_a_restart(open_store):
    run = await open_run(open_store("r"), replica="r")
    await run.register_trainer(registration(batch_size=2))
    await run.next_batch()
    await run.register_env(env_request(group_size=4))
    await run.admit([decoded(content=b"%d" % i) for i in range(6)], key="k", digest=1)
    await run.admit([decoded(2, env_id=0)])
    assert await take(run) == [0, 1]
    sent, _ = await run.next_batch()
    leased, _ = await run.next_batch(lease_s=60)
    run._log._num_records = 10**6
    await run.tick()
    await run.set_policy_version(5)
    await run.close()

    again = await open_run(open_store("r"), replica="r")

    batch, payloads = await again.next_batch()
    assert (batch.token, batch.group_ids) == (f"{sent.batch_id}-2", [2, 3])
    assert [payload.content for payload in payloads] == [b"2", b"3"]
    assert await again.acknowledge(leased.token) == "acked"
    assert (await again.admit([decoded()], key="k", digest=1)).is_repeat
    assert (again.state.step, again.state.policy_version) == (2, 5)
    assert again.state.envs.buffered_sequences == 2
    await again.close()


async def test_new_environments_of_a_continued_run_wait_for_its_trainer(tmp_path):
    store = tmp_path / "run.sqlite"
    run = await open_run(SqliteRunStore(store))
    await run.register_trainer(registration())
    await run.next_batch()
    known = await run.register_env(env_request())
    await run.close()

    again = await open_run(SqliteRunStore(store))

    assert await again.register_env(env_request()) is None
    assert await again.view_for(known.env_id) is not None
    await again.register_trainer(registration(replace=True))
    assert await again.register_env(env_request()) is None
    await again.next_batch()
    assert (await again.register_env(env_request())).real_name == "env_1"
    await again.close()


async def test_environment_of_a_replica_that_restarts_does_not_wait(redis_server):
    """The trainer may have requested its batches at another replica."""
    stores = pytest.importorskip("atroposlib.api.store.redis")
    first, second = [
        await open_run(stores.RedisRunStore(redis_server.url, "pair", replica=name), replica=name)
        for name in "ab"
    ]
    await first.register_trainer(registration())
    await first.next_batch()
    await second.close()

    store = stores.RedisRunStore(redis_server.url, "pair", replica="b")
    again = await open_run(store, replica="b")

    assert (await again.register_env(env_request())).real_name == "env_0"
    await again.close()
    await first.close()


async def test_refused_batch_is_no_step_before_and_after_a_restart(open_store):
    run = await open_run(open_store("r"), replica="r")
    await run.register_trainer(registration(batch_size=1))
    await run.admit([decoded(), decoded(), decoded()])
    for steps_done in (1, 1, 2):
        batch, _ = await run.next_batch(lease_s=60)
        assert await run.acknowledge(batch.token, steps_done=steps_done) == "acked"
    told = run.state.step, snapshot(run.state)
    await run.close()

    again = await open_run(open_store("r"), replica="r")

    assert (again.state.step, snapshot(again.state)) == told
    assert again.state.step == 2
    assert await again.acknowledge(batch.token, steps_done=2) == "repeated"
    await again.close()


async def post(run: Run, numbers: range) -> None:
    for number in numbers:
        await run.admit([decoded(content=b"%d" % number)], key=f"k{number}", digest=number)


async def train(run: Run, delivered: Counter[bytes]) -> None:
    while sum(delivered.values()) < NUM_GROUPS:
        found = await run.next_batch(lease_s=60, wait_s=0.2)
        if found is not None:
            batch, payloads = found
            assert await run.acknowledge(batch.token) == "acked"
            delivered.update(payload.content for payload in payloads)


async def test_replicas_on_one_redis_deliver_every_group_once(redis_server):
    redis = pytest.importorskip("atroposlib.api.store.redis")
    runs = []
    for name in ("a", "b", "c"):
        store = redis.RedisRunStore(redis_server.url, "shared", replica=name)
        runs.append(await open_run(store, replica=name))
    await runs[0].register_trainer(registration(batch_size=3))
    delivered: Counter[bytes] = Counter()

    await asyncio.gather(
        *(post(run, range(i, NUM_GROUPS, 3)) for i, run in enumerate(runs)),
        *(train(run, delivered) for run in runs),
    )

    assert delivered == Counter(b"%d" % number for number in range(NUM_GROUPS))
    for run in runs:
        await run.tick()
        await run.tick()
    assert [run.state.step for run in runs] == [NUM_GROUPS // 3] * 3
    await asyncio.gather(*(run.store.sync() for run in runs))
    assert len({snapshot(run.state) for run in runs}) == 1
    for run in runs:
        await run.close()

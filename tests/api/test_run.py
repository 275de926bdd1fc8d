"""One run on one store: admission, batches, environments, what survives a restart."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.queue import KeyReusedError, Placement, QueueFullError
from atroposlib.api.run import RegistrationConflictError
from atroposlib.api.store.base import MemoryRunStore
from atroposlib.errors import ConfigError, GroupError
from tests.api.run_helpers import (
    Clock,
    UnwritableStore,
    decoded,
    env_request,
    open_run,
    registration,
    started_run,
    take,
)


async def test_groups_leave_oldest_first_and_every_batch_is_a_step():
    run = await started_run(batch_size=2)
    for _ in range(6):
        await run.admit([decoded()])

    batches = [await take(run) for _ in range(4)]

    assert batches == [[0, 1], [2, 3], [4, 5], None]
    assert run.state.step == 3


async def test_batch_brings_the_payloads_in_order():
    run = await started_run(batch_size=2)
    await run.admit([decoded(content=b"first"), decoded(content=b"second")])

    batch, payloads = await run.next_batch()

    assert batch.token == "0-1"
    assert payloads == [("json", b"first"), ("json", b"second")]


async def test_groups_from_before_the_registration_stay_queued():
    run = await open_run()
    await run.admit([decoded(4)])

    assert await run.next_batch() is None
    await run.register_trainer(registration(batch_size=4))

    assert await take(run) == [0]


async def test_version_is_the_step_unless_the_group_brings_one():
    run = await started_run(batch_size=1)
    await run.admit([decoded()])
    await take(run)

    await run.admit([decoded(), decoded(version=0)])

    assert [group.version for group in run.state.queue] == [1, 0]


async def test_registration_with_other_settings_is_refused_and_changes_nothing():
    run = await started_run(batch_size=4)

    with pytest.raises(RegistrationConflictError, match="batch_size is 4, this request says 8"):
        await run.register_trainer(registration(batch_size=8))

    assert run.state.batch_size == 4
    assert len(run.state.trainer_ids) == 1


async def test_small_groups_wait_until_they_add_up():
    run = await started_run(batch_size=8)
    await run.register_env(env_request(group_size=4))

    sizes = [
        (await run.admit([decoded(n, env_id=0)])).placements[0].buffered_sequences
        for n in (3, 2, 1, 5)
    ]

    # 3, then 3+2, then 3+1 add up and leave the 2; a larger group need not wait.
    assert sizes == [3, 5, 2, None]
    assert [group.group_id for group in run.state.queue] == [0, 2, 3]
    assert run.state.waiting.num_sequences == 11


async def test_unknown_environments_become_nobody():
    run = await started_run()

    await run.admit([decoded(env_id=7)])

    assert [group.env_id for group in run.state.queue] == [None]


async def test_latest_payload_is_kept_until_another_group_is_queued():
    run = await started_run(batch_size=1, keep_past_groups=0)
    await run.admit([decoded(content=b"one")])
    await take(run)

    latest = await run.payload(run.state.latest_group_id)
    await run.admit([decoded(content=b"two")])
    await run.tick()

    assert latest == ("json", b"one")
    assert await run.payload(0) is None


async def test_past_groups_stay_until_newer_ones_push_them_out():
    run = await started_run(batch_size=1, keep_past_groups=2)
    await run.admit([decoded(content=b"%d" % i) for i in range(4)])
    for _ in range(4):
        await take(run)

    payloads = [await run.payload(group_id) for group_id in range(4)]

    assert payloads == [None, None, ("json", b"2"), ("json", b"3")]


async def test_reset_forgets_everything_but_goes_on_counting_ids():
    store = MemoryRunStore()
    run = await started_run(store, batch_size=1)
    await run.admit([decoded(), decoded(), decoded()])
    await take(run)
    batch, _ = await run.next_batch()

    await run.reset()

    assert await run.acknowledge(batch.token) == "unknown"
    assert (run.state.step, len(run.state.queue), run.state.registration) == (0, 0, None)
    assert [await run.payload(i) for i in range(3)] == [None] * 3
    await run.register_trainer(registration(batch_size=1))
    await run.admit([decoded()])
    again, _ = await run.next_batch()
    assert (again.batch_id, again.group_ids) == (2, [3])


async def test_reset_while_a_group_is_written_drops_the_group():
    class ResettingStore(MemoryRunStore):
        async def new_group_ids(self, count):
            return await super().new_group_ids(count)

        async def append(self, record, payloads=(), *, fence=None):
            if payloads and run.state.epoch == 0:
                await run.reset()
            return await super().append(record, payloads, fence=fence)

    store = ResettingStore()
    run = await open_run(store)

    admission = await run.admit([decoded()])
    await run.tick()

    assert admission.placements == [Placement(None)]
    assert len(run.state.queue) == 0
    assert await run.payload(0) is None


async def test_repeated_key_is_answered_as_before_and_stored_once():
    run = await started_run()
    await run.register_env(env_request(group_size=4))
    first = await run.admit([decoded(3, env_id=0)], key="k", digest=1)
    await run.admit([decoded(1, env_id=0)])

    again = await run.admit([decoded(3, env_id=0)], key="k", digest=1)

    assert first.placements == again.placements == [Placement(3)]
    assert [first.is_repeat, again.is_repeat] == [False, True]
    assert len(run.state.queue) == 2


async def test_key_with_another_body_is_refused():
    run = await started_run()
    await run.admit([decoded()], key="k", digest=1)

    with pytest.raises(KeyReusedError, match="'k' was used for another body"):
        await run.admit([decoded()], key="k", digest=2)

    assert len(run.state.queue) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_key_of_a_bad_length_is_refused(key):
    run = await started_run()

    with pytest.raises(GroupError, match="expected 1 to 255"):
        await run.admit([decoded()], key=key, digest=1)


class SlowStore(MemoryRunStore):
    """A store that lets others run before it writes."""

    async def append(self, record, payloads=(), *, fence=None):
        await asyncio.sleep(0)
        return await super().append(record, payloads, fence=fence)


async def test_identical_requests_at_the_same_time_are_stored_once():
    run = await started_run(SlowStore())

    admissions = await asyncio.gather(
        *(run.admit([decoded(content=b"x")], key="k", digest=1) for _ in range(3))
    )
    await run.tick()

    assert sorted(admission.is_repeat for admission in admissions) == [False, True, True]
    assert [group.group_id for group in run.state.queue] == [0]
    assert [await run.store.fetch([0])] == [[b"x"]]
    with pytest.raises(KeyError):
        await run.store.fetch([1])


async def test_full_queue_refuses_but_answers_repeated_keys():
    run = await started_run(batch_size=4, max_queue_sequences=4)
    await run.admit([decoded(4)], key="k", digest=1)

    with pytest.raises(QueueFullError, match="4 sequences wait") as refusal:
        await run.admit([decoded(1)])

    assert refusal.value.retry_after_s == 5
    assert run.counters["groups/refused_queue_full"] == 1
    assert (await run.admit([decoded(4)], key="k", digest=1)).is_repeat


async def test_request_above_the_limit_is_let_in_when_nothing_waits():
    run = await started_run(max_queue_bytes=4)

    await run.admit([decoded(content=b"123456")])

    with pytest.raises(QueueFullError, match="6 bytes wait"):
        await run.admit([decoded(content=b"1")])


async def test_requests_that_come_together_cannot_exceed_the_limit_together():
    run = await started_run(SlowStore(), max_queue_sequences=4)

    answers = await asyncio.gather(
        *(run.admit([decoded(2)]) for _ in range(4)), return_exceptions=True
    )

    assert [isinstance(answer, QueueFullError) for answer in answers] == [False, False, True, True]
    assert run.state.queue.num_sequences == 4


async def test_restarted_run_goes_on_where_it_was():
    store = MemoryRunStore()
    run = await started_run(store, batch_size=2)
    await run.register_env(env_request(group_size=4))
    await run.admit([decoded(2, env_id=0), decoded(2)], key="k", digest=1)
    await run.admit([decoded(), decoded()])
    await take(run)
    in_flight, _ = await run.next_batch()
    await run.set_policy_version(7)

    again = await open_run(store)

    assert again.state.step == 1
    assert again.state.is_started
    assert again.state.policy_version == 7
    assert again.state.envs.find(0).real_name == "env_0"
    assert (await again.admit([decoded(2, env_id=0)], key="k", digest=1)).is_repeat
    # What was being sent when the process ended is sent again.
    assert await take(again) == in_flight.group_ids


async def test_snapshot_takes_the_place_of_a_long_log():
    store = MemoryRunStore()
    run = await started_run(store, batch_size=1)
    await run.admit([decoded(content=b"%d" % i) for i in range(3)])
    for version in range(10_000):
        await run.set_policy_version(version)

    await run.tick()
    await run.set_policy_version(10_000)
    again = await open_run(store)

    assert len(store._records) == 1
    assert snapshot(again.state) == snapshot(run.state)
    assert await take(again) == [0]


async def test_record_of_a_later_version_stops_the_run():
    store = MemoryRunStore()
    await started_run(store)
    await store.append(b"\x02whatever")

    with pytest.raises(ConfigError, match="record of format 02, this service reads 01"):
        await open_run(store)


async def test_silent_environment_expires_and_comes_back_when_seen():
    clock = Clock()
    run = await started_run(clock=clock, env_expiry_s=600)
    await run.register_env(env_request(min_batch_allocation=0.5))
    clock.now += 599
    await run.tick()
    assert run.state.envs.minimums == {0: 0.5}

    clock.now += 2
    await run.tick()
    assert run.state.envs.minimums == {}
    assert run.state.envs.find(0).is_expired

    assert (await run.view_for(0)).env_weight == 1.0
    assert run.state.envs.minimums == {0: 0.5}


async def test_environment_that_signed_off_stays_away():
    run = await started_run()
    await run.register_env(env_request(min_batch_allocation=0.5))

    assert await run.disconnect_env(0)
    assert await run.view_for(0) is not None

    assert run.state.envs.minimums == {}
    assert not await run.disconnect_env(1)


async def test_heartbeats_that_could_not_be_written_count():
    clock, store = Clock(), UnwritableStore()
    run = await started_run(store, clock=clock, env_expiry_s=60)
    await run.register_env(env_request())
    clock.now += 80
    await run.view_for(0)
    clock.now += 10
    store.is_failing = True
    with pytest.raises(OSError, match="disk full"):
        await run.tick()

    store.is_failing = False
    await run.tick()

    assert run.state.envs.find(0).is_connected


async def test_polling_environment_is_noted_and_does_not_expire():
    clock = Clock()
    run = await started_run(clock=clock, env_expiry_s=60)
    await run.register_env(env_request())
    for _ in range(100):
        clock.now += 5
        await run.view_for(0)
        await run.tick()

    assert run.state.envs.find(0).is_connected
    assert run.state.envs.find(0).last_seen > clock.now - 20


async def test_groups_to_start_is_the_room_that_staleness_leaves():
    run = await started_run(batch_size=8, max_staleness_steps=1)
    await run.register_env(env_request(group_size=2, weight=3.0))
    await run.register_env(env_request(group_size=2, weight=1.0))
    await run.admit([decoded(8), decoded(4)])
    await run.next_batch()

    # Room is 8 x (1 + 1) - 4 queued - 8 in flight = 4 sequences; 3/4 of it in groups of 2.
    assert (await run.view_for(0)).groups_to_start == 1
    # 1/4 is less than a group; while there is room everybody may start one.
    assert (await run.view_for(1)).groups_to_start == 1
    await run.admit([decoded(4)])
    assert (await run.view_for(0)).groups_to_start == 0


async def test_groups_to_start_is_none_without_bounds():
    run = await started_run()
    await run.register_env(env_request())

    assert (await run.view_for(0)).groups_to_start is None

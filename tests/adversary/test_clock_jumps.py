"""Clocks that are set back or ahead by hours: leases and silence last as long as they say."""

from __future__ import annotations

import pytest

from atroposlib.api.run import Run, steady_clock
from atroposlib.api.store.base import MemoryRunStore
from tests.api.run_helpers import Clock, decoded, env_request, open_run, registration, started_run
from tests.api.shared_store import SharedLog, SharedRunStore

JUMPS_S = (-7200.0, 0.0, 7200.0)
LEASE_S = 60.0
EXPIRY_S = 600.0
NOW = 1_700_000_000.0


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_clock_of_a_process_does_not_jump(jump_s: float) -> None:
    unix, monotonic = Clock(NOW), Clock(5.0)
    clock = steady_clock(unix=unix, monotonic=monotonic)
    assert clock() == NOW

    unix.now += jump_s
    monotonic.now += 1.5

    assert clock() == NOW + 1.5


async def test_machine_whose_clock_jumps_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    unix, monotonic = Clock(NOW), Clock(5.0)
    clock = steady_clock(unix=unix, monotonic=monotonic)
    monkeypatch.setattr("atroposlib.api.run.steady_clock", lambda: clock)
    run = await started_run(batch_size=1, env_expiry_s=EXPIRY_S)
    await run.register_env(env_request())
    await run.admit([decoded()])
    batch, _ = await run.next_batch(lease_s=LEASE_S)

    for jump_s in JUMPS_S:
        unix.now = NOW + jump_s
        await run.tick()
    assert run.state.delivery.in_flight == {0: batch}
    assert run.state.envs.find(0).is_connected

    monotonic.now += EXPIRY_S + 1
    await run.tick()
    assert list(run.state.delivery.returned) == [0]
    assert run.state.envs.find(0).is_expired


@pytest.mark.parametrize("jump_s", JUMPS_S)
@pytest.mark.parametrize("is_compacted", [False, True])
async def test_lease_lasts_as_long_as_it_says_after_a_start_with_another_time(
    jump_s: float, is_compacted: bool
) -> None:
    store, clock = MemoryRunStore(), Clock(NOW)
    run = await started_run(store, batch_size=1, clock=clock)
    await run.admit([decoded()])
    batch, _ = await run.next_batch(lease_s=LEASE_S)
    if is_compacted:
        run._log._num_records = 10**6
        await run.tick()
    clock.now += 1 + jump_s

    again = await open_run(store, clock=clock)
    clock.now += LEASE_S - 1
    await again.tick()
    assert again.state.delivery.in_flight == {0: batch}
    clock.now += 1
    await again.tick()

    assert list(again.state.delivery.returned) == [0]


@pytest.mark.parametrize("jump_s", JUMPS_S)
async def test_environment_that_is_gone_expires_after_a_start_with_another_time(
    jump_s: float,
) -> None:
    store, clock = MemoryRunStore(), Clock(NOW)
    run = await started_run(store, clock=clock, env_expiry_s=EXPIRY_S)
    await run.register_env(env_request(min_batch_allocation=0.5))
    await run.admit([decoded(env_id=0)])
    clock.now += 1 + jump_s

    again = await open_run(store, clock=clock, env_expiry_s=EXPIRY_S)
    clock.now += EXPIRY_S
    await again.tick()
    assert again.state.envs.find(0).is_connected
    clock.now += 1
    await again.tick()

    assert again.state.envs.find(0).is_expired


@pytest.mark.parametrize("jump_s", JUMPS_S)
async def test_replicas_with_clocks_hours_apart_agree_who_is_there(jump_s: float) -> None:
    log, here, there = SharedLog(0), Clock(NOW), Clock(NOW + jump_s)
    asked = await shared_run(log, "asked", here)
    other = await shared_run(log, "other", there)
    await other.register_trainer(registration())
    await other.next_batch()
    await other.register_env(env_request())
    await asked.tick()

    async def pass_time(seconds: float) -> None:
        here.now += seconds
        there.now += seconds
        await asked.tick()
        await other.tick()

    for _ in range(40):  # it asks one replica only
        await pass_time(30)
        await asked.view_for(0)
        assert other.state.envs.find(0).is_connected
    for _ in range(22):
        await pass_time(30)

    assert other.state.envs.find(0).is_expired
    assert asked.state.envs.find(0).is_expired


async def shared_run(log: SharedLog, name: str, clock: Clock) -> Run:
    store = SharedRunStore(log, name)
    return await open_run(store, replica=name, clock=clock, env_expiry_s=EXPIRY_S)

"""Rollouts that lag behind their group, under every policy."""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from typing import Any

import pytest

from atroposlib.envs.config import BaseEnvConfig, StragglerPolicyEnum
from atroposlib.envs.rollouts import (
    StragglerError,
    StragglerRule,
    run_group,
    settings_without_effect,
)

SOON_S = 0.02


@pytest.fixture(autouse=True, scope="module")
def _without_earlier_clients() -> None:
    """HTTP clients that earlier tests left make a task of their own when they are collected."""
    gc.collect()


class Rollouts:
    """Rollouts that answer their number at once, except for those named slow."""

    def __init__(self, slow: set[int], *, seconds: float = 3600.0) -> None:
        self.num_started = 0
        self.num_cancelled = 0
        self.outcomes: Counter[str] = Counter()
        self._slow = slow
        self._seconds = seconds

    async def start(self) -> int:
        number = self.num_started
        self.num_started += 1
        try:
            if number in self._slow:
                await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return number

    async def run(self, policy: str, *, size: int = 4, **rule: Any) -> list[Any]:
        before = asyncio.all_tasks()
        rule = {"timeout_s": SOON_S, **rule}
        try:
            return await run_group(
                self.start,
                group_size=size,
                rule=StragglerRule(policy=StragglerPolicyEnum(policy), **rule),
                count=lambda name: self.outcomes.update([name]),
            )
        finally:
            assert asyncio.all_tasks() == before


@pytest.mark.parametrize("policy", ["WAIT", "RETRY", "SHRINK", "GIVE_UP"])
async def test_group_in_time_is_whole_and_in_order(policy: str) -> None:
    rollouts = Rollouts(set())

    assert await rollouts.run(policy, timeout_s=10) == [0, 1, 2, 3]
    assert rollouts.outcomes == {}


async def test_wait_waits() -> None:
    rollouts = Rollouts({1}, seconds=3 * SOON_S)

    assert await rollouts.run("WAIT") == [0, 1, 2, 3]
    assert rollouts.num_cancelled == 0


async def test_a_policy_without_a_time_waits() -> None:
    assert await Rollouts({1}, seconds=SOON_S).run("GIVE_UP", timeout_s=0) == [0, 1, 2, 3]


async def test_retry_begins_the_straggler_again_and_keeps_the_others() -> None:
    rollouts = Rollouts({1, 4})  # the second rollout, and its first repetition

    outcomes = await rollouts.run("RETRY", retries=2)

    assert outcomes == [0, 5, 2, 3]
    assert rollouts.outcomes == {"retried": 2}
    assert rollouts.num_cancelled == 2


async def test_retry_gives_the_group_up_after_so_many_tries() -> None:
    rollouts = Rollouts(set(range(1, 100)))

    with pytest.raises(StragglerError, match=r"took 3 times more than straggler_timeout_s = 0.02"):
        await rollouts.run("RETRY", size=2, retries=2)

    assert rollouts.outcomes == {"retried": 2, "given_up": 1}
    assert rollouts.num_started == 4


@pytest.mark.parametrize(
    ("slow", "size", "smallest", "kept"),
    [
        ({0, 3}, 4, 2, [1, 2]),
        ({3}, 4, 2, [0, 1]),  # three are no divisor of four
        ({0}, 8, 2, [1, 2, 3, 4]),
        ({0, 1, 2, 3, 4}, 8, 2, [5, 6]),
        ({0}, 6, 2, [1, 2, 3]),
        ({0, 1, 2}, 4, 1, [3]),
    ],
)
async def test_shrink_keeps_what_makes_up_a_whole_group_with_others(
    slow: set[int], size: int, smallest: int, kept: list[int]
) -> None:
    rollouts = Rollouts(slow)

    assert await rollouts.run("SHRINK", size=size, min_group_size=smallest) == kept
    assert rollouts.outcomes == {"left_out": size - len(kept)}
    assert rollouts.num_cancelled == len(slow)


@pytest.mark.parametrize(("size", "smallest"), [(4, 3), (5, 2)])
async def test_shrink_without_a_fitting_size_waits(size: int, smallest: int) -> None:
    rollouts = Rollouts({1}, seconds=2 * SOON_S)

    assert await rollouts.run("SHRINK", size=size, min_group_size=smallest) == list(range(size))


async def test_shrink_waits_until_the_smallest_group_is_there() -> None:
    rollouts = Rollouts({0, 1, 2}, seconds=3 * SOON_S)

    outcomes = await rollouts.run("SHRINK")

    assert len(outcomes) >= 2


async def test_give_up_ends_the_group() -> None:
    rollouts = Rollouts({2})

    with pytest.raises(StragglerError, match="1 of 4 rollouts took more than"):
        await rollouts.run("GIVE_UP")

    assert rollouts.outcomes == {"given_up": 1}


@pytest.mark.parametrize("policy", ["RETRY", "SHRINK", "GIVE_UP"])
async def test_a_rollout_that_raises_is_an_outcome_and_its_siblings_finish(policy: str) -> None:
    numbers = iter(range(3))

    async def start() -> int:
        number = next(numbers)
        if number == 0:
            raise KeyError("answer")
        await asyncio.sleep(0.001)
        return number

    rule = StragglerRule(policy=StragglerPolicyEnum(policy), timeout_s=10)
    outcomes = await run_group(start, group_size=3, rule=rule)

    assert isinstance(outcomes[0], KeyError)
    assert outcomes[1:] == [1, 2]


@pytest.mark.parametrize("policy", ["WAIT", "RETRY", "SHRINK", "GIVE_UP"])
async def test_cancelling_the_group_ends_every_rollout(policy: str) -> None:
    rollouts = Rollouts({0, 1})
    group = asyncio.create_task(rollouts.run(policy, timeout_s=60))
    await asyncio.sleep(0.005)

    group.cancel()
    await asyncio.wait({group})

    assert group.cancelled()
    assert rollouts.num_cancelled == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, None),
        ({"max_num_workers": 0}, "starts no rollout"),
        ({"straggler_timeout_s": 5}, "straggler_timeout_s has no effect"),
        ({"straggler_policy": "RETRY"}, None),  # it restarts groups after worker_timeout
        ({"straggler_policy": "GIVE_UP"}, "GIVE_UP has no effect: straggler_timeout_s"),
        ({"straggler_policy": "SHRINK"}, "SHRINK has no effect: straggler_timeout_s"),
        (
            {"straggler_policy": "SHRINK", "straggler_timeout_s": 5, "group_size": 3},
            r"no number from min_group_size \(2\) on divides group_size \(3\)",
        ),
        ({"straggler_policy": "SHRINK", "straggler_timeout_s": 5, "group_size": 4}, None),
    ],
)
def test_settings_without_effect_are_named(settings: dict[str, Any], message: str | None) -> None:
    found = settings_without_effect(BaseEnvConfig(**settings))

    if message is None:
        assert found == []
    else:
        assert re.search(message, *found)

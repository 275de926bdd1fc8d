from __future__ import annotations

import asyncio

import pytest

from atroposlib.envs.server_handling.server_baseline import (
    AsyncSemWithAdaptiveWeight,
    SemaphoreWithOwnSlot,
)


async def turns(count: int = 3) -> None:
    """Let every ready task run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def admitted(sem: AsyncSemWithAdaptiveWeight, newcomers: int) -> int:
    """Return how many of `newcomers` get in at once; the others are cancelled again."""
    tasks = [asyncio.create_task(sem.acquire()) for _ in range(newcomers)]
    await turns()
    count = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return count


@pytest.mark.parametrize(
    ("weight", "expected"),
    # max_val 8: slots while _value > 8 * (1 - weight)
    [(1.0, 8), (0.5, 4), (0.3, 3), (0.01, 1), (0.0, 0), (-1.0, 0), (2.0, 16)],
)
async def test_weight_sets_how_many_enter(weight: float, expected: int) -> None:
    sem = AsyncSemWithAdaptiveWeight(8)
    sem.update_weight(weight)

    assert await admitted(sem, 20) == expected
    assert sem.min_val() == 8 * (1 - weight)
    assert sem.max_val == 8
    assert sem._value == 8 - expected


async def test_raising_the_weight_wakes_as_many_waiters_as_fit() -> None:
    sem = AsyncSemWithAdaptiveWeight(4)
    sem.update_weight(0.0)
    waiters = [asyncio.create_task(sem.acquire()) for _ in range(3)]
    await turns()
    assert not any(waiter.done() for waiter in waiters)

    sem.update_weight(0.5)
    await turns()

    assert [waiter.done() for waiter in waiters] == [True, True, False]
    sem.release()
    await turns()
    assert waiters[2].done()


async def test_release_admits_in_order_of_arrival() -> None:
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    order: list[int] = []

    async def enter(number: int) -> None:
        async with sem:
            order.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(5)]
    await turns()
    sem.release()
    await asyncio.gather(*tasks)

    assert order == [0, 1, 2, 3, 4]
    assert sem._value == 1


async def test_newcomer_queues_behind_a_waiter_even_when_a_slot_is_free() -> None:
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    waiter = asyncio.create_task(sem.acquire())
    await turns()

    assert sem.locked()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    sem.release()

    assert not sem.locked()


async def test_cancelled_waiter_leaves_no_trace() -> None:
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    first = asyncio.create_task(sem.acquire())
    second = asyncio.create_task(sem.acquire())
    await turns()

    first.cancel()
    sem.release()
    await asyncio.gather(first, return_exceptions=True)
    await turns()

    assert second.done()
    assert sem._value == 0


async def test_waiter_cancelled_after_it_was_granted_hands_the_slot_on() -> None:
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    first = asyncio.create_task(sem.acquire())
    second = asyncio.create_task(sem.acquire())
    await turns()

    sem.release()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await turns()

    assert first.cancelled()
    assert second.done()
    assert sem._value == 0


async def test_hand_written_value_is_obeyed() -> None:
    sem = AsyncSemWithAdaptiveWeight(4)
    sem._value = 1

    assert await admitted(sem, 3) == 1


async def test_own_slot_is_used_before_the_shared_ones() -> None:
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    own = SemaphoreWithOwnSlot(sem)

    async with own:
        assert own.locked()
        assert await admitted(own, 1) == 0

    assert not own.locked()
    assert sem._value == own._value == 0
    own.update_weight(0.0)
    assert sem.weight == 0.0

"""Ending tasks, also those that lose a cancellation, and the work of clients that leave."""

from __future__ import annotations

import asyncio

from atroposlib.utils.aio import end_task, unless_disconnected


async def test_end_task_cancels_again_when_a_cancellation_was_lost():
    lost = 0

    async def loop_that_loses_two():
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(loop_that_loses_two())
    await asyncio.sleep(0)

    await end_task(task)

    assert task.cancelled()
    assert lost == 3


async def test_end_task_drops_what_a_task_raises():
    async def fails():
        raise ValueError("bad")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)

    await end_task(task)

    assert task.done()


def test_client_that_goes_away_ends_the_work():
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def run() -> tuple[None, bool]:
        return await unless_disconnected(receive, forever()), ended.is_set()

    assert asyncio.run(run()) == (None, True)


def test_work_of_a_client_that_stays_is_returned():
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> str:
        return "answer"

    assert asyncio.run(unless_disconnected(receive, work())) == "answer"

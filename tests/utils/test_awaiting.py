"""Ending tasks, also those that lose a cancellation."""

from __future__ import annotations

import asyncio

from atroposlib.utils.aio import end_task


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

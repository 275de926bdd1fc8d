"""Which calls count as holding the event loop."""

from __future__ import annotations

import asyncio
import time

from atroposlib.envs.checks.watchers import LoopStall, watch_loop


async def test_watch_loop_names_the_line_of_a_call_that_waits() -> None:
    stalls: list[LoopStall] = []
    while not stalls:  # on a busy machine, the watching thread may get no time to look
        with watch_loop() as stalls:
            asyncio.get_running_loop().call_soon(time.sleep, 0)
            await asyncio.sleep(0)
            time.sleep(0.15)  # noqa: ASYNC251 - what is to be found
            await asyncio.sleep(0)

    assert [stall.duration_s > 0.1 for stall in stalls] == [True]
    assert "test_loop_watch.py:17" in (stalls[0].where or "")


async def test_watch_loop_names_the_line_of_a_long_computation() -> None:
    with watch_loop() as stalls:
        await asyncio.sleep(0)
        ends_at = time.thread_time() + 0.2
        while time.thread_time() < ends_at:
            sum(range(100))
        await asyncio.sleep(0)

    assert len(stalls) == 1
    assert "test_loop_watch.py" in (stalls[0].where or "")


async def test_watch_loop_takes_many_short_callbacks_for_no_stall() -> None:
    async def work() -> None:
        time.sleep(0.01)  # noqa: ASYNC251

    with watch_loop() as stalls:
        await asyncio.gather(*(work() for _ in range(20)))

    assert stalls == []

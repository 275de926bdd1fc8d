"""Which calls count as holding the event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
    assert "test_loop_watch.py:26" in (stalls[0].where or "")


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


@contextmanager
def busy_machine() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")
async def test_watch_loop_leaves_out_what_other_processes_took() -> None:
    def waited_for_processor_s() -> float:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        return int(path.read_text().split()[1]) * 1e-9

    with busy_machine(), watch_loop() as stalls:
        await asyncio.sleep(0)
        started_at, waited_before = time.monotonic(), waited_for_processor_s()
        await asyncio.sleep(0)
        ends_at = time.thread_time() + 0.2
        while time.thread_time() < ends_at:
            sum(range(100))
        await asyncio.sleep(0)
        own_s = time.monotonic() - started_at - (waited_for_processor_s() - waited_before)

    assert [stall.duration_s <= own_s for stall in stalls] == [True]

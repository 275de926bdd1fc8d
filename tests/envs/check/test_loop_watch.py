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

from atroposlib.envs.checks.harness import _report_stalls
from atroposlib.envs.checks.report import Findings
from atroposlib.envs.checks.watchers import LoopStall, _Watch, watch_loop


async def test_watch_loop_names_the_line_of_a_call_that_waits() -> None:
    stalls: list[LoopStall] = []
    while not stalls:  # on a busy machine, the watching thread may get no time to look
        with watch_loop() as stalls:
            asyncio.get_running_loop().call_soon(time.sleep, 0)
            await asyncio.sleep(0)
            time.sleep(0.15)  # noqa: ASYNC251 - what is to be found
            await asyncio.sleep(0)

    assert [stall.duration_s > 0.1 for stall in stalls] == [True]
    assert "test_loop_watch.py:28" in stalls[0].where


async def test_watch_loop_names_the_line_of_a_long_computation() -> None:
    stalls: list[LoopStall] = []
    while not stalls:
        with watch_loop() as stalls:
            await asyncio.sleep(0)
            sum_for(0.2)
            await asyncio.sleep(0)

    assert len(stalls) == 1
    assert "test_loop_watch.py" in stalls[0].where


async def test_watch_loop_takes_many_short_callbacks_for_no_stall() -> None:
    async def work() -> None:
        time.sleep(0.01)  # noqa: ASYNC251

    with watch_loop() as stalls:
        await asyncio.gather(*(work() for _ in range(20)))

    assert stalls == []


async def test_watch_loop_names_the_line_of_a_computation_that_holds_the_interpreter() -> None:
    stalls: list[LoopStall] = []
    while not stalls:
        with watch_loop() as stalls:
            await asyncio.sleep(0)
            sum(range(30_000_000))
            await asyncio.sleep(0)

    assert [stall.duration_s > 0.1 for stall in stalls] == [True]
    assert "test_loop_watch.py" in stalls[0].where


def test_call_that_no_sample_was_taken_of_is_no_stall() -> None:
    watch = _Watch(threading.get_ident())  # not started, as where it gets no processor

    watch.time_callback(lambda _: sum_for(0.2), None)

    assert watch.stalls == []


def sum_for(cpu_s: float) -> None:
    """Compute for as long, of the processor's time."""
    ends_at = time.thread_time() + cpu_s
    while time.thread_time() < ends_at:
        sum(range(100))


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

    stalls: list[LoopStall] = []
    while not stalls:
        with busy_machine(), watch_loop() as stalls:
            await asyncio.sleep(0)
            started_at, waited_before = time.monotonic(), waited_for_processor_s()
            await asyncio.sleep(0)
            sum_for(0.2)
            await asyncio.sleep(0)
            # The clock is read last: a wait between the two readings must not count as less.
            waited_s = waited_for_processor_s() - waited_before
            own_s = time.monotonic() - started_at - waited_s

    assert [stall.duration_s <= own_s for stall in stalls] == [True]


def test_report_names_the_longest_stall() -> None:
    findings = Findings()

    _report_stalls([LoopStall(0.2, "a.py:1"), LoopStall(0.3, "b.py:2")], findings)

    (outcome,) = [o for o in findings.outcomes() if o.status == "failed"]
    assert (outcome.detail, outcome.where) == ("one call blocked it for 0.30 s", "b.py:2")

"""`EpisodeLoop`: coroutines of a library that may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from atroposlib.adapters.interface import EpisodeLoop
from atroposlib.errors import EpisodeFailedError, EpisodeTimeoutError


@pytest.fixture
async def loop() -> AsyncIterator[EpisodeLoop]:
    made = EpisodeLoop("lib", reaction_s=0.2, max_abandoned=2)
    yield made
    await made.close()


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def test_calls_run_in_one_loop_of_another_thread(loop: EpisodeLoop) -> None:
    async def running() -> int:
        return id(asyncio.get_running_loop())

    first, second = await asyncio.gather(loop.call(running), loop.call(running))

    assert first == second != id(asyncio.get_running_loop())
    assert await loop.call(thread_name) == "episodes"
    assert loop.generation == 1


async def test_exception_of_a_call_is_raised(loop: EpisodeLoop) -> None:
    async def fails() -> None:
        raise KeyError("board")

    with pytest.raises(KeyError, match="board"):
        await loop.call(fails)


async def test_cancelled_call_is_cancelled_in_its_loop(loop: EpisodeLoop) -> None:
    loop.reaction_s = 60  # of a loop that is not blocked, on any machine
    ended = threading.Event()
    started = threading.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.ensure_future(loop.call(waits))
    await asyncio.to_thread(started.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert await asyncio.to_thread(ended.wait, 10)
    assert loop.generation == 1
    assert await loop.call(thread_name) == "episodes"


async def test_blocked_loop_is_replaced_and_its_other_calls_fail(loop: EpisodeLoop) -> None:
    release = threading.Event()
    started = threading.Event()

    async def blocks() -> None:
        started.set()
        release.wait(30)

    async def waits() -> None:
        await asyncio.Event().wait()

    other = asyncio.ensure_future(loop.call(waits))
    blocked = asyncio.ensure_future(loop.call(blocks))
    await asyncio.to_thread(started.wait, 10)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    with pytest.raises(EpisodeTimeoutError, match="lib: another rollout blocked the library"):
        await other

    assert loop.generation == 2
    assert await loop.call(thread_name) == "episodes"
    release.set()


async def test_healthy_loop_is_kept_where_the_process_stands_still(
    loop: EpisodeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.reaction_s = 0.0  # each look finds it passed
    monkeypatch.setattr(loop, "_loop", asyncio.get_running_loop())  # so that turns are in order
    monkeypatch.setattr(loop, "_lost", asyncio.Event())

    call = asyncio.ensure_future(loop.call(asyncio.sleep, 60))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert loop.generation == 0  # else the number of the next one
    monkeypatch.undo()


async def test_number_of_blocked_loops_is_limited(loop: EpisodeLoop) -> None:
    release = threading.Event()

    async def blocks(started: threading.Event) -> None:
        started.set()
        release.wait(30)

    for _ in range(2):
        started = threading.Event()
        call = asyncio.ensure_future(loop.call(blocks, started))
        await asyncio.to_thread(started.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    with pytest.raises(EpisodeFailedError, match="2 calls block the library"):
        await loop.call(thread_name)
    release.set()


async def test_loop_that_reacts_after_all_is_ended_and_no_longer_counts(loop: EpisodeLoop) -> None:
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def blocks(started: threading.Event, release: threading.Event) -> None:
        started.set()
        release.wait(30)

    for number in range(4):  # more than may hang at the same time
        other = asyncio.ensure_future(loop.call(waits))
        thread = await loop.call(current_thread)
        started, release = threading.Event(), threading.Event()
        call = asyncio.ensure_future(loop.call(blocks, started, release))
        await asyncio.to_thread(started.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EpisodeTimeoutError):
            await other
        release.set()
        await asyncio.to_thread(thread.join, 10)

        assert not thread.is_alive()
        assert cancelled.is_set()
        assert loop.generation == number + 2


async def current_thread() -> threading.Thread:
    return threading.current_thread()

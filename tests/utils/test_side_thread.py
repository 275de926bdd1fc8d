from __future__ import annotations

import asyncio
import threading

import pytest

from atroposlib.utils.aio import SideThread


async def test_side_thread_makes_one_call_at_a_time_beside_the_loop() -> None:
    side_thread = SideThread()
    begun = threading.Event()
    may_end = threading.Event()
    order: list[str] = []

    def first() -> str:
        begun.set()
        may_end.wait(5)
        order.append("first")
        return threading.current_thread().name

    calls = [asyncio.create_task(side_thread.run(first))]
    calls.append(asyncio.create_task(side_thread.run(order.append, "second")))
    await asyncio.to_thread(begun.wait, 5)
    assert order == []
    may_end.set()

    name, _ = await asyncio.gather(*calls)

    side_thread.close()
    assert order == ["first", "second"]
    assert name != threading.current_thread().name


async def test_side_thread_passes_on_what_a_call_raises_and_works_after_close() -> None:
    side_thread = SideThread()

    with pytest.raises(ZeroDivisionError):
        await side_thread.run(divmod, 1, 0)
    side_thread.close()

    assert await side_thread.run(int, "11", base=2) == 3
    side_thread.close()

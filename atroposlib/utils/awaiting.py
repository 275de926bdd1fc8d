"""Waiting for several tasks, and ending one, without leaving any behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

__all__ = ["all_results", "end_task"]

_CANCEL_AGAIN_S = 0.25

Result = TypeVar("Result")


async def all_results(steps: Iterable[Awaitable[Result]]) -> list[Result]:
    """Wait for all steps, then return their results in order.

    Unlike a bare `asyncio.gather` nothing runs on when one step fails.

    Raises:
        BaseException: what the first step that failed raised, once all have ended.
    """
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; what it raised is dropped.

    A task that goes on is cancelled again. Some libraries (redis) and `asyncio.wait_for` before
    Python 3.12 lose a cancellation that comes together with a reply, and a loop would then run on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()  # so that it is not logged as never retrieved

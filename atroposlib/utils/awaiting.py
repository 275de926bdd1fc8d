"""Waiting for several things at once without leaving any behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

__all__ = ["all_results"]

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

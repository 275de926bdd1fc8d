"""Something found out once, however many requests ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

__all__ = ["SharedSearch"]

T = TypeVar("T")


class SharedSearch(Generic[T]):
    """One search at a time; a failed one is made again by the next who asks.

    Keeping what was found is the caller's part.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[T] | None = None

    async def result(self, find: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the running search finds, or that of a new one; cancelling leaves it on."""
        running = self._running
        # A task of a loop that has ended never finishes, so it does not count.
        if (
            running is None
            or running.done()
            or running.get_loop() is not asyncio.get_running_loop()
        ):
            running = self._running = asyncio.create_task(find())
        return await asyncio.shield(running)

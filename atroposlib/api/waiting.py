"""Who waits for something to change: first come, first served, woken one at a time."""

from __future__ import annotations

import asyncio
from itertools import count

__all__ = ["Waiters"]


class Waiters:
    """A line of coroutines. Whoever was woken to no avail keeps its place by its ticket."""

    def __init__(self) -> None:
        self._tickets = count()
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self) -> int:
        """Return a place in the line, behind everybody who has one."""
        return next(self._tickets)

    def wake(self) -> None:
        """Wake whoever has waited longest; nothing happens when nobody waits.

        Those who gave up are passed over: a task that was cancelled is still in the line until it
        runs again.
        """
        while self._waiting:
            future = self._waiting.pop(min(self._waiting))
            if not future.done():
                future.set_result(True)
                return

    def close(self) -> None:
        """Let the time run out for everybody, those who come later included."""
        self._is_closed = True
        for ticket in list(self._waiting):
            self._time_out(ticket)

    async def wait(self, ticket: int, *, timeout_s: float) -> bool:
        """Wait to be woken.

        Safe to cancel: when it had been woken already, the next in line is woken instead.

        Returns:
            True when woken, False when the time ran out.
        """
        if timeout_s <= 0 or self._is_closed:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[ticket] = future
        timer = loop.call_later(timeout_s, self._time_out, ticket)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.wake()
            raise
        finally:
            timer.cancel()
            self._waiting.pop(ticket, None)

    def _time_out(self, ticket: int) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(False)

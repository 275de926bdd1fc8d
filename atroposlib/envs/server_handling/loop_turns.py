"""Taking turns on the event loop, so that a thousand answers at once do not hold it up.

Sending a request and reading an answer take a fraction of a millisecond that nothing can interrupt.
When hundreds of rollouts are ready in the same pass of the loop, those fractions add up; here each
waits for its turn, and a pass is given no more of them than fit its share.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["ROUTE_COST_S", "SEND_COST_S", "LoopTurns", "answer_cost_s"]

SHARE_S = 0.004
"""Work admitted to one pass of the loop, in seconds as estimated."""

SEND_COST_S = 0.0004
"""What one request takes to be written: its prompt rendered, its body encoded and sent."""


ROUTE_COST_S = 0.0001
"""What it takes to choose a server for one request and to come to its slots."""


def answer_cost_s(num_bytes: int) -> float:
    """Estimate how long an answer takes to be decoded, checked and recorded."""
    return 0.0003 + num_bytes * 12e-9


class LoopTurns:
    """Admits estimated work to each pass of the running loop, first come first served.

    Whoever comes while the share lasts goes on at once, without giving up the loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        self._spent_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def turn(self, cost_s: float) -> None:
        """Wait until work of `cost_s` seconds fits a pass of the loop; cancelling is safe."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the one before has ended, with whoever waited on it
            self._loop, self._spent_s = loop, 0.0
            self._waiting.clear()
        if not self._waiting and self._fits(cost_s):
            self._spend(cost_s)
            return
        mine = loop.create_future()
        self._waiting.append((mine, cost_s))
        await mine

    def _fits(self, cost_s: float) -> bool:
        # Work larger than the share has a pass to itself.
        return self._spent_s == 0.0 or self._spent_s + cost_s <= SHARE_S

    def _spend(self, cost_s: float) -> None:
        assert self._loop is not None
        if self._spent_s == 0.0:
            self._loop.call_soon(self._next_pass)
        self._spent_s += cost_s

    def _next_pass(self) -> None:
        self._spent_s = 0.0
        while self._waiting and self._fits(self._waiting[0][1]):
            mine, cost_s = self._waiting.popleft()
            if not mine.done():  # else cancelled
                self._spend(cost_s)
                mine.set_result(None)

"""A semaphore whose usable share of slots can change while it is in use.

Taking turns on the event loop, so that a thousand answers at once do not hold it up.

Sending a request and reading an answer take a fraction of a millisecond that nothing can interrupt.
When hundreds of rollouts are ready in the same pass of the loop, those fractions add up; here each
waits for its turn, and a pass is given no more of them than fit its share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Literal

__all__ = [
    "ROUTE_COST_S",
    "SEND_COST_S",
    "AsyncSemWithAdaptiveWeight",
    "LoopTurns",
    "SemaphoreWithOwnSlot",
    "answer_cost_s",
]

SHARE_S = 0.004
"""Work admitted to one pass of the loop, in seconds as estimated."""

SEND_COST_S = 0.0004
"""What one request takes to be written: its prompt rendered, its body encoded and sent."""

ROUTE_COST_S = 0.0001
"""What it takes to choose a server for one request and to come to its slots."""


class AsyncSemWithAdaptiveWeight(asyncio.Semaphore):
    """Admits about `weight * max_val` holders at once, first come first served.

    At weight 1 it is a plain semaphore; at weight 0 or below nobody enters; above 1 it admits
    more than `max_val`. Changing the weight never evicts holders, and wakes as many waiters as
    now fit.

    Invariant: `_value` is `max_val` minus the number of holders; a granted waiter counts as a
    holder from the moment it is granted, before it runs.
    """

    _value: int

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.max_val = value
        self.weight = 1.0
        self._queue: deque[asyncio.Future[None]] = deque()

    def min_val(self) -> float:
        """Return the count of slots below which `_value` may not be taken."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        """Set the share of slots in use and admit the waiters that now fit."""
        self.weight = weight
        self._admit_waiters()

    def locked(self) -> bool:
        """Whether a newcomer would have to wait."""
        return bool(self._queue) or not self._has_slot()

    async def acquire(self) -> Literal[True]:
        """Wait for a slot and take it; a cancelled waiter leaves nothing behind."""
        if not self.locked():
            self._value -= 1
            return True
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # `_admit_waiters` may have dropped it already
                    self._queue.remove(turn)
            else:  # granted and cancelled in the same tick: hand the slot on
                self.release()
            raise
        return True

    def release(self) -> None:
        """Give a slot back and admit the next waiter, if it fits."""
        self._value += 1
        self._admit_waiters()

    def _has_slot(self) -> bool:
        return self._value > self.min_val()

    def _admit_waiters(self) -> None:
        while self._queue and self._has_slot():
            turn = self._queue.popleft()
            if turn.done():  # cancelled, its owner has not run yet
                continue
            self._value -= 1
            turn.set_result(None)


class SemaphoreWithOwnSlot(AsyncSemWithAdaptiveWeight):
    """A semaphore seen by someone who already holds one of its slots.

    The first holder uses the held slot, so that it cannot wait for itself; further holders
    compete for slots of the original as everyone does. Weight and counts are the original's.
    """

    def __init__(self, original: AsyncSemWithAdaptiveWeight) -> None:
        self._original = original
        self._own_is_free = True
        self._num_shared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def update_weight(self, weight: float) -> None:
        """Set the weight of the original."""
        self._original.update_weight(weight)

    def locked(self) -> bool:
        """Whether a newcomer would have to wait."""
        return not self._own_is_free and self._original.locked()

    async def acquire(self) -> Literal[True]:
        """Take the held slot if it is free, else wait for one of the original."""
        if self._own_is_free:
            self._own_is_free = False
            return True
        await self._original.acquire()
        self._num_shared += 1
        return True

    def release(self) -> None:
        """Give back a slot of the original if one was taken, else free the held one."""
        if self._num_shared:
            self._num_shared -= 1
            self._original.release()
        else:
            self._own_is_free = True


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

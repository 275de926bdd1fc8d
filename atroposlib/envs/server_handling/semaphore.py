"""Slots of a server with an adjustable share: `AsyncSemWithAdaptiveWeight`."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Literal

__all__ = [
    "ROUTE_COST_S",
    "SEND_COST_S",
    "AsyncSemWithAdaptiveWeight",
    "SemaphoreWithOwnSlot",
    "num_unused",
]

SEND_COST_S = 0.0004
"""Estimated seconds to send one request: render the prompt, encode and write the body."""

ROUTE_COST_S = 0.0001
"""Estimated seconds to choose a server for one request and acquire its slot."""


class AsyncSemWithAdaptiveWeight(asyncio.Semaphore):
    """Admits about `weight * max_val` holders at once, first come first served.

    At weight 1 it is a plain semaphore; at weight 0 or below it admits no holder; above 1 it
    admits more than `max_val`. Changing the weight never evicts holders, and wakes the waiters
    that now fit.

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
        """Return the bound that `_value` must exceed for a slot to be free."""
        return self.max_val * (1.0 - self.weight)

    @property
    def num_held(self) -> int:
        """Number of slots in use."""
        return self.max_val - self._value

    @property
    def num_free(self) -> float:
        """Number of slots that may still be taken at the current weight, at least 0."""
        return max(0.0, self._value - self.min_val())

    def update_weight(self, weight: float) -> None:
        """Set the usable share of slots and admit the waiters that now fit."""
        self.weight = weight
        self._admit_waiters()

    def locked(self) -> bool:
        """Whether `acquire` would have to wait."""
        return bool(self._queue) or not self._has_slot()

    async def acquire(self) -> Literal[True]:
        """Wait for a slot and take it; cancelling is safe."""
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
            else:  # granted and cancelled in the same tick: pass the slot on
                self.release()
            raise
        return True

    def release(self) -> None:
        """Release a slot and admit the next waiter, if it fits."""
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


def num_unused(sem: asyncio.Semaphore) -> int:
    """Return the number of slots of any semaphore that nothing holds, whatever its weight."""
    return sem._value


class SemaphoreWithOwnSlot(AsyncSemWithAdaptiveWeight):
    """View of a semaphore for a caller that already holds one of its slots.

    The first `acquire` uses the held slot, so that the caller cannot deadlock with itself; further
    ones compete for slots of the original. Weight and counts are the original's.
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
        """Whether `acquire` would have to wait."""
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
        """Release a slot of the original if one was taken, else free the held one."""
        if self._num_shared:
            self._num_shared -= 1
            self._original.release()
        else:
            self._own_is_free = True

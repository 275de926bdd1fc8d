"""A semaphore whose usable share of slots can change while it is in use."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Literal

__all__ = ["AsyncSemWithAdaptiveWeight", "SemaphoreWithOwnSlot"]


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

"""How many bytes of request bodies may lie in memory at once, and how slowly they may come.

Large bodies are read only while there is room for them. While others wait for it, a sender that is
slow has to give it up:

    body ─ piece by piece ─► Account.take ─► kept until the request is answered ─► Account.close
                                  │
                                  └ no room: the next piece is not read, the sender waits
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, ClassVar, NamedTuple

__all__ = ["Account", "BodyBudget", "Pace"]


class Pace:
    """Whether bytes come, or go, fast enough; pure.

    Only the time that it was the other side's turn counts.
    """

    grace_s: ClassVar[float] = 60.0
    """Time for which nothing is asked; also the longest time without any byte."""
    min_bytes_per_s: ClassVar[float] = 16 * 1024
    """Rate after that, on average."""

    def __init__(self) -> None:
        self.turn_s = 0.0
        self.num_bytes = 0
        self._silent_s = 0.0

    def add(self, seconds: float, num_bytes: int) -> None:
        """Count what came in so many seconds of the other side's turn."""
        self.turn_s += seconds
        self.num_bytes += num_bytes
        self._silent_s = 0.0 if num_bytes else self._silent_s + seconds

    @property
    def is_too_slow(self) -> bool:
        """Whether nothing came for too long, or too little altogether."""
        allowed_s = self.grace_s + self.num_bytes / self.min_bytes_per_s
        return self._silent_s >= self.grace_s or self.turn_s >= allowed_s

    @property
    def bytes_per_s(self) -> float:
        """Average rate."""
        return self.num_bytes / max(self.turn_s, 1e-9)


class BodyBudget:
    """Shares the memory for request bodies among the requests of one service.

    The oldest request is always given what it asks for, so that there is always one that can
    finish: at most `max_bytes` and one body lie in memory. Whoever waits for room for `patience_s`
    has those evicted who send more slowly than `min_bytes_per_s`.
    """

    patience_s: ClassVar[float] = 5.0
    min_bytes_per_s: ClassVar[float] = 256 * 1024

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._accounts: dict[int, Account] = {}
        self._waiting: deque[_Waiting] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes taken and not yet given back."""
        return self._held_bytes

    def open(self) -> Account:
        """Start to count for one request; the caller closes the account."""
        account = Account(self)
        self._accounts[id(account)] = account
        return account

    async def grant(self, account: Account, num_bytes: int) -> None:
        """Wait until `num_bytes` more may lie in memory for this account."""
        if self._has_room(account, num_bytes):
            self._give(account, num_bytes)
            return
        waiting = _Waiting(account, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            while not waiting.granted.done():
                await asyncio.wait([waiting.granted], timeout=self.patience_s)
                if not waiting.granted.done():
                    self._evict_slow()
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def forget(self, account: Account) -> None:
        """Make room: what the account held is gone."""
        self._held_bytes -= account.held_bytes
        del self._accounts[id(account)]
        for waiting in list(self._waiting):
            if self._has_room(waiting.account, waiting.num_bytes):
                self._waiting.remove(waiting)
                self._give(waiting.account, waiting.num_bytes)
                if not waiting.granted.done():
                    waiting.granted.set_result(None)

    def _evict_slow(self) -> None:
        for account in list(self._accounts.values()):
            account.evict_if_slow(self.patience_s, self.min_bytes_per_s)

    def _has_room(self, account: Account, num_bytes: int) -> bool:
        is_oldest = next(iter(self._accounts.values())) is account
        return is_oldest or self._held_bytes + num_bytes <= self._max_bytes

    def _give(self, account: Account, num_bytes: int) -> None:
        account.held_bytes += num_bytes
        self._held_bytes += num_bytes


class Account:
    """The bytes one request has in memory."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0
        self.pace = Pace()
        self.is_evicted = False
        """Whether it has to end: others wait for the room it holds."""
        self._reading: asyncio.Future[Any] | None = None
        self._reading_since = 0.0

    async def read(self, reading: asyncio.Future[Any], *, timeout_s: float) -> bool:
        """Wait for the sender's next piece; False when the time ran out, or others need the room.

        Args:
            reading: gives the piece; cancelled when it is not waited for any longer.
            timeout_s: longest wait.
        """
        self._reading, self._reading_since = reading, time.monotonic()
        try:
            await asyncio.wait([reading], timeout=timeout_s)
            return reading.done() and not reading.cancelled()
        finally:
            self._reading = None
            self.pace.add(time.monotonic() - self._reading_since, 0)
            if not reading.done():
                reading.cancel()

    def evict_if_slow(self, patience_s: float, min_bytes_per_s: float) -> None:
        """Stop to read when it is the sender's turn, and was for long with little to show."""
        if self._reading is None:
            return
        turn_s = self.pace.turn_s + time.monotonic() - self._reading_since
        if turn_s > patience_s and self.pace.num_bytes < turn_s * min_bytes_per_s:
            self.is_evicted = True
            self._reading.cancel()

    async def take(self, num_bytes: int) -> None:
        """Wait until this many more bytes may lie in memory."""
        await self._budget.grant(self, num_bytes)

    def close(self) -> None:
        """Give everything back."""
        self._budget.forget(self)


class _Waiting(NamedTuple):
    account: Account
    num_bytes: int
    granted: asyncio.Future[None]

"""How many bytes of request bodies may lie in memory at once, and how slowly they may come.

Large bodies are read only while there is room for them. While others wait for it, a sender that is
slow has to give it up:

    body ─ piece by piece ─► Account.take ─► kept until the request is answered ─► Account.close
                                  │
                                  └ no room: the next piece is not read, the sender waits
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import Any, ClassVar, NamedTuple

from starlette.types import Message, Receive

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
        self._reader: asyncio.Task[Any] | None = None
        """The task that waits for the next piece; None while nothing is waited for."""
        self._reading_since = 0.0
        self._is_stopped = False
        self._watch: asyncio.TimerHandle | None = None

    async def read(self, receive: Receive, *, timeout_s: float) -> Message | None:
        """Wait for the sender's next piece; None when the time ran out, or others need the room.

        Args:
            receive: gives the piece; cancelled when it is not waited for any longer.
            timeout_s: longest wait, the same for all pieces.
        """
        self._reader, self._reading_since = asyncio.current_task(), time.monotonic()
        if self._watch is None:  # one timer for all pieces: most come at once
            self._watch_for(timeout_s, timeout_s)
        try:
            return await receive()
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            _uncancel(self._reader)
            return None
        finally:
            self._reader = None
            self.pace.add(time.monotonic() - self._reading_since, 0)

    def evict_if_slow(self, patience_s: float, min_bytes_per_s: float) -> None:
        """Stop to read when it is the sender's turn, and was for long with little to show."""
        if self._reader is None:
            return
        turn_s = self.pace.turn_s + time.monotonic() - self._reading_since
        if turn_s > patience_s and self.pace.num_bytes < turn_s * min_bytes_per_s:
            self.is_evicted = True
            self._stop()

    def _watch_for(self, seconds: float, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(seconds, self._look, timeout_s)

    def _look(self, timeout_s: float) -> None:
        """Stop to read when the sender has been silent for too long; else look again."""
        left_s = timeout_s
        if self._reader is not None:
            left_s -= time.monotonic() - self._reading_since
        if left_s > 0:
            self._watch_for(left_s, timeout_s)
        else:
            self._stop()

    def _stop(self) -> None:
        if self._reader is not None and not self._is_stopped:
            self._is_stopped = True
            self._reader.cancel()

    async def take(self, num_bytes: int) -> None:
        """Wait until this many more bytes may lie in memory."""
        await self._budget.grant(self, num_bytes)

    def close(self) -> None:
        """Give everything back."""
        if self._watch is not None:
            self._watch.cancel()
        self._budget.forget(self)


def _uncancel(task: asyncio.Task[Any] | None) -> None:
    """Take back a cancellation of ours; another one that came meanwhile holds.

    Raises:
        CancelledError: there was another one (told since Python 3.11).
    """
    if sys.version_info >= (3, 11) and task is not None and task.uncancel() > 0:
        raise asyncio.CancelledError


class _Waiting(NamedTuple):
    account: Account
    num_bytes: int
    granted: asyncio.Future[None]

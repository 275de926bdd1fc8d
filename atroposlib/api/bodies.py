"""How many bytes of request bodies may lie in memory at once, over all requests.

Large bodies are read only while there is room for them:

    body ─ piece by piece ─► Account.take ─► kept until the request is answered ─► Account.close
                                  │
                                  └ no room: the next piece is not read, the sender waits
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

__all__ = ["Account", "BodyBudget"]


class BodyBudget:
    """Shares the memory for request bodies among the requests of one service.

    The oldest request is always given what it asks for, so that there is always one that can
    finish: at most `max_bytes` and one body lie in memory.
    """

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
            await waiting.granted
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

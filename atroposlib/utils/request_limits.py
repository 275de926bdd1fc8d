"""Limits on the requests that a server reads: their size, their memory and their time.

    socket ─► LimitedHttpProtocol: time for headers and between pieces, size of the headers
                  └─► BodyLimitMiddleware: size of each body, its pace, memory of all bodies

Large bodies are read only while the budget has room. While other requests wait for room, requests
whose sender is too slow are rejected:

    body ─ piece by piece ─► Account.take ─► kept until the response is sent ─► Account.close
                                  │
                                  └ no room: the next piece is not read, the sender waits
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

__all__ = [
    "SMALL_BYTES",
    "Account",
    "BodyBudget",
    "BodyLimitMiddleware",
    "LimitedHttpProtocol",
    "Pace",
    "announced",
    "capped",
    "paced",
    "too_large_message",
]

_MIB = 1024 * 1024
SMALL_BYTES = 64 * 1024
"""Bodies up to this size are buffered by the connection anyway."""
_SLOW_RETRY_AFTER_S = 10
_CHECKS_PER_TIMEOUT = 4


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose client is too slow within a request or sends long headers.

    One that waits for its next request or for a response is not affected.
    """

    max_silence_s: ClassVar[float] = 60.0
    """Timeout for the headers of a request, and between two pieces of its body."""
    max_head_bytes: ClassVar[int] = 64 * 1024
    """Maximum size of request line and headers, unless they arrive in a single piece."""

    _head_bytes: int | None = None  # of the request whose headers are being read
    _has_started = False  # headers, within the current piece
    _is_receiving = False  # a request has started and is not complete
    _pace: Pace  # of the body that is being received
    _checked_at = 0.0
    _started_at = 0.0
    _waiting_since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self._checked_at = self.loop.time()
        self._pace = Pace()
        self._check_timeout()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is None:
            self._waiting_since = self.loop.time()
        self._has_started = False
        super().data_received(data)
        # A piece in which headers start may mostly consist of other requests.
        if self._head_bytes is not None and not self._has_started:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_receiving = True
        self._has_started = True
        self._started_at = self.loop.time()
        self._head_bytes = 0
        self._pace = Pace()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pace.add(0.0, len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_receiving = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check_timeout(self) -> None:
        """Close the connection if the client sent nothing for too long; else check again later."""
        now = self.loop.time()
        is_idle = self.cycle is not None and not self._is_receiving
        if is_idle or self.flow.read_paused:
            self._waiting_since = now
        elif self._is_receiving:
            self._pace.add(now - max(self._checked_at, self._started_at), 0)
        self._checked_at = now
        left_s = self.max_silence_s - (now - self._waiting_since)
        is_too_slow = self._is_receiving and self._head_bytes is None and self._pace.is_too_slow
        if left_s <= 0 or is_too_slow:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            # Often enough to notice pauses in which the service itself does not read.
            self._timer = self.loop.call_later(
                min(left_s, self.max_silence_s / _CHECKS_PER_TIMEOUT), self._check_timeout
            )

    def _refuse(self, status: HTTPStatus) -> None:
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and (
            self.cycle.response_started and not self.cycle.response_complete
        )
        if not is_answering:
            text = b"%d %b" % (status, status.phrase.encode())
            head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(text) + text)
        self.transport.close()


class Pace:
    """Checks whether bytes are sent or received fast enough; pure."""

    grace_s: ClassVar[float] = 60.0
    """Time before the rate is checked; also the longest time without any byte."""
    min_bytes_per_s: ClassVar[float] = 16 * 1024
    """Minimum average rate after that."""

    def __init__(self) -> None:
        self.turn_s = 0.0
        """Seconds spent waiting for the other side."""
        self.num_bytes = 0
        self._silent_s = 0.0

    def add(self, seconds: float, num_bytes: int) -> None:
        self.turn_s += seconds
        self.num_bytes += num_bytes
        self._silent_s = 0.0 if num_bytes else self._silent_s + seconds

    @property
    def is_too_slow(self) -> bool:
        allowed_s = self.grace_s + self.num_bytes / self.min_bytes_per_s
        return self._silent_s >= self.grace_s or self.turn_s >= allowed_s

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.turn_s, 1e-9)


class BodyBudget:
    """Shares the memory for request bodies among the requests of one service.

    The oldest request always gets room, so that one request can always finish; one that has a small
    body and may wait for minutes, such as for a batch, does not count. Memory holds at most
    `max_bytes` plus one body. When a request has waited for `patience_s`, requests whose sender is
    slower than `min_bytes_per_s` are evicted.
    """

    patience_s: ClassVar[float] = 5.0
    min_bytes_per_s: ClassVar[float] = 256 * 1024

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self._accounts: dict[int, Account] = {}
        self._waiting: deque[_Waiting] = deque()

    def open(self) -> Account:
        """Open the account of one request; the caller closes it."""
        account = Account(self)
        self._accounts[id(account)] = account
        return account

    async def grant(self, account: Account, num_bytes: int) -> None:
        """Wait until this account may hold `num_bytes` more."""
        if self._has_room(account, num_bytes):
            self._give(account, num_bytes)
            return
        waiting = _Waiting(account, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            while not waiting.granted.done():
                done, _ = await asyncio.wait([waiting.granted], timeout=self.patience_s)
                for each in () if done else list(self._accounts.values()):
                    each.evict_if_slow(self.patience_s, self.min_bytes_per_s)
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def forget(self, account: Account) -> None:
        if self._accounts.pop(id(account), None) is None:
            return
        self.held_bytes -= account.held_bytes
        self.grant_waiting()

    def grant_waiting(self) -> None:
        """Give room to the requests that wait for it, as far as there is any."""
        for waiting in list(self._waiting):
            if self._has_room(waiting.account, waiting.num_bytes):
                self._waiting.remove(waiting)
                self._give(waiting.account, waiting.num_bytes)
                if not waiting.granted.done():
                    waiting.granted.set_result(None)

    def _has_room(self, account: Account, num_bytes: int) -> bool:
        oldest = next(a for a in self._accounts.values() if a is account or not a.is_small)
        return oldest is account or self.held_bytes + num_bytes <= self._max_bytes

    def _give(self, account: Account, num_bytes: int) -> None:
        account.held_bytes += num_bytes
        self.held_bytes += num_bytes


class Account:
    """The bytes that one request holds in memory."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0
        self.pace = Pace()
        self.is_evicted = False
        """Whether the request must end because others wait for its room."""
        self._is_complete = False
        self._reader: asyncio.Task[Any] | None = None
        """The task that waits for the next piece, if any."""
        self._reading_since = 0.0
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, receive: Receive, *, timeout_s: float) -> Message | None:
        """Wait for the next piece; None when evicted, or after a timeout that all pieces share."""
        self._reader, self._reading_since = asyncio.current_task(), time.monotonic()
        if self._timer is None:  # one timer for all pieces, since most arrive at once
            self._start_timer(timeout_s, timeout_s)
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
        """Stop reading if the sender has been too slow."""
        if self._reader is None:
            return
        turn_s = self.pace.turn_s + time.monotonic() - self._reading_since
        if turn_s > patience_s and self.pace.num_bytes < turn_s * min_bytes_per_s:
            self.is_evicted = True
            self._stop()

    def _start_timer(self, seconds: float, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._check_timeout, timeout_s)

    def _check_timeout(self, timeout_s: float) -> None:
        """Stop reading if the sender sent nothing for too long; else check again later."""
        left_s = timeout_s
        if self._reader is not None:
            left_s -= time.monotonic() - self._reading_since
        if left_s > 0:
            self._start_timer(left_s, timeout_s)
        else:
            self._stop()

    def _stop(self) -> None:
        if self._reader is not None and not self._is_stopped:
            self._is_stopped = True
            self._reader.cancel()

    async def take(self, num_bytes: int) -> None:
        await self._budget.grant(self, num_bytes)

    @property
    def is_small(self) -> bool:
        """Whether the body is complete and of a size that would not be counted if announced."""
        return self._is_complete and self.held_bytes <= SMALL_BYTES

    def note_complete(self) -> None:
        """Record that the account holds the whole body and takes no more."""
        self._is_complete = True
        if self.is_small:
            self._budget.grant_waiting()

    def close(self) -> None:
        """Give the room back; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._budget.forget(self)


def _uncancel(task: asyncio.Task[Any] | None) -> None:
    """Undo our own cancellation; raise if there was another one (detected from Python 3.11 on)."""
    if sys.version_info >= (3, 11) and task is not None and task.uncancel() > 0:
        raise asyncio.CancelledError


class _Waiting(NamedTuple):
    account: Account
    num_bytes: int
    granted: asyncio.Future[None]


def announced(scope: Scope) -> tuple[int | None, str]:
    """Return length (0: no body, None: unknown) and encoding, by the headers of a request."""
    length: int | None = 0
    is_chunked, encoding = False, ""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"transfer-encoding":
            is_chunked = True
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
    if is_chunked:
        length = None  # some servers pass both headers on, and then the length is wrong
    return length, encoding


def too_large_message(max_body_bytes: int, remedy: str = "") -> str:
    """Return the reason of a status 413; `remedy` is added to it."""
    return f"request body larger than {max_body_bytes} bytes{remedy and f'; {remedy}'}"


def paced(receive: Receive, account: Account) -> Receive:
    """Pass messages on; reject with 408 a sender that sends nothing for too long, or too slowly.

    An evicted request gets 503, since it may be retried when there is room.
    """
    is_complete = False

    async def receive_in_time() -> Message:
        nonlocal is_complete
        if is_complete:
            return await receive()
        pace = account.pace
        message = await account.read(receive, timeout_s=pace.grace_s)
        if account.is_evicted:
            raise HTTPException(
                503,
                f"the body came too slowly ({pace.bytes_per_s:.0f} bytes/s) while others wait for "
                "the memory it takes; send it again, in smaller requests",
                {"Retry-After": str(_SLOW_RETRY_AFTER_S)},
            )
        if message is not None:
            pace.add(0.0, len(message.get("body", b"")))
            is_complete = not message.get("more_body", False)
        if message is None or (not is_complete and pace.is_too_slow):
            raise HTTPException(
                408,
                f"the body came too slowly: {pace.num_bytes} bytes in {pace.turn_s:.0f} s; "
                f"expected {pace.min_bytes_per_s:g} bytes/s, and no silence of {pace.grace_s:g} s",
            )
        return message

    return receive_in_time


def capped(receive: Receive, max_body_bytes: int, account: Account, *, remedy: str = "") -> Receive:
    """Pass messages on within the budget; reject a body above the limit with 413."""
    room = max_body_bytes

    async def receive_within() -> Message:
        nonlocal room
        message = await receive()
        num_bytes = len(message.get("body", b""))
        room -= num_bytes
        if room < 0:
            raise HTTPException(413, too_large_message(max_body_bytes, remedy))
        if num_bytes:
            await account.take(num_bytes)
        if not message.get("more_body", False):
            account.note_complete()
        return message

    return receive_within


class BodyLimitMiddleware:
    """Rejects bodies above the limit, bodies that come too slowly, and more bodies than fit.

    The application receives `HTTPException` when it reads such a body: 413, 408 or 503. Unlike in
    the trajectory service, a body counts only until it is complete: an engine serves a request for
    minutes, and its own limits bound what it keeps.

    Args:
        app: The wrapped application.
        max_body_bytes: Limit of one body.
        max_buffered_bytes: Limit of all bodies that are being read; None: four times that of one.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, max_buffered_bytes: int | None = None
    ) -> None:
        self.app = app
        self._max_body_bytes = max_body_bytes
        self._budget = BodyBudget(max_buffered_bytes or 4 * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length, _ = announced(scope) if scope["type"] == "http" else (0, "")
        if length is not None and length <= SMALL_BYTES:
            await self.app(scope, receive, send)
        elif length is not None and length > self._max_body_bytes:
            await self.app(scope, _refusing(too_large_message(self._max_body_bytes)), send)
        else:
            account = self._budget.open()
            try:
                await self.app(scope, self._limited(receive, account), send)
            finally:
                account.close()

    def _limited(self, receive: Receive, account: Account) -> Receive:
        within = capped(paced(receive, account), self._max_body_bytes, account)

        async def receive_limited() -> Message:
            message = await within()
            if not message.get("more_body", False):
                account.close()
            return message

        return receive_limited


def _refusing(text: str) -> Receive:
    async def refuse() -> Message:
        raise HTTPException(413, text)

    return refuse

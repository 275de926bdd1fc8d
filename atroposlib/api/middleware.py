"""ASGI middleware: gzip both ways, limits on bodies and their memory, request ids and metrics.

    request  ── GZipRequestMiddleware: BodyBudget, size limit, gunzip ──► application
    response ◄─ GZipResponseMiddleware: gzip ───────────────────────────  application

gzip runs piece by piece, large pieces in threads, since zlib releases the GIL. No call handles more
than one piece, so a decompression bomb is detected at the limit, and a disconnect within
milliseconds.

Each request has an id, which is part of all its log lines. A response 500 has the same id, so that
it can be matched with the traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.auth import path_of, rule_for
from atroposlib.utils.request_limits import (
    SMALL_BYTES,
    Account,
    BodyBudget,
    announced,
    capped,
    paced,
    too_large_message,
)
from atroposlib.wire import MEDIA_TYPES

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_INLINE_BYTES = 32 * 1024
"""Shorter pieces are processed faster than passed to a thread and back."""
_INFLATED_PIECE_BYTES = 1024 * 1024


class GzipError(Exception):
    """The body is not one or more complete gzip members."""


class BodyTooLargeError(Exception):
    """The decompressed body exceeds the limit."""


class Inflater:
    """Decompresses one gzip stream of any number of members, up to `max_bytes`."""

    def __init__(self, max_bytes: int, threads: Executor | None = None) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._is_member_open = False
        self._unread = b""
        self._room = max_bytes
        self._threads = threads

    async def inflate(self, data: bytes) -> list[bytes]:
        """Return the next decompressed pieces of `data`, about 1 MiB in total at most.

        Call it again with `b""` until it returns nothing, before the next data.

        Raises:
            GzipError: the data is not gzip.
            BodyTooLargeError: the decompressed size exceeds the limit.
        """
        self._unread += data
        if not self._unread:
            return []
        return await _in_thread(self._threads, len(self._unread), self._step)

    def _step(self) -> list[bytes]:
        pieces: list[bytes] = []
        wanted = min(self._room + 1, _INFLATED_PIECE_BYTES)
        while self._unread and wanted > 0:
            self._is_member_open = True
            try:
                piece = self._member.decompress(self._unread, wanted)
            except zlib.error as error:
                raise GzipError from error
            self._unread = self._member.unconsumed_tail
            if self._member.eof:
                # Members may be padded with zeros.
                self._unread = self._member.unused_data.lstrip(b"\0")
                self._member = zlib.decompressobj(_GZIP_WINDOW)
                self._is_member_open = False
            if not piece:
                continue
            pieces.append(piece)
            wanted -= len(piece)
            self._room -= len(piece)
            if self._room < 0:
                raise BodyTooLargeError
        return pieces

    def finish(self) -> None:
        """Raise `GzipError` if the stream is incomplete."""
        if self._is_member_open:
            raise GzipError


class Deflater:
    """Compresses response bodies of at least `min_bytes`, at a level from 1 (fastest) to 9.

    Long pieces are compressed in `threads`; None is the default executor of the loop.
    """

    def __init__(self, *, min_bytes: int, level: int, threads: Executor | None = None) -> None:
        self._min_bytes = min_bytes
        self._level = level
        self._threads = threads

    def applies_to(self, request_headers: Headers, num_bytes: int) -> bool:
        """Whether a body of this length is compressed for the sender of these headers."""
        return num_bytes >= self._min_bytes and accepts_gzip(request_headers)

    def start(self) -> DeflaterStream:
        return DeflaterStream(self._level, self._threads)

    async def deflate(
        self, pieces: Iterable[bytes], is_disconnected: Callable[[], bool]
    ) -> list[bytes]:
        """Compress a body; the result is incomplete if the client disconnected meanwhile."""
        stream = self.start()
        compressed: list[bytes] = []
        for piece in pieces:
            if is_disconnected():
                break
            compressed.append(await stream.feed(piece))
        compressed.append(await stream.feed(b"", is_last=True))
        return compressed


class DeflaterStream:
    """The compression of one body."""

    def __init__(self, level: int, threads: Executor | None) -> None:
        self._stream = zlib.compressobj(level, zlib.DEFLATED, _GZIP_WINDOW)
        self._threads = threads

    async def feed(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Compress a piece; return the bytes that are ready, or all bytes after the last piece."""

        def work() -> bytes:
            ready = self._stream.compress(piece)
            return ready + self._stream.flush() if is_last else ready

        return await _in_thread(self._threads, len(piece), work)


def accepts_gzip(headers: Headers) -> bool:
    """Whether the sender of these headers accepts gzip."""
    for choice in headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = choice.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _in_thread(threads: Executor | None, num_bytes: int, work: Callable[[], _T]) -> _T:
    if num_bytes <= _INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(threads, work)


_MIB = 1024 * 1024
_REMEDY = "post fewer groups at a time"
_INFLATED_AT_ONCE = 64 * 1024
"""Compressed bytes per call, which limits the output of a decompression bomb."""
_PLAIN_ENCODINGS = ("", "identity", "utf-8", "utf8")
"""`Content-Encoding` of uncompressed bodies; some senders put a charset there."""

_DENSE_TYPES = (MEDIA_TYPES["msgpack"],)
"""Media types that are already compressed, or deliberately not."""


class GZipRequestMiddleware:
    """Decompresses request bodies sent as gzip; rejects bodies above the limit with 413.

    `budget` limits the memory of all request bodies; None creates one for this middleware.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int = 128 * _MIB,
        budget: BodyBudget | None = None,
        threads: Executor | None = None,
    ) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self._budget = budget or BodyBudget(4 * max_body_bytes)
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length, encoding = announced(scope)
        if length is not None and length > self.max_body_bytes:
            await self._too_large()(scope, receive, send)
        elif encoding in _PLAIN_ENCODINGS and length is not None and length <= SMALL_BYTES:
            await self.app(scope, receive, send)
        elif encoding not in _PLAIN_ENCODINGS and "gzip" not in encoding:
            text = f"Content-Encoding {encoding!r} is not understood"
            detail = {"detail": f"{text}; send gzip or an uncompressed body"}
            await JSONResponse(detail, 415, {"Accept-Encoding": "gzip"})(scope, receive, send)
        else:
            account = self._budget.open()
            try:
                await self._serve_large(scope, receive, send, account)
            finally:
                account.close()

    async def _serve_large(
        self, scope: Scope, receive: Receive, send: Send, account: Account
    ) -> None:
        in_time = paced(receive, account)
        if "gzip" not in announced(scope)[1]:
            await self.app(
                scope, capped(in_time, self.max_body_bytes, account, remedy=_REMEDY), send
            )
            return
        try:
            pieces = await self._gunzip_body(in_time, account)
        except GzipError:
            await PlainTextResponse("Invalid gzip payload", 400)(scope, receive, send)
        except BodyTooLargeError:
            await self._too_large()(scope, receive, send)
        except HTTPException as error:
            refusal = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            await refusal(scope, receive, send)
        else:
            if pieces is not None:
                account.note_complete()
                await self.app(_plain_scope(scope, pieces), _replay(pieces, receive), send)

    async def _gunzip_body(self, receive: Receive, account: Account) -> list[bytes] | None:
        """Return the decompressed body; None if the client disconnected before its end."""
        inflater = Inflater(self.max_body_bytes, self._threads)
        pieces: list[bytes] = []
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            more_body = message.get("more_body", False)
            compressed = message.get("body", b"")
            for start in range(0, len(compressed), _INFLATED_AT_ONCE):
                data = compressed[start : start + _INFLATED_AT_ONCE]
                while inflated := await inflater.inflate(data):
                    await account.take(sum(map(len, inflated)))
                    pieces += inflated
                    data = b""
        inflater.finish()
        return pieces

    def _too_large(self) -> JSONResponse:
        return JSONResponse({"detail": too_large_message(self.max_body_bytes, _REMEDY)}, 413)


def _plain_scope(scope: Scope, pieces: list[bytes]) -> Scope:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-encoding", b"content-length", b"transfer-encoding")
    ]
    length = str(sum(map(len, pieces))).encode()
    return {**scope, "headers": [*headers, (b"content-length", length)]}


def _replay(pieces: list[bytes], receive: Receive) -> Receive:
    """Return the pieces of a body, then further messages of the connection."""
    unread = iter([*pieces, b""])

    async def replay() -> Message:
        for piece in unread:
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}
        return await receive()

    return replay


class GZipResponseMiddleware:
    """Compresses responses with a long enough `Content-Length`, for clients that accept gzip."""

    def __init__(
        self, app: ASGIApp, *, min_bytes: int, level: int, threads: Executor | None = None
    ) -> None:
        self.app = app
        self.deflater = Deflater(min_bytes=min_bytes, level=level, threads=threads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and accepts_gzip(Headers(scope=scope)):
            send = _GzipSender(send, self.deflater, Headers(scope=scope))
        await self.app(scope, receive, send)


class _GzipSender:
    """The `send` of one response; compresses if the start of the response allows it."""

    def __init__(self, send: Send, deflater: Deflater, request_headers: Headers) -> None:
        self._send = send
        self._deflater = deflater
        self._request_headers = request_headers
        self._stream: DeflaterStream | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif message["type"] == "http.response.body" and self._stream is not None:
            body, more_body = message.get("body", b""), message.get("more_body", False)
            if body or not more_body:
                body = await self._stream.feed(body, is_last=not more_body)
            message = {**message, "body": body}
        await self._send(message)

    def _start(self, message: Message) -> Message:
        headers = MutableHeaders(raw=list(message["headers"]))
        length = int(headers.get("content-length", "0"))
        headers.add_vary_header("Accept-Encoding")
        is_ready = "content-encoding" in headers or headers.get("content-type") in _DENSE_TYPES
        if not is_ready and self._deflater.applies_to(self._request_headers, length):
            self._stream = self._deflater.start()
            headers["Content-Encoding"] = "gzip"
            del headers["Content-Length"]
        return {**message, "headers": headers.raw}


_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Return the id of the request being served; empty outside of one."""
    return _request_id.get()


class RequestErrorsMiddleware:
    """Gives each request an id, and responds 500 with that id if the application fails.

    Clients may send their own `X-Request-ID`. A client that disconnects while its body is read is
    not an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._prefix = secrets.token_hex(4)
        self._numbers = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Each request runs in its own task, so the id need not be reset; later log lines of the
        # server about the request also contain it.
        _request_id.set(_client_id(scope) or f"{self._prefix}-{next(self._numbers)}")
        is_started = False

        async def note_start(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, receive, note_start)
        except ClientDisconnect:
            logger.debug("the client of %s %s disconnected", scope["method"], scope["path"])
        except Exception:
            if is_started:
                raise  # the server ends the connection and logs the traceback
            logger.exception("%s %s failed", scope["method"], scope["path"])
            headers = {"X-Request-ID": request_id()}
            refusal = PlainTextResponse("Internal Server Error", 500, headers)
            await refusal(scope, receive, send)


def _client_id(scope: Mapping[str, Any]) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _CLIENT_ID.fullmatch(value) else ""
    return ""


_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_DISCONNECTED = 499


class _Series(NamedTuple):
    durations: Histogram
    in_flight: Gauge


class RequestMetrics:
    """The request metrics of one application, in its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["method", "route"]
        self._durations = Histogram(
            "atropos_http_request_duration_seconds",
            "Time from the first byte of a request to the last of its response; "
            "for /batch it includes its wait.",
            labels,
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._in_flight = Gauge(
            "atropos_http_requests_in_flight",
            "Requests being served.",
            labels,
            registry=registry,
        )
        self._answers = Counter(
            "atropos_http_requests_total",
            "Requests by status of the response; 499: the client disconnected before it.",
            [*labels, "status"],
            registry=registry,
        )
        # Looking a series up by its labels costs about the same as using it.
        self._series: dict[tuple[str, str], _Series] = {}
        self._counters: dict[tuple[str, str, int], Counter] = {}

    def series(self, method: str, route: str) -> _Series:
        series = self._series.get((method, route))
        if series is None:
            labels = (method, route)
            series = _Series(self._durations.labels(*labels), self._in_flight.labels(*labels))
            self._series[method, route] = series
        return series

    def count(self, method: str, route: str, status: int) -> None:
        counter = self._counters.get((method, route, status))
        if counter is None:
            counter = self._answers.labels(method, route, str(status))
            self._counters[method, route, status] = counter
        counter.inc()


class RequestMetricsMiddleware:
    """Times every request and counts it by the status of its response."""

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = rule_for(path_of(scope)).route
        method = scope["method"] if scope["method"] in _METHODS else "other"
        series = self._metrics.series(method, route)
        status = _CLIENT_DISCONNECTED

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        series.in_flight.inc()
        started = perf_counter()
        try:
            await self.app(scope, receive, note_status)
        except Exception:
            status = 500
            raise
        finally:
            series.durations.observe(perf_counter() - started)
            series.in_flight.dec()
            self._metrics.count(method, route, status)

"""Compression and size of bodies, as ASGI middleware.

    request  ── GZipRequestMiddleware: budget, cap, gunzip ──► application
    response ◄─ GZipResponseMiddleware: gzip ────────────────  application

Large bodies are taken in piece by piece, while the `BodyBudget` has room for them.
"""

from __future__ import annotations

from concurrent.futures import Executor

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.bodies import Account, BodyBudget
from atroposlib.api.gzip_pieces import (
    BodyTooLargeError,
    Deflater,
    DeflaterStream,
    GzipError,
    Inflater,
    accepts_gzip,
)
from atroposlib.wire import MEDIA_TYPES

__all__ = ["GZipRequestMiddleware", "GZipResponseMiddleware"]

_MIB = 1024 * 1024
_SMALL_BYTES = 64 * 1024
"""Bodies that the connection has buffered anyway before anybody asks for them."""
_SLOW_RETRY_AFTER_S = 10
_INFLATED_AT_ONCE = 64 * 1024
"""Compressed bytes looked at in one go; bounds what a bomb can make of them."""
_PLAIN_ENCODINGS = ("", "identity", "utf-8", "utf8")
"""`Content-Encoding` of bodies that are not compressed; some senders name a charset there."""

_DENSE_TYPES = (MEDIA_TYPES["msgpack"],)
"""What is compressed already, or deliberately not."""


class GZipRequestMiddleware:
    """Gunzips request bodies that say they are gzip; refuses bodies above the cap with 413.

    Args:
        app: the application behind.
        max_body_bytes: cap on the body as the application reads it.
        budget: shares the memory for bodies with other requests; None: one for this middleware.
        threads: where bodies are inflated; None: the threads of the event loop.
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
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length, encoding = _announced(scope)
        if length is not None and length > self.max_body_bytes:
            await self._too_large()(scope, receive, send)
        elif encoding in _PLAIN_ENCODINGS and length is not None and length <= _SMALL_BYTES:
            await self.app(scope, receive, send)
        elif encoding not in _PLAIN_ENCODINGS and "gzip" not in encoding:
            await _unknown_encoding(encoding)(scope, receive, send)
        else:
            account = self._budget.open()
            try:
                await self._serve_large(scope, receive, send, account)
            finally:
                account.close()

    async def _serve_large(
        self, scope: Scope, receive: Receive, send: Send, account: Account
    ) -> None:
        paced = _paced(receive, account)
        if "gzip" not in _announced(scope)[1]:
            await self.app(scope, _capped(paced, self.max_body_bytes, account), send)
            return
        try:
            pieces = await self._gunzip_body(paced, account)
        except GzipError:
            await PlainTextResponse("Invalid gzip payload", 400)(scope, receive, send)
        except BodyTooLargeError:
            await self._too_large()(scope, receive, send)
        except HTTPException as error:
            await _refusal(error)(scope, receive, send)
        else:
            if pieces is not None:
                await self.app(_plain_scope(scope, pieces), _replay(pieces, receive), send)

    async def _gunzip_body(self, receive: Receive, account: Account) -> list[bytes] | None:
        """Return the decompressed body; None when the client left before it was complete."""
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
        return JSONResponse({"detail": _too_large_message(self.max_body_bytes)}, 413)


def _announced(scope: Scope) -> tuple[int | None, str]:
    """Return the length a request announces, 0 without a body, None unknown; and its encoding."""
    length: int | None = 0
    encoding = ""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"transfer-encoding":
            length = None
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
    return length, encoding


def _too_large_message(max_body_bytes: int) -> str:
    return f"request body larger than {max_body_bytes} bytes; post fewer groups at a time"


def _unknown_encoding(encoding: str) -> JSONResponse:
    text = f"Content-Encoding {encoding!r} is not understood; send gzip or an uncompressed body"
    return JSONResponse({"detail": text}, 415, {"Accept-Encoding": "gzip"})


def _refusal(error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def _plain_scope(scope: Scope, pieces: list[bytes]) -> Scope:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-encoding", b"content-length", b"transfer-encoding")
    ]
    length = str(sum(map(len, pieces))).encode()
    return {**scope, "headers": [*headers, (b"content-length", length)]}


def _replay(pieces: list[bytes], receive: Receive) -> Receive:
    """Hand out the pieces of a body, then what the connection has to say."""
    unread = iter([*pieces, b""])

    async def replay() -> Message:
        for piece in unread:
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}
        return await receive()

    return replay


def _paced(receive: Receive, account: Account) -> Receive:
    """Pass messages on; refuse a sender that falls silent or dawdles within its body with 408.

    One that others wait for gets a 503: it may try again when there is more room.
    """
    is_complete = False

    async def paced() -> Message:
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

    return paced


def _capped(receive: Receive, max_body_bytes: int, account: Account) -> Receive:
    """Pass messages on while there is room for them; a body above the cap is refused with 413."""
    room = max_body_bytes

    async def capped() -> Message:
        nonlocal room
        message = await receive()
        num_bytes = len(message.get("body", b""))
        room -= num_bytes
        if room < 0:
            raise HTTPException(413, _too_large_message(max_body_bytes))
        if num_bytes:
            await account.take(num_bytes)
        return message

    return capped


class GZipResponseMiddleware:
    """Compresses responses for clients that accept gzip, when they are long enough.

    Only responses that announce their length are touched, so small ones never are.
    """

    def __init__(
        self, app: ASGIApp, *, min_bytes: int, level: int, threads: Executor | None = None
    ) -> None:
        self.app = app
        self.deflater = Deflater(min_bytes=min_bytes, level=level, threads=threads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and accepts_gzip(Headers(scope=scope)):
            send = _GzipSender(send, self.deflater, Headers(scope=scope))
        await self.app(scope, receive, send)


class _GzipSender:
    """The `send` of one response, compressing when the start of the response allows it."""

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

"""gzip in both directions, and the cap on request bodies; ASGI middleware.

    request  ── GZipRequestMiddleware: cap, gunzip ──► application
    response ◄─ GZipResponseMiddleware: gzip ────────  application

Bodies are inflated and deflated piece by piece: a bomb is noticed at the cap, and a large batch is
compressed while it is being sent, with other requests served between the pieces.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["GZipRequestMiddleware", "GZipResponseMiddleware"]

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 256 * 1024
_DEFAULT_MAX_BODY_BYTES = 512 * 1024 * 1024


class _GzipError(Exception):
    """The body is not one or more complete gzip members."""


class _TooLargeError(Exception):
    """The body exceeds the cap."""


class GZipRequestMiddleware:
    """Gunzips request bodies that say they are gzip; refuses bodies above the cap with 413.

    Args:
        app: the application behind.
        max_body_bytes: cap on the body as the application reads it.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int = _DEFAULT_MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.max_body_bytes:
            await self._too_large()(scope, receive, send)
        elif "gzip" in headers.get("content-encoding", "").lower():
            await self._serve_gzip(scope, receive, send)
        else:
            await self.app(scope, _capped(receive, self.max_body_bytes), send)

    async def _serve_gzip(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._gunzip_body(receive)
        except _GzipError:
            await PlainTextResponse("Invalid gzip payload", 400)(scope, receive, send)
            return
        except _TooLargeError:
            await self._too_large()(scope, receive, send)
            return
        if body is None:
            return
        plain_scope = dict(scope)
        plain_scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() not in (b"content-encoding", b"content-length", b"transfer-encoding")
        ] + [(b"content-length", str(len(body)).encode())]
        unread = [body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self.app(plain_scope, replay, send)

    async def _gunzip_body(self, receive: Receive) -> bytes | None:
        """Return the decompressed body; None when the client left before it was complete."""
        inflater = _Inflater(self.max_body_bytes)
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            more_body = message.get("more_body", False)
            compressed = message.get("body", b"")
            for start in range(0, len(compressed), _PIECE_BYTES):
                piece = compressed[start : start + _PIECE_BYTES]
                # zlib lets other threads run while it works; a large body must not stall them.
                await asyncio.to_thread(inflater.feed, piece)
        return inflater.finish()

    def _too_large(self) -> JSONResponse:
        return JSONResponse({"detail": _too_large_message(self.max_body_bytes)}, 413)


def _too_large_message(max_body_bytes: int) -> str:
    return f"request body larger than {max_body_bytes} bytes; post fewer groups at a time"


class _Inflater:
    """Inflates one gzip stream of any number of members up to a cap."""

    def __init__(self, max_bytes: int) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._is_member_open = False
        self._pieces: list[bytes] = []
        self._room = max_bytes

    def feed(self, data: bytes) -> None:
        """Inflate a piece; raises when it is not gzip or the cap is exceeded."""
        while data:
            self._is_member_open = True
            try:
                piece = self._member.decompress(data, self._room + 1)
            except zlib.error as error:
                raise _GzipError from error
            self._room -= len(piece)
            if self._room < 0:
                raise _TooLargeError
            self._pieces.append(piece)
            data = self._member.unconsumed_tail
            if self._member.eof:
                data = self._member.unused_data.lstrip(b"\0")  # members may be padded with zeros
                self._member = zlib.decompressobj(_GZIP_WINDOW)
                self._is_member_open = False

    def finish(self) -> bytes:
        """Return everything inflated; raises when the stream is cut short."""
        if self._is_member_open:
            raise _GzipError
        return b"".join(self._pieces)


def _capped(receive: Receive, max_body_bytes: int) -> Receive:
    """Pass messages on until the body exceeds the cap, then raise a 413."""
    room = max_body_bytes

    async def capped() -> Message:
        nonlocal room
        message = await receive()
        room -= len(message.get("body", b""))
        if room < 0:
            raise HTTPException(413, _too_large_message(max_body_bytes))
        return message

    return capped


class GZipResponseMiddleware:
    """Compresses responses of at least `min_bytes` for clients that accept gzip.

    Only responses that announce their length are touched, so small ones never are.
    """

    def __init__(self, app: ASGIApp, *, min_bytes: int, level: int) -> None:
        self.app = app
        self.min_bytes = min_bytes
        self.level = level

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and _accepts_gzip(Headers(scope=scope)):
            send = _GzipSender(send, min_bytes=self.min_bytes, level=self.level)
        await self.app(scope, receive, send)


def _accepts_gzip(headers: Headers) -> bool:
    for choice in headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = choice.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class _GzipSender:
    """The `send` of one response, compressing when the start of the response allows it."""

    def __init__(self, send: Send, *, min_bytes: int, level: int) -> None:
        self._send = send
        self._min_bytes = min_bytes
        self._level = level
        self._deflater: zlib._Compress | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            length = int(headers.get("content-length", "0"))
            headers.add_vary_header("Accept-Encoding")
            if length >= self._min_bytes and "content-encoding" not in headers:
                self._deflater = zlib.compressobj(self._level, zlib.DEFLATED, _GZIP_WINDOW)
                headers["Content-Encoding"] = "gzip"
                del headers["Content-Length"]
            message = {**message, "headers": headers.raw}
        elif message["type"] == "http.response.body" and self._deflater is not None:
            body = self._deflater.compress(message.get("body", b""))
            if not message.get("more_body", False):
                body += self._deflater.flush()
            message = {**message, "body": body}
        await self._send(message)

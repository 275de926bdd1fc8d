"""Responses that the framework does not provide: bodies in pieces, with confirmed delivery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.api.http_protocol import Connection
from atroposlib.api.middleware import Deflater, Pace

__all__ = ["PiecesResponse", "json_response", "wait_until_gone"]

logger = logging.getLogger(__name__)

_SLICE_BYTES = 256 * 1024
_LOOK_S = 0.25
_LAST_LOOK_S = 5.0

Report = Callable[[], Awaitable[Any]]


class PiecesResponse(Response):
    """A body in pieces, sent without joining them, that reports whether it arrived.

    Other requests are served between slices of 256 KiB.

    Meaning of *arrived*. Under `run-api`, everything was confirmed by the client's machine before
    the client closed or broke the connection. Under another ASGI server, everything was handed
    to the connection and the client was still there. Neither proves that the client's program
    read the body: what fits into the socket buffers of its machine counts as arrived even if the
    program then ends without reading. If that matters, the client must acknowledge the body.

    Under `run-api`, a client that reads the body more slowly than `Pace` allows is disconnected,
    and the body counts as lost.

    Args:
        pieces: the body.
        media_type: its type.
        headers: more headers.
        deflater: compresses the body for clients that accept it; None leaves that to middleware.
        on_arrived: awaited once the body has arrived, before the response is complete: the next
            request on the same connection is read after it.
        on_lost: awaited instead if the client disconnected, or sending failed, before that.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        deflater: Deflater | None = None,
        on_arrived: Report | None = None,
        on_lost: Report | None = None,
    ) -> None:
        length = sum(map(len, pieces))
        super().__init__(
            headers={**(headers or {}), "Content-Length": str(length)}, media_type=media_type
        )
        self._pieces = pieces
        self._deflater = deflater
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body and report."""
        gone = asyncio.ensure_future(wait_until_gone(receive))
        has_arrived = False
        try:
            await self._compress(scope, gone)
            has_arrived = await self._deliver(scope, send, gone)
        finally:
            gone.cancel()
            await self._report(self._on_arrived if has_arrived else self._on_lost)
        if has_arrived:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _compress(self, scope: Scope, gone: asyncio.Future[None]) -> None:
        if self._deflater is None:
            return
        self.headers.add_vary_header("Accept-Encoding")
        length = int(self.headers["Content-Length"])
        if self._deflater.applies_to(Headers(scope=scope), length):
            self._pieces = await self._deflater.deflate(_slices(self._pieces), gone.done)
            self.headers["Content-Encoding"] = "gzip"
            self.headers["Content-Length"] = str(sum(map(len, self._pieces)))

    async def _deliver(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> bool:
        connection = Connection.of(scope)
        if connection is None or self._on_lost is None:
            await self._send_all(send, gone)
            await asyncio.sleep(0)
            return not gone.done()
        watching = asyncio.ensure_future(self._abort_slow(connection))
        try:
            return await self._send_all(send, gone) and await connection.wait_until_confirmed(
                gone.done
            )
        finally:
            watching.cancel()

    async def _send_all(self, send: Send, gone: asyncio.Future[None]) -> bool:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for piece in _slices(self._pieces):
            # Lets other requests run, and a disconnect be noticed.
            await asyncio.sleep(0)
            if gone.done():
                return False
            self._num_sent += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        # Servers wait here until most of the previous pieces have left this process.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        return True

    async def _abort_slow(self, connection: Connection) -> None:
        """Disconnect the client if it does not read; runs until cancelled."""
        pace = Pace()
        wait_s, confirmed = _LOOK_S, 0
        while not pace.is_too_slow:
            await asyncio.sleep(min(wait_s, pace.grace_s / 4))
            now_confirmed = max(confirmed, self._num_sent - connection.unconfirmed_bytes())
            pace.add(min(wait_s, pace.grace_s / 4), now_confirmed - confirmed)
            wait_s, confirmed = min(2 * wait_s, _LAST_LOOK_S), now_confirmed
        logger.warning(
            "disconnecting a slow client: it read %d bytes in %.0f s", confirmed, pace.turn_s
        )
        connection.abort()

    async def _report(self, report: Report | None) -> None:
        if report is None:
            return
        try:
            await report()
        except Exception:
            # The body is sent, so the client cannot receive an error.
            logger.exception("could not record whether a response arrived")


def _slices(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Join small pieces and divide large ones into slices of a suitable size for one write."""
    small: list[bytes] = []
    room = _SLICE_BYTES
    for piece in pieces:
        if len(piece) > room and small:
            yield b"".join(small)
            small, room = [], _SLICE_BYTES
        if len(piece) <= room:
            small.append(piece)
            room -= len(piece)
            continue
        for start in range(0, len(piece), _SLICE_BYTES):
            yield piece[start : start + _SLICE_BYTES]
    if small:
        yield b"".join(small)


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client disconnected, or has its response; safe to cancel."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )

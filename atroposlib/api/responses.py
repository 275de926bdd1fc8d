"""Responses in pieces with confirmed delivery, and the protocol class of uvicorn that confirms it.

    response ── write ──► transport buffer ──► kernel's send queue ──► client's kernel ──► client
                          └────────── unconfirmed_bytes ─────────┘     └── not visible ──┘

`ObservedHttpProtocol` adds a `Connection` to the ASGI scope of each request, which counts the bytes
in both buffers. Under other servers, responses rely on ASGI, which ends at the transport buffer.
The protocol closes connections whose client stops sending within a request, or sends headers above
the size limit.
"""

from __future__ import annotations

import array
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.api.middleware import Deflater
from atroposlib.utils.request_limits import LimitedHttpProtocol, Pace

logger = logging.getLogger(__name__)

EXTENSION = "atroposlib.connection"
"""Key in the `extensions` of an ASGI scope for `{"connection": Connection}`."""

_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.02


class Connection:
    """One connection to a client, as seen by the server."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unconfirmed_at_end: int | None = None

    @staticmethod
    def of(scope: Mapping[str, Any]) -> Connection | None:
        """Return the connection of a request; None under a server that does not provide it."""
        extension = (scope.get("extensions") or {}).get(EXTENSION) or {}
        connection: Connection | None = extension.get("connection")
        return connection

    def unconfirmed_bytes(self) -> int:
        """Return the number of bytes written and not yet confirmed by the client's machine."""
        if self._unconfirmed_at_end is not None:
            return self._unconfirmed_at_end
        return self._transport.get_write_buffer_size() + _send_queue_bytes(self._transport)

    def abort(self) -> None:
        self._transport.abort()

    @property
    def has_ended(self) -> bool:
        """Whether the client closed its side or the connection broke; later bytes are not sent."""
        return self._unconfirmed_at_end is not None

    def note_end(self) -> None:
        """Record how many bytes were unconfirmed when the client closed its side."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = self.unconfirmed_bytes()

    def note_failure(self) -> None:
        """Record that the connection broke, with an unknown number of unread bytes."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = sys.maxsize

    async def wait_until_confirmed(self, is_disconnected: Callable[[], bool]) -> bool:
        """Wait until the client's machine has confirmed every byte, or the client disconnected.

        A client that closed its side without a reset after the last byte has received it too: a
        connection that is closed with unread bytes is reset.

        Returns:
            Whether everything arrived at the client's machine. Whether the client's program has
            read it is unknown.
        """
        wait_s = _FIRST_POLL_S
        while self.unconfirmed_bytes() and not is_disconnected():
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_POLL_S)
        return self.unconfirmed_bytes() == 0


def _send_queue_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes in the kernel's send queue; 0 if the system does not report it."""
    socket = transport.get_extra_info("socket")
    if socket is None or not sys.platform.startswith("linux"):
        return 0
    import fcntl
    import termios

    count = array.array("i", [0])
    try:
        fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, count)
    except (OSError, ValueError):
        return 0
    return count[0]


_STATUS_LINE_START = b"HTTP/1.1 "


class JoiningTransport:
    """Sends the headers of a response together with the first bytes of its body.

    This saves one system call and one packet per response.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes; headers are delayed until the next write or the next loop iteration."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(_STATUS_LINE_START):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return len(self._head) + self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class ObservedHttpProtocol(LimitedHttpProtocol):
    """Adds the `Connection` to the scope of each request, and enforces timeouts and size limits."""

    observed: Connection | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.observed is None:
            self.observed = Connection(self.transport)
        self.scope["extensions"] = {EXTENSION: {"connection": self.observed}}

    def eof_received(self) -> None:
        """Record that the client has closed its side, while the socket is still open."""
        if self.observed is not None:
            self.observed.note_end()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.observed is not None:
            self.observed.note_failure()
        super().connection_lost(exc)


_SLICE_BYTES = 256 * 1024
_FIRST_CHECK_S = 0.25
_LONGEST_CHECK_S = 5.0

Report = Callable[[], Awaitable[Any]]


class PiecesResponse(Response):
    """A body in pieces, sent without joining them, that reports whether it arrived.

    Other requests are served between slices of 256 KiB.

    Under `run-api`, a body has *arrived* if the client's machine confirmed all of it before the
    connection was closed. Under another ASGI server, it has arrived if all of it was passed to the
    connection while the client was connected. Neither proves that the client's program read the
    body: it may end while the body is in the socket buffers of its machine. If that matters, the
    client must acknowledge the body.

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
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        has_arrived = False
        try:
            await self._compress(scope, disconnect)
            has_arrived = await self._deliver(scope, send, disconnect)
        finally:
            disconnect.cancel()
            await self._report(self._on_arrived if has_arrived else self._on_lost)
        if has_arrived:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _compress(self, scope: Scope, disconnect: asyncio.Future[None]) -> None:
        if self._deflater is None:
            return
        self.headers.add_vary_header("Accept-Encoding")
        length = int(self.headers["Content-Length"])
        if self._deflater.applies_to(Headers(scope=scope), length):
            self._pieces = await self._deflater.deflate(_slices(self._pieces), disconnect.done)
            self.headers["Content-Encoding"] = "gzip"
            self.headers["Content-Length"] = str(sum(map(len, self._pieces)))

    async def _deliver(self, scope: Scope, send: Send, disconnect: asyncio.Future[None]) -> bool:
        connection = Connection.of(scope)
        if connection is None or self._on_lost is None:
            await self._send_all(send, disconnect)
            await asyncio.sleep(0)
            return not disconnect.done()
        watching = asyncio.ensure_future(self._abort_slow(connection))
        try:
            is_sent = await self._send_all(send, disconnect, connection)
            return is_sent and await connection.wait_until_confirmed(disconnect.done)
        finally:
            watching.cancel()

    async def _send_all(
        self, send: Send, disconnect: asyncio.Future[None], connection: Connection | None = None
    ) -> bool:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for piece in _slices(self._pieces):
            # Lets other requests run, and a disconnect be noticed.
            await asyncio.sleep(0)
            if disconnect.done():
                return False
            self._num_sent += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if connection is not None and connection.has_ended:
            return False  # before the last piece, which was then dropped
        # Servers wait here until most of the previous pieces have left this process.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        return True

    async def _abort_slow(self, connection: Connection) -> None:
        """Disconnect the client if it does not read; runs until cancelled."""
        pace = Pace()
        wait_s, confirmed = _FIRST_CHECK_S, 0
        while not pace.is_too_slow:
            await asyncio.sleep(min(wait_s, pace.grace_s / 4))
            now_confirmed = max(confirmed, self._num_sent - connection.unconfirmed_bytes())
            pace.add(min(wait_s, pace.grace_s / 4), now_confirmed - confirmed)
            wait_s, confirmed = min(2 * wait_s, _LONGEST_CHECK_S), now_confirmed
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


async def wait_for_disconnect(receive: Receive) -> None:
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

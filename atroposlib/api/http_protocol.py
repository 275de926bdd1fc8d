"""uvicorn's HTTP protocol, extended: it tracks delivery of responses and limits slow clients.

    response ── write ──► transport buffer ──► kernel's send queue ──► client's kernel ──► client
                          └────────── unconfirmed_bytes ─────────┘     └── not visible ──┘

It puts a `Connection` into the ASGI scope of each request, which counts the bytes on their way down
to the kernel's send queue. Under other servers, responses rely on ASGI, which ends at the transport
buffer. Connections are closed whose client stops sending within a request, or sends headers above
the size limit.
"""

from __future__ import annotations

import array
import asyncio
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from atroposlib.api.middleware import Pace

__all__ = [
    "EXTENSION",
    "Connection",
    "ObservedHttpProtocol",
    "WholeAnswers",
]

EXTENSION = "atroposlib.connection"
"""Key in the `extensions` of an ASGI scope for `{"connection": Connection}`."""

_FIRST_LOOK_S = 0.0005
_LAST_LOOK_S = 0.02


class Connection:
    """One connection to a client, as seen by the server.

    Args:
        transport: the transport that responses are written to.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unconfirmed_at_end: int | None = None

    @staticmethod
    def of(scope: Mapping[str, Any]) -> Connection | None:
        """Return the connection of a request; None under a server that does not provide it."""
        told = (scope.get("extensions") or {}).get(EXTENSION) or {}
        found: Connection | None = told.get("connection")
        return found

    def unconfirmed_bytes(self) -> int:
        """Bytes written and not yet confirmed by the client's machine."""
        if self._unconfirmed_at_end is not None:
            return self._unconfirmed_at_end
        return self._transport.get_write_buffer_size() + _send_queue_bytes(self._transport)

    def abort(self) -> None:
        """Close the connection at once; unsent bytes are lost."""
        self._transport.abort()

    def note_end(self) -> None:
        """Record how many bytes were unconfirmed when the client closed its side."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = self.unconfirmed_bytes()

    def note_failure(self) -> None:
        """Record that the connection broke: an unknown number of unread bytes is lost."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = sys.maxsize

    async def wait_until_confirmed(self, is_gone: Callable[[], bool]) -> bool:
        """Wait until the client's machine has confirmed every byte, or the client is gone.

        A client that closed its side without a reset after the last byte has received it too: a
        connection that is closed with unread bytes is reset.

        Returns:
            Whether everything arrived at the client's machine. Whether the client's program has
            read it is unknown.
        """
        wait_s = _FIRST_LOOK_S
        while self.unconfirmed_bytes() and not is_gone():
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_LOOK_S)
        return self.unconfirmed_bytes() == 0


def _send_queue_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's send queue; 0 on systems that do not report it."""
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


_LOOKS_PER_SILENCE = 4
_HEAD_BEGINS = b"HTTP/1.1 "


class WholeAnswers:
    """A transport that sends the headers of a response with the first bytes of its body.

    Saves one system call and one packet per response.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes; headers are held back until the next write or the next loop iteration."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(_HEAD_BEGINS):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """Bytes not yet passed to the kernel."""
        return len(self._head) + self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Flush held-back headers and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class ObservedHttpProtocol(HttpToolsProtocol):
    """Puts the `Connection` into the scope of every request it reads."""

    max_silence_s: ClassVar[float] = 60.0
    """Timeout for the headers of a request, and between two pieces of its body."""
    max_head_bytes: ClassVar[int] = 64 * 1024
    """Maximum size of request line and headers, unless they arrive in a single piece."""

    observed: Connection | None = None
    _head_bytes: int | None = None  # of the request whose headers are being read
    _has_begun = False  # headers, within the current piece
    _is_receiving = False  # a request has started and is not complete
    _pace: Pace  # of the body that is being received
    _looked_at = 0.0
    _begun_at = 0.0
    _waiting_since = 0.0
    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch for silence."""
        super().connection_made(WholeAnswers(transport, self.loop))  # type: ignore[arg-type]
        self._waiting_since = self._looked_at = self.loop.time()
        self._pace = Pace()
        self._look_for_silence()

    def data_received(self, data: bytes) -> None:
        """Parse data; reject headers above the size limit."""
        if self._head_bytes is None:
            self._waiting_since = self.loop.time()
        self._has_begun = False
        super().data_received(data)
        # A piece in which headers start may mostly consist of other requests.
        if self._head_bytes is not None and not self._has_begun:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Note that the headers of a request start."""
        super().on_message_begin()
        self._is_receiving = True
        self._has_begun = True
        self._begun_at = self.loop.time()
        self._head_bytes = 0
        self._pace = Pace()
        if self.observed is None:
            self.observed = Connection(self.transport)
        self.scope["extensions"] = {EXTENSION: {"connection": self.observed}}

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count received bytes of the body."""
        self._pace.add(0.0, len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._is_receiving = False
        super().on_message_complete()

    def eof_received(self) -> None:
        """Record that the client has closed its side, while the socket is still open."""
        if self.observed is not None:
            self.observed.note_end()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection broke."""
        if self._watch is not None:
            self._watch.cancel()
        if self.observed is not None:
            self.observed.note_failure()
        super().connection_lost(exc)

    def _look_for_silence(self) -> None:
        """Close the connection if the client was silent for too long; else check again later."""
        now = self.loop.time()
        is_idle = self.cycle is not None and not self._is_receiving
        if is_idle or self.flow.read_paused:
            self._waiting_since = now
        elif self._is_receiving:
            self._pace.add(now - max(self._looked_at, self._begun_at), 0)
        self._looked_at = now
        left_s = self.max_silence_s - (now - self._waiting_since)
        is_too_slow = self._is_receiving and self._head_bytes is None and self._pace.is_too_slow
        if left_s <= 0 or is_too_slow:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            # Often enough to notice pauses in which the service itself does not read.
            self._watch = self.loop.call_later(
                min(left_s, self.max_silence_s / _LOOKS_PER_SILENCE), self._look_for_silence
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

"""Tracks the bytes of a response on their way to the client, down to the kernel's send queue.

    response ── write ──► transport buffer ──► kernel's send queue ──► client's kernel ──► client
                          └────────── unconfirmed_bytes ─────────┘     └── not visible ──┘

A server that has access to its sockets puts a `Connection` into the ASGI scope, see
`http_protocol`. Under other servers, responses rely on ASGI, which ends at the transport buffer.
"""

from __future__ import annotations

import array
import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EXTENSION", "Connection"]

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

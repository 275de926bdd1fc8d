"""What is known of the bytes on their way to one client, down to the kernel's send queue.

    response ── write ──► transport buffer ──► kernel's send queue ──► client's kernel ──► client
                          └────────── unconfirmed_bytes ─────────┘     └─ cannot be seen ─┘

A server that knows its sockets puts a `Connection` into the ASGI scope, see `http_protocol`; under
another server responses go by what ASGI tells, which ends at the transport buffer.
"""

from __future__ import annotations

import array
import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EXTENSION", "Connection"]

EXTENSION = "atroposlib.connection"
"""Where the `extensions` of an ASGI scope have `{"connection": Connection}`."""

_FIRST_LOOK_S = 0.0005
_LAST_LOOK_S = 0.02


class Connection:
    """One connection to a client, as far as its server's side of it can tell.

    Args:
        transport: what the responses are written to.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unconfirmed_at_end: int | None = None

    @staticmethod
    def of(scope: Mapping[str, Any]) -> Connection | None:
        """Return the connection of a request; None under a server that does not tell."""
        told = (scope.get("extensions") or {}).get(EXTENSION) or {}
        found: Connection | None = told.get("connection")
        return found

    def unconfirmed_bytes(self) -> int:
        """Bytes written that the client's machine has not confirmed yet."""
        if self._unconfirmed_at_end is not None:
            return self._unconfirmed_at_end
        return self._transport.get_write_buffer_size() + _send_queue_bytes(self._transport)

    def abort(self) -> None:
        """End the connection at once; what was not sent yet is lost."""
        self._transport.abort()

    def note_end(self) -> None:
        """Remember how much was unconfirmed when the client closed its side; called once, then."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = self.unconfirmed_bytes()

    def note_failure(self) -> None:
        """Remember that the connection broke: what was unread is lost, however much that is."""
        if self._unconfirmed_at_end is None:
            self._unconfirmed_at_end = sys.maxsize

    async def wait_until_confirmed(self, is_gone: Callable[[], bool]) -> bool:
        """Wait until the client's machine has everything written so far, or the client is gone.

        A client that closed its side in good order after the last byte has it too: machines reset
        a connection that is closed with unread bytes.

        Returns:
            Whether everything arrived there. Whether the client's program has read it only the
            program could say.
        """
        wait_s = _FIRST_LOOK_S
        while self.unconfirmed_bytes() and not is_gone():
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_LOOK_S)
        return self.unconfirmed_bytes() == 0


def _send_queue_bytes(transport: asyncio.Transport) -> int:
    """Bytes the kernel holds until the other side confirms them; 0 where it does not tell."""
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

"""A connection that costs next to nothing: prepared bytes out, length-delimited answers in.

A general HTTP client would spend more time per request than the service does, and the benchmark
would measure the client.
"""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any

__all__ = ["Connection", "Reply", "request_bytes"]

_READ_BYTES = 1 << 20


class Reply:
    """One answer."""

    def __init__(self, status: int, head: bytes, body: memoryview) -> None:
        self.status = status
        self.head = head
        self.body = body

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(bytes(self.body))


def request_bytes(
    method: str, path: str, body: bytes = b"", media_type: str = "application/json", **headers: str
) -> bytes:
    """Write a whole request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines += [f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """A blocking keep-alive connection; not for use by several threads at once."""

    def __init__(self, port: int, *, timeout_s: float = 60.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_READ_BYTES)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def call(self, request: bytes) -> Reply:
        """Send a request and read its answer.

        Raises:
            ConnectionError: the server closed the connection, or answered without a length.
        """
        self._socket.sendall(request)
        held, head_end = 0, -1
        while head_end < 0:
            held += self._receive(held)
            head_end = self._buffer.find(b"\r\n\r\n", 0, held)
        head = bytes(self._buffer[:head_end])
        total = head_end + 4 + _content_length(head)
        if total > len(self._buffer):
            self._buffer.extend(bytes(total - len(self._buffer)))
        while held < total:
            held += self._receive(held)
        status = int(head.split(b" ", 2)[1])
        return Reply(status, head, memoryview(bytes(self._buffer[head_end + 4 : total])))

    def expect(self, request: bytes, status: int = 200) -> Reply:
        """Send a request; raise when the answer has another status."""
        reply = self.call(request)
        if reply.status != status:
            raise ConnectionError(f"answered {reply.status}: {bytes(reply.body)[:300]!r}")
        return reply

    def _receive(self, held: int) -> int:
        count = self._socket.recv_into(memoryview(self._buffer)[held:])
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    if b"transfer-encoding" in head.lower():
        raise ConnectionError("a chunked answer has no length; ask for one without compression")
    return 0

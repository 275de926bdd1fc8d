"""An HTTP client with minimal overhead, and loops that put a service under load.

Requests are prepared bytes, and responses have a length. A general HTTP client would spend more
time per request than the service, and the benchmark would measure the client.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = [
    "Connection",
    "Latencies",
    "Reply",
    "in_background",
    "post_for",
    "post_until",
    "probe",
    "request_bytes",
]

_READ_BYTES = 1 << 20
_CONNECTIONS = 4
_TIMEOUT_S = 60.0


class Reply(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes


def request_bytes(
    method: str, path: str, body: bytes = b"", media_type: str = "application/json", **headers: str
) -> bytes:
    """Return a complete request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines += [f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """A blocking keep-alive connection; not thread-safe."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_READ_BYTES)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(self, request: bytes) -> Reply:
        """Send a request and read its response.

        Raises:
            ConnectionError: The server closed the connection, or the response has no length.
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
        return Reply(int(head.split(b" ", 2)[1]), bytes(self._buffer[head_end + 4 : total]))

    def expect(self, request: bytes) -> Reply:
        """Send a request; raise ConnectionError unless the status is 200."""
        reply = self.call(request)
        if reply.status != 200:
            raise ConnectionError(f"status {reply.status}: {reply.body[:300]!r}")
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
        raise ConnectionError("a chunked response has no length; request it uncompressed")
    return 0


class Latencies:
    """Latencies of responses, from seconds."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._sorted = sorted(seconds)

    def __len__(self) -> int:
        return len(self._sorted)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile in milliseconds."""
        if not self._sorted:
            return float("nan")
        rank = min(len(self._sorted) - 1, int(len(self._sorted) * percent / 100))
        return self._sorted[rank] * 1000

    @property
    def max_ms(self) -> float:
        """Maximum in milliseconds."""
        return self._sorted[-1] * 1000 if self._sorted else float("nan")


def post_for(port: int, requests: Sequence[bytes], seconds: float) -> tuple[int, float]:
    """Post for some seconds over a few connections; return the count and the elapsed seconds."""
    deadline = time.perf_counter() + seconds
    return _post(port, requests, lambda _: time.perf_counter() < deadline)


def post_until(port: int, requests: Sequence[bytes], count: int) -> tuple[int, float]:
    """Post `count` requests over a few connections; return the count and the elapsed seconds."""
    return _post(port, requests, lambda number: number < count)


def _post(
    port: int, requests: Sequence[bytes], continues: Callable[[int], bool]
) -> tuple[int, float]:
    numbers = itertools.count()
    done: list[int] = []
    failures: list[Exception] = []

    def work() -> None:
        posted = 0
        try:
            with Connection(port) as connection:
                while continues(number := next(numbers)):
                    connection.expect(requests[number % len(requests)])
                    posted += 1
        except OSError as error:
            failures.append(error)
        done.append(posted)

    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(done), time.perf_counter() - started


def probe(port: int, request: bytes, *, pause_s: float, until: threading.Event) -> Latencies:
    """Repeat a request, with a pause between, until an event is set."""
    seconds = []
    with Connection(port) as connection:
        while not until.is_set():
            started = time.perf_counter()
            connection.expect(request)
            seconds.append(time.perf_counter() - started)
            time.sleep(pause_s)
    return Latencies(seconds)


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a loop in a thread while the block runs; the loop ends when its event is set."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()

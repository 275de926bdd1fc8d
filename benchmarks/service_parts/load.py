"""Loops that put a service under load and time its answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from service_parts.connection import Connection, request_bytes

__all__ = [
    "Latencies",
    "in_background",
    "post_for",
    "post_until",
    "probe",
    "status_env_request",
]

_CONNECTIONS = 4


class Latencies:
    """Seconds that answers took."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._sorted = sorted(seconds)

    def __len__(self) -> int:
        return len(self._sorted)

    def percentile_ms(self, percent: float) -> float:
        """Return the latency that `percent` of the answers stayed below, in milliseconds."""
        if not self._sorted:
            return float("nan")
        rank = min(len(self._sorted) - 1, int(len(self._sorted) * percent / 100))
        return self._sorted[rank] * 1000

    @property
    def max_ms(self) -> float:
        """The longest, in milliseconds."""
        return self._sorted[-1] * 1000 if self._sorted else float("nan")


def post_for(port: int, requests: Sequence[bytes], seconds: float) -> tuple[int, float]:
    """Post as fast as answers come, over a few connections; return the count and the seconds."""
    deadline = time.perf_counter() + seconds
    return _post(port, requests, lambda _: time.perf_counter() < deadline)


def post_until(port: int, requests: Sequence[bytes], count: int) -> tuple[int, float]:
    """Post `count` requests; return the count and the seconds it took."""
    return _post(port, requests, lambda number: number < count)


def _post(
    port: int, requests: Sequence[bytes], goes_on: Callable[[int], bool]
) -> tuple[int, float]:
    numbers = itertools.count()
    done: list[int] = []
    failures: list[Exception] = []

    def work() -> None:
        posted = 0
        try:
            with Connection(port) as connection:
                while goes_on(number := next(numbers)):
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
    """Send one request after another with a pause between, until told to stop."""
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
    """Run a loop in a thread while the block runs; the event tells it to stop."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def status_env_request(env_id: int) -> bytes:
    """Return the poll that every environment sends: a GET with a JSON body."""
    body = b'{"env_id": %d}' % env_id
    return request_bytes("GET", "/status-env", body)

"""The measurements of `benchmarks/service.py`, one function per row of its tables.

Each starts a service of its own, so that no figure depends on what was measured before.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from atroposlib.api.schemas import MAX_BATCH_SIZE
from atroposlib.wire import MEDIA_TYPES, Lane
from service_parts.connection import Connection, request_bytes
from service_parts.load import (
    Latencies,
    in_background,
    post_for,
    post_until,
    probe,
    status_env_request,
)
from service_parts.server_process import ServerProcess, run_api
from service_parts.workload import Shape, post_requests, registration_request

__all__ = [
    "Rate",
    "drain_rate",
    "ingest_rate",
    "large_batch",
    "polling_share",
    "request_rate",
    "resident_bytes_per_token",
    "status_latencies",
]

_POLLING_ENVS = 1000


class Rate(NamedTuple):
    """How much a service did, in wall-clock and in its own processor time."""

    per_s: float
    per_cpu_s: float


@contextmanager
def service(store: str, *, batch_size: int, num_envs: int = 1) -> Iterator[ServerProcess]:
    """Run a service with a registered trainer that asks for batches, and environments."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_api("--store", store, "--data-dir", folder) as server,
    ):
        with Connection(server.port) as connection:
            connection.expect(registration_request(batch_size))
            connection.expect(request_bytes("GET", "/batch"))
            for _ in range(num_envs):
                connection.expect(_env_registration())
        yield server


def _env_registration() -> bytes:
    request = {"max_token_length": 8192, "desired_name": "load", "weight": 1.0, "group_size": 8}
    return request_bytes("POST", "/register-env", json.dumps(request).encode())


def ingest_rate(store: str, lane: Lane, shape: Shape, *, seconds: float) -> Rate:
    """Post groups as fast as they are taken; tokens."""
    requests = post_requests(shape, lane)
    with service(store, batch_size=MAX_BATCH_SIZE) as server:
        post_for(server.port, requests, seconds / 5)
        used = server.cpu_s
        count, elapsed = post_for(server.port, requests, seconds)
        num_tokens = count * shape.num_tokens
        return Rate(num_tokens / elapsed, num_tokens / max(server.cpu_s - used, 0.01))


def drain_rate(store: str, lane: Lane, shape: Shape, *, num_tokens: int) -> Rate:
    """Fetch batches of 64 groups until the queue is empty; tokens."""
    count = max(64, num_tokens // shape.num_tokens // 64 * 64)
    with service(store, batch_size=64 * shape.trajectories) as server:
        post_until(server.port, post_requests(shape, lane), count)
        request = batch_request(lane)
        with Connection(server.port) as connection:
            used, started = server.cpu_s, time.perf_counter()
            batches = 0
            while connection.expect(request).body.nbytes > 100:
                batches += 1
            elapsed = time.perf_counter() - started
        if batches != count // 64:
            raise RuntimeError(f"{count} groups posted, {batches} batches of 64 came back")
        delivered = count * shape.num_tokens
        return Rate(delivered / elapsed, delivered / max(server.cpu_s - used, 0.01))


def batch_request(lane: Lane) -> bytes:
    """Return `GET /batch` for one lane, without compression."""
    return request_bytes("GET", "/batch", Accept=MEDIA_TYPES[lane], Accept_Encoding="identity")


def request_rate(store: str, *, seconds: float) -> dict[str, Rate]:
    """Send small requests as fast as they are answered; requests."""
    tiny = post_requests(Shape(1, 4), "json")
    kinds = {
        "GET /info": (request_bytes("GET", "/info"),),
        "GET /status-env": (status_env_request(0),),
        "POST /scored_data, 4 tokens": tiny,
    }
    rates = {}
    with service(store, batch_size=MAX_BATCH_SIZE) as server:
        for name, requests in kinds.items():
            used = server.cpu_s
            count, elapsed = post_for(server.port, requests, seconds)
            rates[name] = Rate(count / elapsed, count / max(server.cpu_s - used, 0.01))
    return rates


def status_latencies(store: str, queued: int, *, seconds: float) -> tuple[Latencies, float]:
    """Poll `/status-env` with `queued` groups waiting while one environment posts 8x1,024 groups.

    Returns:
        The latencies, and the tokens per second that were posted meanwhile.
    """
    with service(store, batch_size=MAX_BATCH_SIZE) as server:
        post_until(server.port, post_requests(Shape(1, 4), "msgpack"), queued)
        shape, posted = Shape(8, 1024), []
        requests = post_requests(shape, "msgpack")

        def ingest(stop: threading.Event) -> None:
            with Connection(server.port) as connection:
                while not stop.is_set():
                    connection.expect(requests[len(posted) % len(requests)])
                    posted.append(shape.num_tokens)

        stop = threading.Event()
        timer = threading.Timer(seconds, stop.set)
        with in_background(ingest):
            timer.start()
            latencies = probe(server.port, status_env_request(0), pause_s=0.002, until=stop)
        return latencies, sum(posted) / seconds


def large_batch(store: str, lane: Lane) -> dict[str, Any]:
    """Serve one batch of 512 sequences of 4,096 tokens, and time other requests meanwhile."""
    shape, rounds = Shape(8, 4096), 3
    with service(store, batch_size=512) as server:
        post_until(server.port, post_requests(shape, lane), 64 * rounds)
        baseline = _probe_for(server, 1.0)
        used, started = server.cpu_s, time.perf_counter()
        stop, taken = threading.Event(), []

        def fetch() -> None:
            with Connection(server.port) as connection:
                for _ in range(rounds):
                    taken.append(connection.expect(batch_request(lane)).body.nbytes)
            stop.set()

        fetcher = threading.Thread(target=fetch)
        fetcher.start()
        others = probe(server.port, request_bytes("GET", "/info"), pause_s=0.001, until=stop)
        fetcher.join()
        return {
            "megabytes": taken[0] / 1e6,
            "wall_ms": (time.perf_counter() - started) * 1000 / rounds,
            "cpu_ms": (server.cpu_s - used) * 1000 / rounds,
            "others_max_ms": others.max_ms,
            "idle_max_ms": baseline.max_ms,
        }


def _probe_for(server: ServerProcess, seconds: float) -> Latencies:
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return probe(server.port, request_bytes("GET", "/info"), pause_s=0.001, until=stop)


def resident_bytes_per_token(store: str, lane: Lane, *, num_tokens: int) -> float:
    """Queue many groups and see what the process holds per token, beyond its working buffers."""
    shape = Shape(8, 1024)
    requests = post_requests(shape, lane)
    with service(store, batch_size=MAX_BATCH_SIZE) as server:
        post_until(server.port, requests, 1000)
        before = server.resident_bytes
        count = num_tokens // shape.num_tokens
        post_until(server.port, requests, count)
        time.sleep(1.0)
        return (server.resident_bytes - before) / (count * shape.num_tokens)


def polling_share(store: str, *, seconds: float) -> tuple[float, Latencies]:
    """Let 1,000 environments poll once a second; return the share of a core, and latencies."""
    with service(store, batch_size=MAX_BATCH_SIZE, num_envs=_POLLING_ENVS) as server:
        requests = [status_env_request(env_id) for env_id in range(_POLLING_ENVS)]
        latencies, used, started = [], server.cpu_s, time.perf_counter()
        connections = [Connection(server.port) for _ in range(50)]
        for number in range(int(_POLLING_ENVS * seconds)):
            due = started + number / _POLLING_ENVS
            time.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            connections[number % 50].expect(requests[number % _POLLING_ENVS])
            latencies.append(time.perf_counter() - sent)
        share = (server.cpu_s - used) / (time.perf_counter() - started)
        for connection in connections:
            connection.close()
        return share, Latencies(latencies)

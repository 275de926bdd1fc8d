"""Measure the trajectory service on one core: throughput, latency and memory, against baselines.

The server is pinned to one core, the load to another. Each figure is shown with its target and with
a baseline measured in the same run. Each measurement starts a new service, so that no figure
depends on an earlier one.

Usage: python benchmarks/service.py [--store sqlite] [--seconds 3] [--only ingest ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from atroposlib.api.schemas import MAX_BATCH_SIZE
from atroposlib.wire import MEDIA_TYPES, WireFormat
from service_parts.connection import (
    Connection,
    Latencies,
    in_background,
    post_for,
    post_until,
    probe,
    request_bytes,
)
from service_parts.server_process import ServerProcess, bare_server, run_api, use_load_core
from service_parts.workload import (
    Shape,
    TypedGroup,
    bytes_per_token,
    post_requests,
    register_trainer,
)

SMALL, LARGE = Shape(8, 1024), Shape(8, 4096)
SHAPES = (SMALL, LARGE, SMALL._replace(has_logprobs=True), LARGE._replace(has_logprobs=True))
FORMATS: tuple[WireFormat, ...] = ("json", "msgpack")
INGEST_TARGETS = {"json": 5e6, "msgpack": 25e6}
DRAIN_TARGETS = {"json": 20e6, "msgpack": 60e6}
DRAINED_TOKENS = 16_000_000
QUEUED_TOKENS = 64_000_000
POLLING_ENVS = 1000


class Options(NamedTuple):
    """Store to measure, and length of each measurement in seconds."""

    store: str
    seconds: float


class Row(NamedTuple):
    """One row of the table."""

    name: str
    value: str
    target: str
    is_met: bool | None
    """None without a target."""
    baseline: str


class Rate(NamedTuple):
    """Throughput per second of time, and per second of the server's processor time."""

    per_s: float
    per_cpu_s: float

    def __str__(self) -> str:
        return f"{self.per_s / 1e6:.1f} M tokens/s ({self.per_cpu_s / 1e6:.1f} M per CPU s)"


class Meter:
    """Time and the processor time of a server since its creation."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._cpu_s, self._started = server.cpu_s, time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Elapsed time in seconds."""
        return time.perf_counter() - self._started

    @property
    def cpu_s(self) -> float:
        """Processor time of the server in seconds, at least one tick."""
        return max(self._server.cpu_s - self._cpu_s, 0.01)

    def rate(self, count: int, elapsed_s: float | None = None) -> Rate:
        """Return the rate of `count` events."""
        return Rate(count / (elapsed_s or self.elapsed_s), count / self.cpu_s)


@contextmanager
def service(store: str, *, batch_size: int, num_envs: int = 1) -> Iterator[ServerProcess]:
    """Run a service with a registered trainer and environments."""
    env = {"max_token_length": 8192, "desired_name": "load", "weight": 1.0, "group_size": 8}
    registration = request_bytes("POST", "/register-env", json.dumps(env).encode())
    with (
        tempfile.TemporaryDirectory() as folder,
        run_api("--store", store, "--data-dir", folder) as server,
    ):
        with Connection(server.port) as connection:
            register_trainer(connection, batch_size)
            for _ in range(num_envs):
                connection.expect(registration)
        yield server


def batch_request(body_format: WireFormat) -> bytes:
    """Return an uncompressed `GET /batch` in a format."""
    return request_bytes(
        "GET", "/batch", Accept=MEDIA_TYPES[body_format], Accept_Encoding="identity"
    )


def status_env_request(env_id: int) -> bytes:
    """Return the request with which environments poll: a GET with a JSON body."""
    return request_bytes("GET", "/status-env", b'{"env_id": %d}' % env_id)


def repeats_per_s(work: Callable[[int], Any], seconds: float) -> float:
    """Call a function with increasing numbers; return calls per second."""
    work(0)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        work(count)
        count += 1
    return count / elapsed


def memcpy_bytes_per_s() -> float:
    """Return the speed of copying blocks of 16 MiB."""
    source, target = bytes(1 << 24), memoryview(bytearray(1 << 24))

    def copy(_: int) -> None:
        target[:] = source

    return len(source) * repeats_per_s(copy, 0.5)


def bare_post_rate(requests: tuple[bytes, ...], seconds: float) -> float:
    """Return posts per second to the same HTTP server with an empty application."""
    with bare_server() as server:
        count, elapsed = post_for(server.port, requests, seconds)
    return count / elapsed


def ingest(options: Options) -> list[Row]:
    """Tokens received per second, compared with decoding alone and an empty server."""
    rows = []
    for body_format in FORMATS:
        for shape in SHAPES:
            requests = post_requests(shape, body_format)
            with service(options.store, batch_size=MAX_BATCH_SIZE) as server:
                post_for(server.port, requests, options.seconds / 5)
                meter = Meter(server)
                count, elapsed = post_for(server.port, requests, options.seconds)
                rate = meter.rate(count * shape.num_tokens, elapsed)
            transport = shape.num_tokens * bare_post_rate(requests, options.seconds / 2)
            baseline = f"{rate.per_s / transport:.0%} of an empty server ({transport / 1e6:.1f} M)"
            target = f">= {INGEST_TARGETS[body_format] / 1e6:.0f} M/s"
            is_met = rate.per_s >= INGEST_TARGETS[body_format]
            if body_format == "json":
                decode = decode_rate(shape)
                share = f"{rate.per_s / decode:.0%} of msgspec alone ({decode / 1e6:.1f} M)"
                baseline = f"{share}; {baseline}"
                target += ", >= 50% of msgspec"
                is_met = is_met and rate.per_s >= 0.5 * decode
            rows.append(Row(f"ingest {body_format} {shape}", str(rate), target, is_met, baseline))
    return rows


def decode_rate(shape: Shape) -> float:
    """Return tokens per second of decoding JSON groups with typed msgspec only."""
    bodies = [r.partition(b"\r\n\r\n")[2] for r in post_requests(shape, "json")]
    decoder = msgspec.json.Decoder(TypedGroup)
    return shape.num_tokens * repeats_per_s(lambda i: decoder.decode(bodies[i % len(bodies)]), 1.0)


def drain(options: Options) -> list[Row]:
    """Tokens delivered per second, in the format in which they were posted."""
    copied = memcpy_bytes_per_s()
    rows = []
    for body_format in FORMATS:
        for shape in SHAPES:
            rate = drain_rate(options.store, body_format, shape)
            target = DRAIN_TARGETS[body_format]
            sent = rate.per_s * bytes_per_token(shape, body_format)
            baseline = f"{sent / copied:.1%} of memcpy ({copied / 1e9:.1f} GB/s)"
            goal, is_met = f">= {target / 1e6:.0f} M/s", rate.per_s >= target
            rows.append(Row(f"drain {body_format} {shape}", str(rate), goal, is_met, baseline))
    return rows


def drain_rate(store: str, body_format: WireFormat, shape: Shape) -> Rate:
    """Return the rate of tokens while batches of 64 groups are fetched until the queue is empty."""
    count = max(64, DRAINED_TOKENS // shape.num_tokens // 64 * 64)
    with service(store, batch_size=64 * shape.trajectories) as server:
        post_until(server.port, post_requests(shape, body_format), count)
        request, batches = batch_request(body_format), 0
        with Connection(server.port) as connection:
            meter = Meter(server)
            while len(connection.expect(request).body) > 100:
                batches += 1
            rate = meter.rate(count * shape.num_tokens)
    if batches != count // 64:
        raise RuntimeError(f"{count} groups were posted, {batches} batches of 64 were delivered")
    return rate


def requests(options: Options) -> list[Row]:
    """Small requests per second."""
    empty = bare_post_rate((request_bytes("POST", "/"),), options.seconds / 2)
    kinds = {
        "GET /info": (request_bytes("GET", "/info"),),
        "GET /status-env": (status_env_request(0),),
        "POST /scored_data, 4 tokens": post_requests(Shape(1, 4), "json"),
    }
    rows = []
    with service(options.store, batch_size=MAX_BATCH_SIZE) as server:
        for name, each in kinds.items():
            count, elapsed = post_for(server.port, each, options.seconds)
            per_s = count / elapsed
            baseline = f"{per_s / empty:.0%} of an empty POST ({empty:,.0f}/s)"
            rows.append(Row(name, f"{per_s:,.0f}/s", "", None, baseline))
    return rows


def status(options: Options) -> list[Row]:
    """Latency of `/status-env` while an environment posts groups, by length of the queue."""
    rows = []
    for queued in (100, 10_000, 100_000):
        seen, posted = status_latencies(options, queued)
        p99 = seen.percentile_ms(99)
        value = f"p50 {seen.percentile_ms(50):.2f} ms, p99 {p99:.2f} ms"
        baseline = f"{len(seen)} polls, {posted / 1e6:.1f} M tokens/s posted"
        name = f"/status-env, {queued:,} queued"
        rows.append(Row(name, value, "p99 < 5 ms, flat", p99 < 5, baseline))
    return rows


def status_latencies(options: Options, queued: int) -> tuple[Latencies, float]:
    """Return the latencies, and the tokens per second that were posted meanwhile."""
    posted: list[int] = []
    groups = post_requests(SMALL, "msgpack")
    with service(options.store, batch_size=MAX_BATCH_SIZE) as server:
        post_until(server.port, post_requests(Shape(1, 4), "msgpack"), queued)

        def post(stop: threading.Event) -> None:
            with Connection(server.port) as connection:
                while not stop.is_set():
                    connection.expect(groups[len(posted) % len(groups)])
                    posted.append(SMALL.num_tokens)

        with in_background(post):
            latencies = probe_for(server, status_env_request(0), options.seconds, pause_s=0.002)
    return latencies, sum(posted) / options.seconds


def probe_for(
    server: ServerProcess, request: bytes, seconds: float, *, pause_s: float = 0.001
) -> Latencies:
    """Return the latencies of a request that is repeated for some seconds."""
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return probe(server.port, request, pause_s=pause_s, until=stop)


def large_batch(options: Options) -> list[Row]:
    """One batch of 512 sequences of 4,096 tokens, and its effect on other requests."""
    rows, info, rounds = [], request_bytes("GET", "/info"), 3
    for body_format in FORMATS:
        with service(options.store, batch_size=512) as server:
            post_until(server.port, post_requests(LARGE, body_format), 64 * rounds)
            idle = probe_for(server, info, 1.0)
            meter, stop, sizes = Meter(server), threading.Event(), list[int]()

            def fetch(
                port: int, body_format: WireFormat, stop: threading.Event, sizes: list[int]
            ) -> None:
                with Connection(port) as connection:
                    for _ in range(rounds):
                        sizes.append(len(connection.expect(batch_request(body_format)).body))
                stop.set()

            fetcher = threading.Thread(target=fetch, args=(server.port, body_format, stop, sizes))
            fetcher.start()
            others = probe(server.port, info, pause_s=0.001, until=stop)
            fetcher.join()
            wall_ms, cpu_ms = (1000 * s / rounds for s in (meter.elapsed_s, meter.cpu_s))
        name = f"batch 512x4,096 {body_format} ({sizes[0] / 1e6:.0f} MB)"
        value = f"{cpu_ms:.0f} ms of CPU, {wall_ms:.0f} ms elapsed"
        rows.append(Row(name, value, "< 100 ms", cpu_ms < 100, ""))
        baseline, is_met = f"idle server: {idle.max_ms:.1f} ms", others.max_ms < 10
        value = f"{others.max_ms:.1f} ms"
        rows.append(Row("  other requests, maximum", value, "< 10 ms", is_met, baseline))
    return rows


def memory(options: Options) -> list[Row]:
    """Resident memory per queued token, without the working buffers of the server."""
    rows = []
    for body_format in FORMATS:
        groups, count = post_requests(SMALL, body_format), QUEUED_TOKENS // SMALL.num_tokens
        with service(options.store, batch_size=MAX_BATCH_SIZE) as server:
            post_until(server.port, groups, 1000)
            before = server.resident_bytes
            post_until(server.port, groups, count)
            time.sleep(1.0)
            held = (server.resident_bytes - before) / (count * SMALL.num_tokens)
        value = f"{held:.3f} bytes/token"
        rows.append(Row(f"resident, {body_format}", value, "<= 1 (sqlite)", held <= 1, ""))
    return rows


def polling(options: Options) -> list[Row]:
    """Processor time for a thousand environments that poll once a second."""
    with service(options.store, batch_size=MAX_BATCH_SIZE, num_envs=POLLING_ENVS) as server:
        polls = [status_env_request(env_id) for env_id in range(POLLING_ENVS)]
        connections = [Connection(server.port) for _ in range(50)]
        latencies, meter, started = [], Meter(server), time.perf_counter()
        for number in range(int(POLLING_ENVS * 2 * options.seconds)):
            time.sleep(max(0.0, started + number / POLLING_ENVS - time.perf_counter()))
            sent = time.perf_counter()
            connections[number % 50].expect(polls[number % POLLING_ENVS])
            latencies.append(time.perf_counter() - sent)
        share = meter.cpu_s / meter.elapsed_s
        for connection in connections:
            connection.close()
    value = f"{share:.0%} of a core, p99 {Latencies(latencies).percentile_ms(99):.2f} ms"
    return [Row("1,000 environments polling", value, "< 25%", share < 0.25, "")]


SECTIONS: dict[str, Callable[[Options], list[Row]]] = {
    "ingest": ingest,
    "drain": drain,
    "requests": requests,
    "status": status,
    "batch": large_batch,
    "memory": memory,
    "polling": polling,
}


def main() -> None:
    """Run the selected sections and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="sqlite", help="memory, sqlite or redis://...")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    use_load_core()
    console = Console(width=160)
    table = Table(f"store: {arguments.store}", "measured", "target", "met", "baseline")
    rows: list[Row] = []
    for name in arguments.only:
        console.print(f"measuring {name} ...", style="dim")
        for row in SECTIONS[name](Options(arguments.store, arguments.seconds)):
            rows.append(row)
            met = "" if row.is_met is None else ("yes" if row.is_met else "NO")
            table.add_row(row.name, row.value, row.target, met, row.baseline)
            console.print(f"  {row.name}: {row.value}", style="dim")
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([r._asdict() for r in rows], indent=2))


if __name__ == "__main__":
    main()

"""Measure the trajectory service on one core: tokens in, tokens out, latency, memory, floors.

The server is pinned to one core, the load to another. Every figure stands beside its target and
beside a floor measured in the same run.

Usage: python benchmarks/service.py [--store sqlite] [--seconds 3] [--only ingest ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.wire import Lane
from service_parts import floors, measures
from service_parts.server_process import use_load_core
from service_parts.workload import Shape, bytes_per_token

SMALL, LARGE = Shape(8, 1024), Shape(8, 4096)
SHAPES = (SMALL, LARGE, SMALL._replace(has_logprobs=True), LARGE._replace(has_logprobs=True))
LANES: tuple[Lane, ...] = ("json", "msgpack")
INGEST_TARGETS = {"json": 5e6, "msgpack": 25e6}
DRAIN_TARGETS = {"json": 20e6, "msgpack": 60e6}
DRAINED_TOKENS = 16_000_000
QUEUED_TOKENS = 64_000_000


class Options(NamedTuple):
    """What to measure, and for how long."""

    store: str
    seconds: float


class Row(NamedTuple):
    """One figure."""

    what: str
    value: str
    target: str
    is_met: bool | None
    """None: there is no target."""
    floor: str


def ingest(options: Options) -> list[Row]:
    """Tokens per second that the service takes, against decoding alone and an empty server."""
    rows = []
    for lane in LANES:
        for shape in SHAPES:
            rate = measures.ingest_rate(options.store, lane, shape, seconds=options.seconds)
            transport = floors.transport_rate(shape, lane, seconds=options.seconds / 2)
            floor = f"{rate.per_s / transport:.0%} of an empty server ({transport / 1e6:.1f} M)"
            is_met = rate.per_s >= INGEST_TARGETS[lane]
            if lane == "json":
                decode = floors.decode_rate(shape, seconds=1.0)
                msgspec_floor = f"{rate.per_s / decode:.0%} of msgspec alone ({decode / 1e6:.1f} M)"
                floor = f"{msgspec_floor}; {floor}"
                is_met = is_met and rate.per_s >= 0.5 * decode
            target = f">= {INGEST_TARGETS[lane] / 1e6:.0f} M/s"
            target += ", >= 50% of msgspec" if lane == "json" else ""
            value = f"{rate.per_s / 1e6:.1f} M tokens/s ({rate.per_cpu_s / 1e6:.1f} M per CPU s)"
            rows.append(Row(f"ingest {lane} {shape}", value, target, is_met, floor))
    return rows


def drain(options: Options) -> list[Row]:
    """Tokens per second that a trainer gets, in the lane in which they came."""
    copied = floors.memcpy_bytes_per_s(seconds=0.5)
    rows = []
    for lane in LANES:
        for shape in SHAPES:
            rate = measures.drain_rate(options.store, lane, shape, num_tokens=DRAINED_TOKENS)
            target = DRAIN_TARGETS[lane]
            value = f"{rate.per_s / 1e6:.1f} M tokens/s ({rate.per_cpu_s / 1e6:.1f} M per CPU s)"
            what, goal = f"drain {lane} {shape}", f">= {target / 1e6:.0f} M/s"
            sent = rate.per_s * bytes_per_token(shape, lane)
            floor = f"{sent / copied:.1%} of memcpy ({copied / 1e9:.1f} GB/s)"
            rows.append(Row(what, value, goal, rate.per_s >= target, floor))
    return rows


def requests(options: Options) -> list[Row]:
    """Small requests per second."""
    empty = floors.empty_post_rate(seconds=options.seconds / 2)
    rates = measures.request_rate(options.store, seconds=options.seconds)
    floor = "{:.0%} of an empty POST" + f" ({empty:,.0f}/s)"
    return [
        Row(name, f"{rate.per_s:,.0f}/s", "", None, floor.format(rate.per_s / empty))
        for name, rate in rates.items()
    ]


def status(options: Options) -> list[Row]:
    """Latency of `/status-env` while groups arrive, by length of the queue."""
    rows = []
    for queued in (100, 10_000, 100_000):
        seen, ingested = measures.status_latencies(options.store, queued, seconds=options.seconds)
        p99 = seen.percentile_ms(99)
        value = f"p50 {seen.percentile_ms(50):.2f} ms, p99 {p99:.2f} ms"
        floor = f"{len(seen)} polls, {ingested / 1e6:.1f} M tokens/s arriving"
        what = f"/status-env, {queued:,} queued"
        rows.append(Row(what, value, "p99 < 5 ms, flat", p99 < 5, floor))
    return rows


def large_batch(options: Options) -> list[Row]:
    """One batch of 512 sequences of 4,096 tokens, and what others notice of it."""
    rows = []
    for lane in LANES:
        figures = measures.large_batch(options.store, lane)
        what = f"batch 512x4,096 {lane} ({figures['megabytes']:.0f} MB)"
        value = f"{figures['cpu_ms']:.0f} ms of CPU, {figures['wall_ms']:.0f} ms in all"
        rows.append(Row(what, value, "< 100 ms", figures["cpu_ms"] < 100, ""))
        delay, idle = figures["others_max_ms"], figures["idle_max_ms"]
        floor = f"idle server: {idle:.1f} ms"
        rows.append(
            Row("  others meanwhile, worst", f"{delay:.1f} ms", "< 10 ms", delay < 10, floor)
        )
    return rows


def memory(options: Options) -> list[Row]:
    """Resident memory per queued token."""
    rows = []
    for lane in LANES:
        held = measures.resident_bytes_per_token(options.store, lane, num_tokens=QUEUED_TOKENS)
        value = f"{held:.3f} bytes/token"
        rows.append(Row(f"resident, {lane}", value, "<= 1 (sqlite)", held <= 1, ""))
    return rows


def polling(options: Options) -> list[Row]:
    """What a thousand environments that poll once a second cost."""
    share, seen = measures.polling_share(options.store, seconds=2 * options.seconds)
    value = f"{share:.0%} of a core, p99 {seen.percentile_ms(99):.2f} ms"
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
    """Run the sections asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="sqlite", help="memory, sqlite or redis://...")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    use_load_core()
    console = Console(width=160)
    table = Table(f"store: {arguments.store}", "measured", "target", "met", "floor")
    rows: list[Row] = []
    for name in arguments.only:
        console.print(f"measuring {name} ...", style="dim")
        for row in SECTIONS[name](Options(arguments.store, arguments.seconds)):
            rows.append(row)
            met = "" if row.is_met is None else ("yes" if row.is_met else "NO")
            table.add_row(row.what, row.value, row.target, met, row.floor)
            console.print(f"  {row.what}: {row.value}", style="dim")
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([r._asdict() for r in rows], indent=2))


if __name__ == "__main__":
    main()

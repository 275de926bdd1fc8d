"""Measure the SQLite store of a run in one process: appends, reads of a batch, and memory.

Usage: python benchmarks/stores.py [--data-dir DIR] [--megabytes 400] [--fsync] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.api.store.base import Payload, RunStore
from atroposlib.api.store.open import open_store

GROUPS_PER_BATCH = 64
RECORD = b"r" * 120
MAX_TINY_GROUPS = 40_000


class Load(NamedTuple):
    """Size of the groups, and number of concurrent writers."""

    payload_bytes: int
    num_posting: int


LOADS = (Load(300, 1), Load(300, 64), Load(33_000, 16), Load(135_000, 16), Load(270_000, 16))


class Row(NamedTuple):
    """Results under one load."""

    payload_bytes: int
    num_posting: int
    groups_per_s: float
    megabytes_per_s: float
    megabytes_per_cpu_s: float
    append_p50_ms: float
    append_p99_ms: float
    fetch_batch_ms: float
    resident_growth_megabytes: float


async def post(store: RunStore, numbers: Iterator[int], content: bytes) -> list[float]:
    """Append a group per number; return the duration of each in seconds."""
    seconds: list[float] = []
    for _ in numbers:
        (group_id,) = await store.new_group_ids(1)
        began = time.perf_counter()
        await store.append(RECORD, [Payload(group_id, content)])
        seconds.append(time.perf_counter() - began)
    return seconds


async def measure(load: Load, options: argparse.Namespace, folder: Path) -> Row:
    """Fill a new store under one load, and fetch a batch."""
    store = open_store("sqlite", data_dir=folder, run_name="benchmark", fsync=options.fsync)
    await store.open(lambda position, record: None, lambda snapshot: None)
    num_groups = min(options.megabytes * 1_000_000 // load.payload_bytes, MAX_TINY_GROUPS)
    numbers, content = iter(range(num_groups)), os.urandom(load.payload_bytes)
    resident, cpu, began = resident_megabytes(), time.process_time(), time.perf_counter()
    lists = await asyncio.gather(*[post(store, numbers, content) for _ in range(load.num_posting)])
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    growth = resident_megabytes() - resident
    began = time.perf_counter()
    await store.fetch(range(min(num_groups, GROUPS_PER_BATCH)))
    fetch_s = time.perf_counter() - began
    await store.close()
    seconds = sorted(second for part in lists for second in part)
    megabytes = num_groups * load.payload_bytes / 1e6
    return Row(
        payload_bytes=load.payload_bytes,
        num_posting=load.num_posting,
        groups_per_s=num_groups / elapsed,
        megabytes_per_s=megabytes / elapsed,
        megabytes_per_cpu_s=megabytes / cpu,
        append_p50_ms=seconds[num_groups // 2] * 1e3,
        append_p99_ms=seconds[num_groups * 99 // 100] * 1e3,
        fetch_batch_ms=fetch_s * 1e3,
        resident_growth_megabytes=growth,
    )


def resident_megabytes() -> float:
    """Return the resident memory of this process on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def show(rows: Sequence[Row]) -> None:
    """Print one row per load."""
    table = Table(title=f"SQLite store of a run; a batch is {GROUPS_PER_BATCH} groups")
    for name in Row._fields:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*[f"{value:,.4g}" for value in row])
    Console(width=160).print(table)


def main() -> None:
    """Measure the store under every load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, help="directory on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=400, help="total payload per load")
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at every commit")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for load in LOADS:
        with tempfile.TemporaryDirectory(dir=options.data_dir) as folder:
            rows.append(asyncio.run(measure(load, options, Path(folder))))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()

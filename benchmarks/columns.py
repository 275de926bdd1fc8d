"""Measure opaque columns from the environment to the trainer, compared with JSON and memcpy.

Usage: python benchmarks/columns.py [--seconds 1] [--json FILE]

A group has 8 trajectories of 2,048 tokens and one column: the experts of 48 layers with 8 each, as
`u1` (6.3 MB), or a hidden state of 512 numbers as the bits of bfloat16, `u2` (16.8 MB). Figures are
gigabytes of column data per second on one core, of the fastest of repeated calls:

    encode     the environment's client writes the body of the request
    admit      the service reads and checks it
    store      the service keeps the payload in memory, and fetches it for delivery
    deliver    the service writes the body of the response
    decode     the trainer's client reads it; its columns are arrays

`encode + decode` is one group through encode, admit and decode, in one buffer. `with bodies` also
copies the payload into the body of a response; new memory for both then costs more than all else,
unless the allocator keeps it: compare with `writing to new memory`. The same in JSON, from nested
lists to nested lists, is measured with an eighth of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atroposlib.api.store.base import MemoryRunStore, Payload
from atroposlib.wire import (
    StoredPayload,
    WireFormat,
    batch_pieces,
    decode_batch,
    decode_group,
    encode_group,
)
from atroposlib.wire.binary_format import read_blob

NUM_TRAJECTORIES = 8
NUM_TOKENS = 2048


class ColumnCase(NamedTuple):
    """A column to measure."""

    name: str
    dtype: str
    shape: tuple[int, ...]


CASES = (
    ColumnCase("routed experts, [G][L][48][8] u1", "u1", (48, 8)),
    ColumnCase("hidden state, [G][L][512] u2", "u2", (512,)),
    ColumnCase("token weights, [G][L] f4", "f4", ()),
)


class Stage(NamedTuple):
    """One row of the table."""

    name: str
    gigabytes_per_s: float


def group_with_column(case: ColumnCase, num_tokens: int) -> dict[str, Any]:
    """Return a group with one column of random numbers."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**15, (NUM_TRAJECTORIES, num_tokens)).tolist()
    column = rng.integers(0, 128, (NUM_TRAJECTORIES, num_tokens, *case.shape)).astype(case.dtype)
    return {
        "tokens": tokens,
        "masks": tokens,
        "scores": [0.0] * NUM_TRAJECTORIES,
        "columns": {"column": list(column)},
    }


def column_bytes(group: dict[str, Any]) -> int:
    """Return the size of the column as arrays."""
    return sum(np.asarray(row).nbytes for row in group["columns"]["column"])


def fastest_s(call: Callable[[], Any], seconds: float) -> float:
    """Return the seconds of the fastest of repeated calls, at least three."""
    fastest, num_calls, until = float("inf"), 0, time.perf_counter() + seconds
    while num_calls < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - started)
        num_calls += 1
    return fastest


def through_store(loop: asyncio.AbstractEventLoop, payload: bytes) -> bytes:
    """Append one payload to a run in memory, and fetch it."""

    async def keep() -> bytes:
        store = MemoryRunStore()
        await store.open(lambda *_: None, lambda _: None)
        (group_id,) = await store.new_group_ids(1)
        await store.append(b"group", [Payload(group_id, payload)])
        (content,) = await store.fetch([group_id])
        await store.close()
        return content

    return loop.run_until_complete(keep())


def measure(group: dict[str, Any], wire_format: WireFormat, seconds: float) -> list[Stage]:
    """Measure every stage, and all of them one after another."""
    loop = asyncio.new_event_loop()
    body = encode_group(group, wire_format)
    stored = StoredPayload(wire_format, decode_group(body, wire_format).payload)
    response = b"".join(batch_pieces([stored], wire_format))

    def read(payload: bytes) -> Any:
        if wire_format == "json":
            return msgspec.json.decode(payload)
        return read_blob(payload, as_arrays=True)

    def admitted() -> bytes:
        return decode_group(encode_group(group, wire_format), wire_format).payload

    def with_bodies() -> Any:
        kept = StoredPayload(wire_format, through_store(loop, admitted()))
        return decode_batch(b"".join(batch_pieces([kept], wire_format)), wire_format)

    calls: list[tuple[str, Callable[[], Any]]] = [
        ("encode", lambda: encode_group(group, wire_format)),
        ("admit", lambda: decode_group(body, wire_format)),
        ("store", lambda: through_store(loop, stored.content)),
        ("deliver", lambda: b"".join(batch_pieces([stored], wire_format))),
        ("decode", lambda: decode_batch(response, wire_format, as_arrays=True)),
        ("encode + decode", lambda: read(admitted())),
        ("with bodies", with_bodies),
    ]
    num_bytes = column_bytes(group)
    stages = [Stage(name, num_bytes / fastest_s(call, seconds) / 1e9) for name, call in calls]
    loop.close()
    return stages


def main() -> None:
    """Print one table per column."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    tables: dict[str, Any] = {}
    # Beyond 32 MiB, the allocator returns memory to the system at once.
    new_memory = 2**26 / fastest_s(np.ones(2**26, "u1").tobytes, options.seconds) / 1e9
    print(f"writing to new memory: {new_memory:.2f} GB/s")
    for case in CASES:
        group = group_with_column(case, NUM_TOKENS)
        copied = np.zeros(column_bytes(group), dtype="u1")
        memcpy = column_bytes(group) / fastest_s(copied.tobytes, options.seconds) / 1e9
        as_text = group_with_column(case, NUM_TOKENS // 8)
        columns = as_text["columns"]
        lists = {
            "columns": {name: [row.tolist() for row in rows] for name, rows in columns.items()}
        }
        num_bytes = column_bytes(as_text)
        text = {
            stage.name: stage.gigabytes_per_s
            for stage in measure_text({**as_text, **lists}, num_bytes, options.seconds)
        }
        print(f"{case.name}: {column_bytes(group) / 1e6:.1f} MB, memcpy {memcpy:.1f} GB/s")
        rows = []
        for name, speed in measure(group, "msgpack", options.seconds):
            rows.append((name, speed, text[name], speed / text[name]))
            print(
                f"  {name:16} {speed:8.2f} GB/s, JSON {text[name]:7.4f}: {rows[-1][3]:7.0f} times"
            )
        tables[case.name] = {"memcpy": memcpy, "stages": rows}
    if options.json:
        options.json.write_bytes(msgspec.json.encode(tables))


def measure_text(group: dict[str, Any], num_bytes: int, seconds: float) -> list[Stage]:
    """Measure JSON, in bytes that the same numbers take in the binary format."""
    factor = num_bytes / column_bytes(group)
    return [
        Stage(name, speed * factor) for name, speed in measure(group, "json", min(seconds, 0.2))
    ]


if __name__ == "__main__":
    main()

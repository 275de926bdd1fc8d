"""Measure the codecs of groups in both formats, compared with msgspec alone and memcpy.

Usage: python benchmarks/wire.py [--seconds 0.5] [--json FILE]

Each figure is the fastest of repeated calls on one core, in millions of tokens per second. The
baseline of JSON is msgspec decoding the same bytes into typed lists; that of the binary format is
one copy of the bytes. Ratios are relative to the baseline of the same format.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atroposlib.wire import (
    StoredPayload,
    batch_pieces,
    convert_payload,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
)
from service_parts.workload import Shape, TypedGroup, group_of


class Figure(NamedTuple):
    """One row of the table."""

    name: str
    mtokens_per_s: float
    ratio: float


class Stopwatch(NamedTuple):
    """Measures calls that process groups of one size."""

    num_tokens: int
    seconds: float

    def speed(self, call: Callable[[], Any], num_groups: int = 1) -> float:
        """Return the millions of tokens per second of the fastest call."""
        fastest, until = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            call()
            fastest = min(fastest, time.perf_counter() - started)
        return num_groups * self.num_tokens / fastest / 1e6


def measure_json(group: dict[str, Any], watch: Stopwatch) -> list[Figure]:
    """Measure the JSON format."""
    text, texts = encode_group(group), encode_groups([group] * 8)
    stored = StoredPayload("json", text)
    binary = StoredPayload("msgpack", encode_group(group, "msgpack"))
    typed = msgspec.json.Decoder(TypedGroup)
    print(f"  json: {len(text) / watch.num_tokens:.1f} bytes per token")
    calls: list[tuple[str, Callable[[], Any], int]] = [
        ("json: msgspec typed decode (baseline)", lambda: typed.decode(text), 1),
        ("json: decode and check", lambda: decode_group(text), 1),
        ("json: decode and check, list of 8", lambda: decode_groups(texts), 8),
        ("json: encode", lambda: encode_group(group), 1),
        ("json from binary", lambda: convert_payload(binary, "json"), 1),
        ("json: splice a batch of 8", lambda: b"".join(batch_pieces([stored] * 8)), 8),
    ]
    return _figures(calls, watch)


def measure_binary(group: dict[str, Any], watch: Stopwatch) -> list[Figure]:
    """Measure the binary format."""
    blob, blobs = encode_group(group, "msgpack"), encode_groups([group] * 8, "msgpack")
    packed = encode_group(group, "msgpack", zstd=True)
    stored, text = StoredPayload("msgpack", blob), StoredPayload("json", encode_group(group))
    batch = b"".join(batch_pieces([stored] * 8, "msgpack"))
    sizes = (f"{len(each) / watch.num_tokens:.1f}" for each in (blob, packed))
    print("  binary: {} bytes per token, with zstd {}".format(*sizes))
    calls: list[tuple[str, Callable[[], Any], int]] = [
        ("binary: memcpy (baseline)", lambda: bytearray(blob), 1),
        ("binary: decode and check", lambda: decode_group(blob, "msgpack"), 1),
        ("binary: decode and check, list of 8", lambda: decode_groups(blobs, "msgpack"), 8),
        ("binary: decode and check, zstd", lambda: decode_group(packed, "msgpack"), 1),
        ("binary: encode from lists", lambda: encode_group(group, "msgpack"), 1),
        ("binary from json", lambda: convert_payload(text, "msgpack"), 1),
        (
            "binary: splice a batch of 8",
            lambda: b"".join(batch_pieces([stored] * 8, "msgpack")),
            8,
        ),
        ("binary: read a batch of 8 as lists", lambda: decode_batch(batch, "msgpack"), 8),
        (
            "binary: read a batch of 8 as arrays",
            lambda: decode_batch(batch, "msgpack", as_arrays=True),
            8,
        ),
    ]
    return _figures(calls, watch)


def _figures(calls: list[tuple[str, Callable[[], Any], int]], watch: Stopwatch) -> list[Figure]:
    speeds = [(name, watch.speed(call, num_groups)) for name, call, num_groups in calls]
    return [Figure(name, speed, speed / speeds[0][1]) for name, speed in speeds]


def main() -> None:
    """Print one table per size of group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    tables = {}
    for length, has_logprobs in product((1024, 4096), (False, True)):
        title = f"8 x {length:,} {'with' if has_logprobs else 'without'} inference_logprobs"
        print(f"{title} (tokens, masks, scores)")
        shape = Shape(8, length, has_logprobs)
        group, watch = group_of(shape), Stopwatch(shape.num_tokens, options.seconds)
        tables[title] = measure_json(group, watch) + measure_binary(group, watch)
        for name, speed, ratio in tables[title]:
            print(f"  {name:38} {speed:10.1f} M tokens/s {ratio:7.2f}")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(tables))


if __name__ == "__main__":
    main()

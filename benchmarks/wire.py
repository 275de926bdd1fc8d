"""How fast the codecs of a group are, beside what msgspec and memory allow.

Usage: python benchmarks/wire.py [--seconds 0.5] [--json FILE]

Every figure is the best of repeated calls on one core, in millions of tokens per second. The floor
of the JSON lane is msgspec decoding the same bytes into typed lists and doing nothing else; that
of the binary lane is copying the bytes once. Ratios are to the floor of the same lane.
"""

from __future__ import annotations

import argparse
import random
import struct
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


class TypedGroup(msgspec.Struct, gc=False):
    """What the floor of the JSON lane decodes into."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    mtokens_per_s: float
    ratio: float


def make_group(num_sequences: int, length: int, *, has_logprobs: bool) -> dict[str, Any]:
    """Make a group as an engine gives it: a quarter is prompt, logprobs are float32."""
    draw = random.Random(length)
    prompt = length // 4
    tokens = [[draw.randrange(150_000) for _ in range(length)] for _ in range(num_sequences)]
    group: dict[str, Any] = {
        "tokens": tokens,
        "masks": [[-100] * prompt + row[prompt:] for row in tokens],
        "scores": [draw.random() for _ in range(num_sequences)],
    }
    if has_logprobs:
        group["inference_logprobs"] = [
            [1.0] * prompt + [-_float32(3 * draw.random()) for _ in row[prompt:]] for row in tokens
        ]
    return group


class Stopwatch(NamedTuple):
    """Times calls that work on groups of one size."""

    num_tokens: int
    seconds: float

    def speed(self, call: Callable[[], Any], num_groups: int = 1) -> float:
        """Return M tokens/s of the fastest call."""
        fastest, until = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            call()
            fastest = min(fastest, time.perf_counter() - started)
        return num_groups * self.num_tokens / fastest / 1e6


def measure_json(group: dict[str, Any], watch: Stopwatch) -> list[Figure]:
    """Return the figures of the JSON lane."""
    text, texts = encode_group(group), encode_groups([group] * 8)
    stored = StoredPayload("json", text)
    binary = StoredPayload("msgpack", encode_group(group, "msgpack"))
    typed = msgspec.json.Decoder(TypedGroup)
    print(f"  json: {len(text) / watch.num_tokens:.1f} bytes per token")
    calls: list[tuple[str, Callable[[], Any], int]] = [
        ("json: msgspec typed decode (floor)", lambda: typed.decode(text), 1),
        ("json: decode and check", lambda: decode_group(text), 1),
        ("json: decode and check, list of 8", lambda: decode_groups(texts), 8),
        ("json: encode", lambda: encode_group(group), 1),
        ("json from binary", lambda: convert_payload(binary, "json"), 1),
        ("json: splice a batch of 8", lambda: b"".join(batch_pieces([stored] * 8)), 8),
    ]
    return _figures(calls, watch)


def measure_binary(group: dict[str, Any], watch: Stopwatch) -> list[Figure]:
    """Return the figures of the binary lane."""
    blob, blobs = encode_group(group, "msgpack"), encode_groups([group] * 8, "msgpack")
    packed = encode_group(group, "msgpack", zstd=True)
    stored, text = StoredPayload("msgpack", blob), StoredPayload("json", encode_group(group))
    batch = b"".join(batch_pieces([stored] * 8, "msgpack"))
    sizes = (f"{len(each) / watch.num_tokens:.1f}" for each in (blob, packed))
    print("  binary: {} bytes per token, with zstd {}".format(*sizes))
    calls: list[tuple[str, Callable[[], Any], int]] = [
        ("binary: memcpy (floor)", lambda: bytearray(blob), 1),
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
    speeds = [(what, watch.speed(call, num_groups)) for what, call, num_groups in calls]
    floor = speeds[0][1]
    return [Figure(what, speed, speed / floor) for what, speed in speeds]


def main() -> None:
    """Print one table per size of group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    tables = {}
    for length, has_logprobs in product((1024, 4096), (False, True)):
        title = f"8 x {length:,} {'with' if has_logprobs else 'without'} inference_logprobs"
        print(f"{title} (tokens, masks, scores)")
        group = make_group(8, length, has_logprobs=has_logprobs)
        watch = Stopwatch(8 * length, options.seconds)
        tables[title] = measure_json(group, watch) + measure_binary(group, watch)
        for what, speed, ratio in tables[title]:
            print(f"  {what:36} {speed:10.1f} M tokens/s {ratio:7.2f}")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(tables))


def _float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


if __name__ == "__main__":
    main()

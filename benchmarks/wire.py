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


def measure(group: dict[str, Any], seconds: float) -> list[Figure]:
    """Return the figures of one group."""
    num_tokens = sum(map(len, group["tokens"]))
    text, blob = encode_group(group), encode_group(group, "msgpack")
    packed = encode_group(group, "msgpack", zstd=True)
    texts, blobs = encode_groups([group] * 8), encode_groups([group] * 8, "msgpack")
    stored = StoredPayload("json", text), StoredPayload("msgpack", blob)
    typed = msgspec.json.Decoder(TypedGroup)
    binary_batch = b"".join(batch_pieces([stored[1]] * 8, "msgpack"))

    def best(call: Callable[[], Any], num_groups: int = 1) -> float:
        fastest, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            call()
            fastest = min(fastest, time.perf_counter() - started)
        return num_groups * num_tokens / fastest / 1e6

    floor = best(lambda: typed.decode(text))
    copy = best(lambda: bytearray(blob))
    rows = [
        ("json: msgspec typed decode (floor)", floor, floor),
        ("json: decode and check", best(lambda: decode_group(text)), floor),
        ("json: decode and check, list of 8", best(lambda: decode_groups(texts), 8), floor),
        ("json: encode", best(lambda: encode_group(group)), floor),
        ("json from binary", best(lambda: convert_payload(stored[1], "json")), floor),
        ("json: splice a batch of 8", best(lambda: b"".join(batch_pieces([stored[0]] * 8)), 8),
         floor),
        ("binary: memcpy (floor)", copy, copy),
        ("binary: decode and check", best(lambda: decode_group(blob, "msgpack")), copy),
        ("binary: decode and check, list of 8",
         best(lambda: decode_groups(blobs, "msgpack"), 8), copy),
        ("binary: decode and check, zstd", best(lambda: decode_group(packed, "msgpack")), copy),
        ("binary: encode from lists", best(lambda: encode_group(group, "msgpack")), copy),
        ("binary from json", best(lambda: convert_payload(stored[0], "msgpack")), copy),
        ("binary: splice a batch of 8",
         best(lambda: b"".join(batch_pieces([stored[1]] * 8, "msgpack")), 8), copy),
        ("binary: read a batch of 8 as lists",
         best(lambda: decode_batch(binary_batch, "msgpack"), 8), copy),
        ("binary: read a batch of 8 as arrays",
         best(lambda: decode_batch(binary_batch, "msgpack", as_arrays=True), 8), copy),
    ]  # fmt: skip
    print(
        f"  bytes per token: json {len(text) / num_tokens:.1f}, "
        f"binary {len(blob) / num_tokens:.1f}, with zstd {len(packed) / num_tokens:.1f}"
    )
    return [Figure(what, speed, speed / lane_floor) for what, speed, lane_floor in rows]


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
        tables[title] = measure(group, options.seconds)
        for what, speed, ratio in tables[title]:
            print(f"  {what:36} {speed:10.1f} M tokens/s {ratio:7.2f}")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(tables))


def _float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


if __name__ == "__main__":
    main()

"""What no service of this kind can beat on this machine, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from atroposlib.wire import Lane
from service_parts.connection import request_bytes
from service_parts.load import post_for
from service_parts.server_process import bare_server
from service_parts.workload import Shape, post_requests

__all__ = ["decode_rate", "empty_post_rate", "memcpy_bytes_per_s", "transport_rate"]


class TypedGroup(msgspec.Struct):
    """The numeric part of a group, as a typed decoder would read it."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None


def decode_rate(shape: Shape, *, seconds: float) -> float:
    """Decode JSON groups with typed msgspec and nothing else; tokens per second."""
    bodies = [r.partition(b"\r\n\r\n")[2] for r in post_requests(shape, "json")]
    decoder = msgspec.json.Decoder(TypedGroup)
    return shape.num_tokens * _repeat(lambda i: decoder.decode(bodies[i % len(bodies)]), seconds)


def memcpy_bytes_per_s(*, seconds: float) -> float:
    """Copy 16 MiB blocks; bytes per second."""
    source, target = bytes(1 << 24), memoryview(bytearray(1 << 24))

    def copy(_: int) -> None:
        target[:] = source

    return len(source) * _repeat(copy, seconds)


def transport_rate(shape: Shape, lane: Lane, *, seconds: float) -> float:
    """Post the same groups to the same HTTP server with an empty application; tokens per second."""
    with bare_server() as server:
        count, elapsed = post_for(server.port, post_requests(shape, lane), seconds)
    return count * shape.num_tokens / elapsed


def empty_post_rate(*, seconds: float) -> float:
    """Post empty bodies to the same HTTP server with an empty application; requests per second."""
    with bare_server() as server:
        count, elapsed = post_for(server.port, (request_bytes("POST", "/"),), seconds)
    return count / elapsed


def _repeat(work: Callable[[int], Any], seconds: float) -> float:
    work(0)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        work(count)
        count += 1
    return count / elapsed

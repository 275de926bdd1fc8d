"""Groups that benchmarks post, similar to rollouts of a reasoning model, and the registration."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any, NamedTuple

import msgspec

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.wire import MEDIA_TYPES, WireFormat, encode_group
from service_parts.connection import Connection, request_bytes

__all__ = [
    "Shape",
    "TypedGroup",
    "bytes_per_token",
    "group_of",
    "post_requests",
    "register_trainer",
]

_VOCABULARY = 151_936
_PROMPT_SHARE = 8  # one token in eight belongs to the prompt and is masked
_DISTINCT = 8


class TypedGroup(msgspec.Struct, gc=False):
    """The numeric part of a group, as a typed decoder reads it."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None


class Shape(NamedTuple):
    """Size of one group."""

    trajectories: int
    length: int
    """Tokens per trajectory."""
    has_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the group."""
        return self.trajectories * self.length

    def __str__(self) -> str:
        return f"{self.trajectories}x{self.length:,}" + (" +logprobs" if self.has_logprobs else "")


def group_of(shape: Shape, *, seed: int = 0) -> dict[str, Any]:
    """Return a group with random token ids and, as from engines, float32 logprobs."""
    import numpy as np

    rng = random.Random(seed)
    prompt = shape.length // _PROMPT_SHARE
    tokens = [rng.choices(range(_VOCABULARY), k=shape.length) for _ in range(shape.trajectories)]
    masks = [[IGNORE_INDEX] * prompt + row[prompt:] for row in tokens]
    group: dict[str, Any] = {
        "tokens": tokens,
        "masks": masks,
        "scores": [rng.random() for _ in tokens],
    }
    if shape.has_logprobs:
        group["inference_logprobs"] = [
            [MASKED_LOGPROB] * prompt
            + np.array([-rng.expovariate(2) for _ in row[prompt:]], np.float32).tolist()
            for row in tokens
        ]
    return group


@cache
def post_requests(shape: Shape, wire_format: WireFormat) -> tuple[bytes, ...]:
    """Return `POST /scored_data` requests with different groups of one shape."""
    bodies = [encode_group(group_of(shape, seed=seed), wire_format) for seed in range(_DISTINCT)]
    return tuple(request_bytes("POST", "/scored_data", b, MEDIA_TYPES[wire_format]) for b in bodies)


def bytes_per_token(shape: Shape, wire_format: WireFormat) -> float:
    """Return the encoded size of such a group per token."""
    bodies = [request.partition(b"\r\n\r\n")[2] for request in post_requests(shape, wire_format)]
    return sum(map(len, bodies)) / (len(bodies) * shape.num_tokens)


def register_trainer(connection: Connection, batch_size: int) -> None:
    """Register the trainer of a run without end and request a batch, so that environments start."""
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": batch_size,
        "max_token_len": 0,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1_000_000,
        "replace": True,
    }
    connection.expect(request_bytes("POST", "/register", json.dumps(registration).encode()))
    connection.expect(request_bytes("GET", "/batch"))

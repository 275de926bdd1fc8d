"""The groups that the benchmark posts: shaped like a rollout of a reasoning model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.wire import MEDIA_TYPES, Lane, encode_group
from service_parts.connection import request_bytes

__all__ = [
    "REGISTRATION",
    "Shape",
    "bytes_per_token",
    "group_of",
    "post_requests",
    "registration_request",
]

_VOCABULARY = 151_936
_PROMPT_SHARE = 8  # one token in eight is prompt, and masked
_DISTINCT = 8

REGISTRATION: dict[str, Any] = {
    "wandb_group": "",
    "wandb_project": "",
    "max_token_len": 0,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1_000_000,
}


class Shape(NamedTuple):
    """Size of one group."""

    trajectories: int
    length: int
    """Tokens per trajectory."""
    has_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens in one group."""
        return self.trajectories * self.length

    def __str__(self) -> str:
        return f"{self.trajectories}x{self.length:,}" + (" +logprobs" if self.has_logprobs else "")


def group_of(shape: Shape, *, seed: int = 0) -> dict[str, Any]:
    """Make a group with random token ids; logprobs are float32 values, as engines give them."""
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
def post_requests(shape: Shape, lane: Lane, *, env_id: int | None = None) -> tuple[bytes, ...]:
    """Return whole `POST /scored_data` requests with different groups of one shape."""
    bodies = []
    for seed in range(_DISTINCT):
        group = group_of(shape, seed=seed) | ({} if env_id is None else {"env_id": env_id})
        bodies.append(encode_group(group, lane))
    return tuple(request_bytes("POST", "/scored_data", b, MEDIA_TYPES[lane]) for b in bodies)


def bytes_per_token(shape: Shape, lane: Lane) -> float:
    """Return how many bytes a token of such a group takes on the wire."""
    bodies = [request.partition(b"\r\n\r\n")[2] for request in post_requests(shape, lane)]
    return sum(map(len, bodies)) / (len(bodies) * shape.num_tokens)


def registration_request(batch_size: int) -> bytes:
    """Return `POST /register` for a run that never ends."""
    import json

    body = json.dumps({**REGISTRATION, "batch_size": batch_size, "replace": True}).encode()
    return request_bytes("POST", "/register", body)

"""Options that the dialects pass on to a chat request under the same name; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SHARED_OPTIONS", "shared_options"]

SHARED_OPTIONS = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
)
"""Sampling options; those the dialects do not define come with `extra_body` of a client."""


def shared_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options of a body that are set; the chat request checks their values."""
    return {name: body[name] for name in SHARED_OPTIONS if body.get(name) is not None}

"""What the token routes of all engines share: sampling options, and checks of answers; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import InferenceError

__all__ = [
    "check_count",
    "check_sequences",
    "drop_double_bos",
    "list_of",
    "sampling_options",
]

_UNFINISHED = frozenset({"abort", "error"})
"""Finish reasons of a completion the engine gave up: a fragment nobody may score."""


def sampling_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a request's kwargs goes to the engine, under the engine's names.

    Unset values (None) are left out, `extra_body` is merged in, and the older names of
    `max_tokens` are translated. `logprobs` is ours: exactly the sampled token's is asked for.

    `max_tokens` given as None or -1 means as long as the context allows and becomes None; left
    out, the engine stops after its default of 16 tokens.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    options.update(options.pop("extra_body", {}))
    for name in ("model", "prompt", "input_ids", "timeout", "extra_headers", "logprobs"):
        options.pop(name, None)
    for old_name in ("max_new_tokens", "max_completion_tokens"):
        if old_name in options:
            options["max_tokens"] = options.pop(old_name)
    if options.get("max_tokens") == -1 or ("max_tokens" in kwargs and "max_tokens" not in options):
        options["max_tokens"] = None
    return options


def drop_double_bos(ids: Sequence[int], bos_token_id: int | None) -> list[int]:
    """Return `ids` with one bos where a template and the tokenizer both wrote it."""
    doubled = len(ids) > 1 and ids[0] == ids[1] == bos_token_id
    return list(ids[1:] if doubled else ids)


def list_of(mapping: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of an answer; raises `InferenceError` when it is not there."""
    value = mapping.get(name)
    if not isinstance(value, list):
        raise InferenceError(f"the engine's answer has no {name}")
    return value


def check_count(choices: Sequence[Any], expected: int) -> None:
    """Raise `InferenceError` unless the engine answered as many completions as asked for."""
    if len(choices) != expected:
        raise InferenceError(f"the engine answered {len(choices)} completions, not {expected}")


def check_sequences(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    finish_reasons: Sequence[Any],
) -> None:
    """Raise `InferenceError` for a completion given up, or without one logprob per id.

    Args:
        ids: [n][C] sampled ids.
        logprobs: [n][C] as the engine sent them.
        finish_reasons: [n] text, an object with a `type`, or null.
    """
    for i, (row, values, reason) in enumerate(zip(ids, logprobs, finish_reasons, strict=True)):
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind in _UNFINISHED:
            raise InferenceError(f"the engine gave up completion {i} ({kind})")
        if len(row) != len(values):
            raise InferenceError(f"completion {i} has {len(row)} ids and {len(values)} logprobs")
        if not _are_finite(values):
            raise InferenceError(f"completion {i} has a logprob that is not a finite number")


def _are_finite(values: Sequence[float | None]) -> bool:
    # A sum is finite only when all numbers are; adding them up takes a fraction of a loop's time.
    try:
        return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # type: ignore[arg-type]
    except TypeError:  # None, where the engine gives none
        return False

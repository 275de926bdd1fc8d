"""Whether the tokens and logprobs of groups are those of the engine, asked again."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from atroposlib.scored_data import IGNORE_INDEX

__all__ = ["mismatches"]

TOLERANCE = 2e-3
"""Largest difference of a logprob: the engine computes it in other batches, in float32."""


def mismatches(group: dict[str, Any], *, base_url: str, model: str) -> list[str]:
    """Return a line for each sampled token whose logprob the engine does not confirm.

    The engine is asked for the logprobs of each sequence as a prompt. A token that was not sampled
    at its position, or that was encoded differently, has another logprob there.
    """
    found = []
    rows = zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    for row, (tokens, masks, logprobs) in enumerate(rows):
        known = _prompt_logprobs(tokens, base_url=base_url, model=model)
        for position, mask in enumerate(masks):
            if mask == IGNORE_INDEX:
                continue
            entry = (known[position] or {}).get(str(tokens[position]))
            if mask != tokens[position] or entry is None:
                found.append(f"row {row}, position {position}: token {tokens[position]}")
            elif abs(entry["logprob"] - logprobs[position]) > TOLERANCE:
                found.append(
                    f"row {row}, position {position}: {logprobs[position]:.4f}, "
                    f"the engine has {entry['logprob']:.4f}"
                )
    return found


def _prompt_logprobs(tokens: Sequence[int], *, base_url: str, model: str) -> list[Any]:
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 1}
    request = urllib.request.Request(
        f"{base_url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return list(choice["prompt_logprobs"])

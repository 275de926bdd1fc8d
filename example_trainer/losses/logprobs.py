"""From logits to log-probabilities, and from two of them to a log ratio.

Shape suffixes: B rows of one micro-batch, T padded length, V vocabulary, K teacher's choices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX

__all__ = [
    "LOG_RATIO_LIMIT",
    "log_ratio_BT",
    "require_known_ids",
    "token_logprobs_BT",
    "topk_logprobs_BTK",
]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-this before exp: e^20 is beyond any cap and still finite."""


def token_logprobs_BT(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logprob of each label, 0 where ignored; float32 at least.

    Args:
        logits_BTV: (B, T, V) of any float type.
        labels_BT: (B, T) ids or `IGNORE_INDEX`.
        temperatures: (B,) or (B, T) divides the logits; None or values at most 0 leave them as
            they are.
    """
    logits_BTV = _at_least_float32(logits_BTV)
    if temperatures is not None:
        divisor = torch.where(temperatures > 0, temperatures, 1.0).to(logits_BTV.dtype)
        logits_BTV = logits_BTV / divisor.view(len(labels_BT), -1, 1)
    nll = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -nll.view_as(labels_BT)


def topk_logprobs_BTK(
    logits_BTV: torch.Tensor, ids_BTK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprob of each given id under `logits / temperature`; float32 at least.

    Args:
        logits_BTV: (B, T, V) of any float type.
        ids_BTK: (B, T, K) ids; negative ones are padding and get the logprob of id 0.
        temperature: Divides the logits.

    Raises:
        GroupError: an id is outside the vocabulary.
    """
    require_known_ids(ids_BTK, vocabulary=logits_BTV.shape[-1])
    logits_BTV = _at_least_float32(logits_BTV) / temperature
    chosen_BTK = logits_BTV.gather(-1, ids_BTK.clamp(min=0))
    return chosen_BTK - logits_BTV.logsumexp(-1, keepdim=True)


def require_known_ids(ids_BTK: torch.Tensor, *, vocabulary: int) -> None:
    """Refuse a teacher's ids that the student has no logit for.

    Raises:
        GroupError: names the largest.
    """
    largest = int(ids_BTK.max()) if ids_BTK.numel() else -1
    if largest >= vocabulary:
        raise GroupError(
            f"distill_token_ids: id {largest}, the model's vocabulary has {vocabulary} "
            "entries; teacher and student must share a tokenizer"
        )


def log_ratio_BT(new_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """Return `new - old`, clamped so that its exponential stays finite."""
    return (new_BT - old_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _at_least_float32(logits_BTV: torch.Tensor) -> torch.Tensor:
    is_half = logits_BTV.dtype in (torch.bfloat16, torch.float16)
    return logits_BTV.float() if is_half else logits_BTV

"""Logprobs and entropy, from hidden states chunk by chunk or from logits, and log ratios.

From hidden states the logits of all tokens never exist: each chunk is projected, reduced and thrown
away, and projected again in the backward pass. Exact up to rounding.

Shape suffixes: B rows of one microbatch, T padded length, N tokens, D hidden size, V vocabulary, K
targets per token or a teacher's choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX

__all__ = [
    "LOG_RATIO_LIMIT",
    "LinearLogprobs",
    "auto_chunk_tokens",
    "linear_logprobs",
    "log_ratio_BT",
    "require_known_ids",
    "token_logprobs_BT",
    "topk_logprobs_BTK",
]

_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}


class LinearLogprobs(NamedTuple):
    """What is known of each token's distribution."""

    logprobs_NK: torch.Tensor
    """(N, K) of the targets, with gradient; float32 at least."""
    entropy_N: torch.Tensor
    """(N,) in nats, without gradient."""
    untempered_N: torch.Tensor | None = None
    """(N,) of the first target at temperature 1, without gradient; None without temperatures."""


def auto_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return so many tokens that their float32 logits take a bounded part of memory."""
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
    return max(16, budget // (4 * vocabulary))


def linear_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_NK: torch.Tensor,
    *,
    temperatures_N: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
) -> LinearLogprobs:
    """Return the logprobs of targets under `softmax((hidden @ weight.T + bias) / temperature)`.

    Args:
        hidden_ND: (N, D) what the output layer gets.
        weight_VD: (V, D) of the output layer.
        bias_V: (V,) of the output layer, None without.
        targets_NK: (N, K) ids, each from 0 to V - 1.
        temperatures_N: (N,) above 0; None: 1.
        chunk_tokens: Tokens projected at a time; None: what fits a fixed budget.
    """
    chunk = chunk_tokens or auto_chunk_tokens(weight_VD.shape[0], hidden_ND.device)
    device_type = hidden_ND.device.type
    # Autocast is over when the backward pass projects again, so its type is settled here.
    dtype = hidden_ND.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    logprobs_NK, entropy_N, untempered_N = _Function.apply(
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, chunk, dtype
    )
    has_temperatures = temperatures_N is not None
    return LinearLogprobs(logprobs_NK, entropy_N, untempered_N if has_temperatures else None)


class _Function(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_NK: torch.Tensor,
        temperatures_N: torch.Tensor | None,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        num_tokens, num_targets = targets_NK.shape
        logprobs_NK = hidden_ND.new_empty((num_tokens, num_targets), dtype=wide)
        entropy_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        normaliser_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        has_temperatures = temperatures_N is not None
        untempered_N = hidden_ND.new_empty(num_tokens if has_temperatures else 0, dtype=wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            for part in _parts(num_tokens, chunk):
                logits = _logits(hidden_ND[part], weight, bias_V, None, part, wide)
                if temperatures_N is not None:
                    chosen = logits.gather(-1, targets_NK[part, :1])[:, 0]
                    untempered_N[part] = chosen - logits.logsumexp(-1)
                    logits /= temperatures_N[part, None]
                normaliser_N[part] = logits.logsumexp(-1)
                logits -= normaliser_N[part, None]
                logprobs_NK[part] = logits.gather(-1, targets_NK[part])
                entropy_N[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, normaliser_N
        )
        ctx.chunk, ctx.dtype = chunk, dtype
        ctx.mark_non_differentiable(entropy_N, untempered_N)
        return logprobs_NK, entropy_N, untempered_N

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, normaliser_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = normaliser_N.dtype
        weight = weight_VD.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for part in _parts(len(hidden_ND), ctx.chunk):
            hidden, grad = hidden_ND[part], grad_NK[part]
            logits = _logits(hidden, weight, bias_V, temperatures_N, part, wide)
            slope = logits.sub_(normaliser_N[part, None]).exp_()
            slope *= -grad.sum(-1, keepdim=True)
            slope.scatter_add_(-1, targets_NK[part], grad.to(wide))
            if temperatures_N is not None:
                slope /= temperatures_N[part, None]
            narrow = slope.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (narrow @ weight).to(hidden_ND.dtype)
            if grad_weight is not None:
                if ctx.dtype == wide:
                    grad_weight.addmm_(narrow.T, hidden.to(wide))
                else:
                    grad_weight += narrow.T @ hidden.to(ctx.dtype)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *(None,) * 4,
        )


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    part: slice,
    wide: torch.dtype,
) -> torch.Tensor:
    """Return the logits of one chunk, divided by the temperatures; the caller may change them."""
    logits = (hidden.to(weight.dtype) @ weight.T).to(wide)
    if bias is not None:
        logits += bias
    if temperatures is not None:
        logits /= temperatures[part, None]
    return logits


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

"""The earlier trainer's loss function under its own name and signature."""

from __future__ import annotations

from typing import Any

import torch

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.logprobs import log_ratio_BT, token_logprobs_BT
from example_trainer.loss import BatchTotals, Grpo, LossInputs, TrainingLoss

__all__ = ["compute_grpo_loss"]


def compute_grpo_loss(
    model: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    advantages: torch.Tensor,
    temperatures: torch.Tensor,
    gradient_accumulation_steps: int,
    inference_logprobs: torch.Tensor | None,
    clip_eps: float = 0.2,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute one micro-batch's GRPO loss, anchored on the inference engine's logprobs.

    Formula: `max(-A r, -A clip(r, 1 - eps, 1 + eps))` with `r = exp(l - mu)`, the mean over each
    row's trained tokens, then over the rows, divided by `gradient_accumulation_steps`. Logits are
    divided by the row's temperature. Tokens without an inference logprob have ratio 1. The trainer
    itself uses `make_loss`, whose denominators count the whole batch.

    Args:
        model: Called as `model(input_ids=...)`, answers with `.logits`.
        tokens: (B, T) inputs, already shifted.
        labels: (B, T) ids or `IGNORE_INDEX`.
        advantages: (B, 1) or (B, T).
        temperatures: (B, 1, 1) or (B,); values at most 0 count as 1.
        gradient_accumulation_steps: Micro-batches of the step.
        inference_logprobs: (B, T), `MASKED_LOGPROB` where unknown.
        clip_eps: Both bounds of the clip.

    Returns:
        The loss, and metrics: plain numbers, and `training_logprobs` and `inference_logprobs` as
        flat tensors of the trained positions. Without a trained position the loss is a zero that
        can be sent backward.

    Raises:
        ConfigError: there are no inference logprobs at all.
    """
    if inference_logprobs is None:
        raise ConfigError(
            "inference_logprobs: None, and the ratio needs them; run the environment with "
            "--openai.server_type vllm, whose completions carry logprobs"
        )
    logits = model(input_ids=tokens).logits
    logprobs_BT = token_logprobs_BT(logits, labels, temperatures.flatten())
    advantages_BT = advantages.to(logprobs_BT.dtype).expand_as(labels)
    inputs = LossInputs(logprobs_BT, labels, advantages_BT, inference_logprobs)
    loss = TrainingLoss(Grpo(clip_eps, clip_eps), anchor="inference", reduction="sequence_mean")
    terms = loss(inputs, BatchTotals(num_tokens=0, num_sequences=len(tokens)))
    share = terms.loss / gradient_accumulation_steps
    metrics = _metrics(logprobs_BT.detach(), labels, advantages_BT, inference_logprobs, clip_eps)
    return share, metrics | {"interpretable_loss": float(terms.loss.detach())}


def _metrics(
    logprobs_BT: torch.Tensor,
    labels_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    inference_BT: torch.Tensor,
    clip_eps: float,
) -> dict[str, Any]:
    mask_BT = labels_BT != IGNORE_INDEX
    trained = logprobs_BT[mask_BT]
    positive = advantages_BT[mask_BT] > 0
    inference = inference_BT[mask_BT].to(trained.dtype)
    is_known = inference != MASKED_LOGPROB
    difference = torch.where(is_known, trained - inference, 0.0)
    ratio = torch.where(is_known, log_ratio_BT(trained, inference).exp(), 1.0)
    outside = (ratio < 1.0 - clip_eps) | (ratio > 1.0 + clip_eps)
    return {
        "pos_logp": _mean(trained[positive]),
        "neg_logp": _mean(trained[~positive]),
        "avg_logp": _mean(trained),
        "pos_count": float((advantages_BT[:, 0] > 0).sum()),
        "neg_count": float((advantages_BT[:, 0] <= 0).sum()),
        "training_logprobs": trained,
        "inference_logprobs": inference,
        "mean_ratio": _mean(ratio),
        "clipped_fraction": _mean(outside.to(trained.dtype)),
        "logprob_diff_mean": _mean(difference),
        "logprob_diff_abs_mean": _mean(difference.abs()),
        "logprob_diff_max": float(difference.abs().max()) if difference.numel() else 0.0,
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0

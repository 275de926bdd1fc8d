"""The earlier trainer's functions for a batch, its loss and a step, from `batch` and `loss`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.api import get_batch
from example_trainer.batch import make_microbatch, padded_length
from example_trainer.config import TrainingConfig
from example_trainer.loss import BatchTotals, Grpo, LossInputs, TrainingLoss, log_ratio_BT
from example_trainer.rows import RowRules, rows_from_group
from example_trainer.scoring import token_logprobs_BT

__all__ = [
    "CollatedBatch",
    "compute_grpo_loss",
    "get_data",
    "pad_data_to_good_offset",
    "run_training_step",
]

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**31
_SUMMED = ("pos_count", "neg_count")
_AVERAGED = ("pos_logp", "neg_logp", "mean_ratio", "clipped_fraction")


class CollatedBatch(NamedTuple):
    """Five parallel lists, one entry per microbatch."""

    tokens: list[torch.Tensor]
    """(B, T) inputs."""
    labels: list[torch.Tensor]
    """(B, T) labels."""
    advantages: list[torch.Tensor]
    """(B, 1), or (B, T) if the groups have token-level advantages."""
    temperatures: list[torch.Tensor]
    """(B, 1, 1)."""
    inference_logprobs: list[torch.Tensor] | None
    """(B, T), `MASKED_LOGPROB` where unknown; None if no group has any."""


def pad_data_to_good_offset(
    data: Mapping[str, Any],
    batch_size: int,
    extract_inference_logprobs: bool = True,
    *,
    seq_len: int | None = None,
) -> CollatedBatch:
    """Collate the body of `GET /batch`; every microbatch has the same number of columns.

    Args:
        data: `{"batch": groups}`.
        batch_size: Rows per microbatch; the last one may have fewer.
        extract_inference_logprobs: Whether to return the fifth list.
        seq_len: Maximum length of a row in tokens; None: no limit.

    Raises:
        GroupError: there is no group, or one is malformed or not supported.
    """
    rules = RowRules(seq_len=seq_len or _NO_LIMIT)
    groups = data["batch"]
    if not groups:
        raise GroupError(
            "batch: no groups; ask the service again, it answers null until one is full"
        )
    rows = [
        row
        for i, group in enumerate(groups)
        for row in rows_from_group(group, rules, name=f"group {i}")
    ]
    columns = padded_length(max(len(row.tokens) for row in rows))
    microbatches = [
        make_microbatch(rows[start : start + batch_size], columns=columns)
        for start in range(0, len(rows), batch_size)
    ]
    for i, row in enumerate(rows):  # a padded row keeps its last token, whose label is ignored
        if len(row.tokens) <= columns:
            microbatches[i // batch_size].tokens_BT[i % batch_size, len(row.tokens) - 1] = (
                row.tokens[-1]
            )
    per_row = all(group.get("advantages") is None for group in groups)
    known = [(mb.inference_logprobs_BT != MASKED_LOGPROB).any() for mb in microbatches]
    return CollatedBatch(
        tokens=[mb.tokens_BT for mb in microbatches],
        labels=[mb.labels_BT for mb in microbatches],
        advantages=[
            mb.advantages_BT[:, :1] if per_row else mb.advantages_BT for mb in microbatches
        ],
        temperatures=[mb.temperatures_S[:, None, None] for mb in microbatches],
        inference_logprobs=[mb.inference_logprobs_BT for mb in microbatches]
        if extract_inference_logprobs and any(known)
        else None,
    )


def get_data(
    batch_size: int,
    seq_len: int,
    atropos_url: str = "http://localhost:8000",
    extract_inference_logprobs: bool = True,
) -> tuple[list[CollatedBatch], None]:
    """Wait for a batch; return it and every batch that is ready, collated, and None.

    Logs whether they have inference logprobs.
    """
    collated: list[CollatedBatch] = []
    while True:
        data = get_batch(atropos_url)
        if data["batch"]:
            collated.append(
                pad_data_to_good_offset(
                    data, batch_size, extract_inference_logprobs, seq_len=seq_len
                )
            )
        elif collated:
            num_with = sum(batch.inference_logprobs is not None for batch in collated)
            logger.info("%d of %d batches have inference logprobs", num_with, len(collated))
            return collated, None
        else:
            time.sleep(1.0)


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
    """Compute one microbatch's GRPO loss, anchored on the inference engine's logprobs.

    Formula: `max(-A r, -A clip(r, 1 - eps, 1 + eps))` with `r = exp(l - mu)`, the mean over each
    row's trained tokens, then over the rows, divided by `gradient_accumulation_steps`. Logits are
    divided by the row's temperature. Tokens without an inference logprob have ratio 1. The trainer
    itself uses `make_loss`, whose denominators count the whole batch.

    Args:
        model: Called as `model(tokens)`, returns an object with `.logits`.
        tokens: (B, T) inputs, already shifted.
        labels: (B, T) ids or `IGNORE_INDEX`.
        advantages: (B, 1) or (B, T).
        temperatures: (B, 1, 1) or (B,); values of at most 0 count as 1.
        gradient_accumulation_steps: Microbatches of the step.
        inference_logprobs: (B, T), `MASKED_LOGPROB` where unknown.
        clip_eps: Both bounds of the clip.

    Returns:
        The loss, a zero with a gradient if no position is trained, and the metrics: numbers, and
        the flat tensors `training_logprobs` and `inference_logprobs` of the trained positions.

    Raises:
        ConfigError: `inference_logprobs` is None.
    """
    if inference_logprobs is None:
        raise ConfigError(
            "inference_logprobs: None, and the ratio needs them; run the environment with "
            "--openai.server_type vllm, whose completions have logprobs"
        )
    logits = model(tokens).logits
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


def run_training_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    token_batches: Sequence[torch.Tensor],
    label_batches: Sequence[torch.Tensor],
    advantage_batches: Sequence[torch.Tensor],
    temperature_batches: Sequence[torch.Tensor],
    config: TrainingConfig,
    step_idx: int,
    inference_logprob_batches: Sequence[torch.Tensor] | None = None,
) -> dict[str, float]:
    """Do one optimizer step on the lists of `pad_data_to_good_offset`, as the earlier trainer did.

    The loss is `compute_grpo_loss`, divided by the number of microbatches. The training loop does
    not use this function.

    Args:
        model: See `compute_grpo_loss`.
        optimizer: Its learning rate is set: it rises over `warmup_steps`, then it is constant.
        token_batches: Inputs (B, T) per microbatch; the other lists have the same length.
        label_batches: (B, T).
        advantage_batches: (B, 1) or (B, T).
        temperature_batches: (B, 1, 1).
        config: Settings of the learning rate, the clip and the device.
        step_idx: Number of completed optimizer steps.
        inference_logprob_batches: (B, T).

    Returns:
        `loss` is the sum over microbatches, `pos_count` and `neg_count` are numbers of sequences,
        and `pos_logp`, `neg_logp`, `mean_ratio` and `clipped_fraction` means over microbatches;
        `lr` and `grad_norm` as well.

    Raises:
        ConfigError: there are no inference logprobs.
    """
    num = len(token_batches)
    warmup = (step_idx + 1) / config.warmup_steps if step_idx < config.warmup_steps else 1.0
    learning_rate = config.lr * warmup
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    inference = inference_logprob_batches or [None] * num
    columns = (token_batches, label_batches, advantage_batches, temperature_batches, inference)
    sums: dict[str, float] = dict.fromkeys(_SUMMED + _AVERAGED, 0.0)
    total = 0.0
    for tensors in zip(*columns, strict=True):
        tokens, labels, advantages, temperatures, logprobs = (
            None if tensor is None else tensor.to(config.device) for tensor in tensors
        )
        loss, metrics = compute_grpo_loss(
            model, tokens, labels, advantages, temperatures, num, logprobs, config.clip_eps
        )
        loss.backward()
        total += loss.item()
        for name in sums:
            sums[name] += metrics[name] / (num if name in _AVERAGED else 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": total, "lr": learning_rate, "grad_norm": float(norm), **sums}

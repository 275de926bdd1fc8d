"""The policy loss: pure functions of tensors, and the object that composes them.

Notation: l trainer logprob (with gradient), o the same without gradient at batch time (proximal),
mu the inference engine's logprob, A advantage, sg stop-gradient. Losses are minimised.

Shape suffixes: B rows of one micro-batch, T padded length, V vocabulary. Every tensor is already
shifted (`batch`): position t is about token t+1. Denominators count the whole batch, so the sum
over micro-batches does not depend on how the batch was split or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB

__all__ = [
    "BatchTotals",
    "GrpoLoss",
    "LossTerms",
    "clipped_surrogate_BT",
    "importance_weights_BT",
    "log_ratio_BT",
    "masked_reduce",
    "token_logprobs_BT",
]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-this before exp: e^20 is beyond any cap and still finite."""

Reduction = Literal["token_mean", "sequence_mean", "dr_grpo"]


class BatchTotals(NamedTuple):
    """Counts over the whole batch, the denominators of the reductions."""

    num_tokens: int
    num_sequences: int


class LossTerms(NamedTuple):
    """One micro-batch's share of the loss, and what the diagnostics want to see."""

    loss: torch.Tensor
    """Scalar; the shares of all micro-batches add up to the loss of the batch."""
    mask_BT: torch.Tensor
    """(B, T) bool, trained positions."""
    ratio_BT: torch.Tensor
    """(B, T) detached ratio that the clip saw."""
    weight_BT: torch.Tensor
    """(B, T) detached importance weight, 1 where there is none."""


def token_logprobs_BT(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperatures_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logprob of each label, 0 where ignored; float32 at least.

    Args:
        logits_BTV: (B, T, V) of any float type.
        labels_BT: (B, T) ids or `IGNORE_INDEX`.
        temperatures_B: (B,) divides the logits; None or values at most 0 leave them as they are.
    """
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    if temperatures_B is not None:
        divisor_B = torch.where(temperatures_B > 0, temperatures_B, 1.0).to(logits_BTV.dtype)
        logits_BTV = logits_BTV / divisor_B[:, None, None]
    nll = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -nll.view_as(labels_BT)


def log_ratio_BT(new_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """Return `new - old`, clamped so that its exponential stays finite."""
    return (new_BT - old_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate_BT(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return PPO's pessimistic per-token loss, `max(-A r, -A clip(r, 1-low, 1+high))`.

    The same formula holds for both signs of A: a token is left alone once the step has moved it
    past the bound in the direction A asks for, and never before.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; the asymmetric bound is
    "clip-higher" of Yu et al. 2025, "DAPO", arXiv:2503.14476.
    """
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


def importance_weights_BT(
    proximal_logprobs_BT: torch.Tensor,
    inference_logprobs_BT: torch.Tensor,
    *,
    cap: float,
    floor: float | None = None,
) -> torch.Tensor:
    """Return detached weights `exp(o - mu)` that correct for the sampler's mismatch.

    Without a floor they are truncated at `cap` (token TIS); with one, tokens whose weight leaves
    `[floor, cap]` get 0 (IcePop).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (TIS); Ling team 2025, arXiv:2510.18855 (IcePop).
    """
    weight_BT = log_ratio_BT(proximal_logprobs_BT, inference_logprobs_BT).exp().detach()
    if floor is None:
        return weight_BT.clamp(max=cap)
    return torch.where((weight_BT >= floor) & (weight_BT <= cap), weight_BT, 0.0)


def masked_reduce(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    totals: BatchTotals,
    *,
    reduction: Reduction,
    horizon: int,
) -> torch.Tensor:
    """Reduce per-token losses to this micro-batch's share of the batch loss.

    `token_mean`: sum / trained tokens of the batch (DAPO, verl token-mean). `sequence_mean`:
    mean over sequences of token means (GRPO as published; favours short answers).
    `dr_grpo`: sum / (sequences x horizon). A batch without trained tokens gives a zero that can
    still be sent backward.
    """
    masked_BT = torch.where(mask_BT, loss_BT, 0.0)
    if reduction == "token_mean":
        return masked_BT.sum() / max(1, totals.num_tokens)
    if reduction == "dr_grpo":
        return masked_BT.sum() / (max(1, totals.num_sequences) * horizon)
    mean_B = masked_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
    return mean_B.sum() / max(1, totals.num_sequences)


@dataclass(frozen=True)
class GrpoLoss:
    """GRPO with DAPO's clip-higher, a token mean and truncated importance sampling.

    Formula, per token: `min(exp(o - mu), cap) * max(-A r, -A clip(r, 1-low, 1+high))`.

    With `anchor="trainer"` (the default) `r = exp(l - o)`. One optimiser step is made per batch,
    so `o = sg(l)`: r is 1 with the gradient of l, the clip cannot bind, and what corrects for
    stale or differently rounded rollouts is the detached, capped weight. With
    `anchor="inference"` `r = exp(l - mu)` (the earlier Atropos trainer): the clip itself bounds
    the mismatch and a further weight would count it twice, so there must be none. Rows without
    inference logprobs have r and weight 1 under either anchor.

    Differs from Shao et al. 2024 (arXiv:2402.03300): no KL term, the mean is over the tokens of
    the whole batch instead of per sequence, and the sampler's mismatch is corrected.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    anchor: Literal["trainer", "inference"] = "trainer"
    importance_cap: float | None = 2.0
    importance_floor: float | None = None
    reduction: Reduction = "token_mean"
    horizon: int = 2048
    """Tokens per sequence that `dr_grpo` divides by."""

    def __post_init__(self) -> None:
        if self.anchor == "inference" and self.importance_cap is not None:
            raise ValueError("anchor='inference' with an importance_cap counts the mismatch twice")

    def __call__(
        self,
        trainer_logprobs_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        advantages_BT: torch.Tensor,
        inference_logprobs_BT: torch.Tensor,
        totals: BatchTotals,
        *,
        proximal_logprobs_BT: torch.Tensor | None = None,
    ) -> LossTerms:
        """Compute this micro-batch's share of the loss.

        Args:
            trainer_logprobs_BT: (B, T) l, with gradient.
            labels_BT: (B, T) ids or `IGNORE_INDEX`.
            advantages_BT: (B, T) A.
            inference_logprobs_BT: (B, T) mu, `MASKED_LOGPROB` where unknown.
            totals: Counts over the whole batch.
            proximal_logprobs_BT: (B, T) o; None means the present l without gradient.
        """
        mask_BT = labels_BT != IGNORE_INDEX
        known_BT = mask_BT & (inference_logprobs_BT != MASKED_LOGPROB)
        dtype = trainer_logprobs_BT.dtype
        if proximal_logprobs_BT is None:
            proximal_logprobs_BT = trainer_logprobs_BT.detach()
        ratio_BT, weight_BT = self._ratio_and_weight(
            trainer_logprobs_BT, proximal_logprobs_BT, inference_logprobs_BT.to(dtype), known_BT
        )
        loss_BT = weight_BT * clipped_surrogate_BT(
            ratio_BT, advantages_BT.to(dtype), clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss = masked_reduce(
            loss_BT, mask_BT, totals, reduction=self.reduction, horizon=self.horizon
        )
        return LossTerms(loss, mask_BT, ratio_BT.detach(), weight_BT)

    def _ratio_and_weight(
        self,
        trainer_logprobs_BT: torch.Tensor,
        proximal_logprobs_BT: torch.Tensor,
        inference_logprobs_BT: torch.Tensor,
        known_BT: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, T) the ratio with gradient and (B, T) the weight without."""
        unweighted_BT = torch.ones_like(proximal_logprobs_BT)
        if self.anchor == "inference":
            anchor_BT = torch.where(known_BT, inference_logprobs_BT, proximal_logprobs_BT)
            return log_ratio_BT(trainer_logprobs_BT, anchor_BT).exp(), unweighted_BT
        ratio_BT = log_ratio_BT(trainer_logprobs_BT, proximal_logprobs_BT).exp()
        if self.importance_cap is None:
            return ratio_BT, unweighted_BT
        weight_BT = importance_weights_BT(
            proximal_logprobs_BT,
            torch.where(known_BT, inference_logprobs_BT, proximal_logprobs_BT),
            cap=self.importance_cap,
            floor=self.importance_floor,
        )
        return ratio_BT, weight_BT

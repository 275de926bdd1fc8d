"""Demonstrations inside a batch of rollouts: plain maximum likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SupervisedLoss"]


@dataclass(frozen=True)
class SupervisedLoss:
    """The loss of trajectories marked `sft` by `overrides[i]` or `group_overrides`.

    Source: maximum likelihood of given tokens, the loss of supervised fine-tuning.
    Formula: `-coef l`; no advantage, ratio, clip, correction or KL: nothing sampled the tokens, so
    there is no policy they could be off.
    Denominator: the demonstration tokens of the whole batch, counted apart from the policy's, so
    that neither kind dilutes the other (as prime-rl's components do).
    Differs from the policy losses: neither its score nor its siblings' changes its gradient.
    """

    coef: float = 1.0

    def __call__(
        self, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this micro-batch's share, not yet multiplied by the coefficient."""
        return torch.where(mask_BT, -logprobs_BT, 0.0).sum() / max(1, num_tokens)

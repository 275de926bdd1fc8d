"""Plain importance sampling: no bound at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.losses.protocols import PolicyInputs, PolicyTerms

__all__ = ["ImportanceSampling"]


@dataclass(frozen=True)
class ImportanceSampling:
    """The policy gradient with an importance ratio and nothing else.

    Source: Tinker's `importance_sampling` loss; REINFORCE where the ratio is 1.
    Formula: `-A exp(l - mu)`; unbiased per token, with a variance that grows with staleness.
    Denominator: `token_mean`. Tinker sums: `loss_reduction sum`.
    Differs from the clipped family: no token is ever left alone.
    """

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        ratio_BT = inputs.ratio_BT
        return PolicyTerms(
            -inputs.advantages_BT * ratio_BT,
            ratio_BT.detach(),
            torch.zeros_like(inputs.mask_BT),
        )

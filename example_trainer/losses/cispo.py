"""CISPO: the weight is clipped, not the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.losses.protocols import PolicyInputs, PolicyTerms

__all__ = ["Cispo"]


@dataclass(frozen=True)
class Cispo:
    """Clipped importance-sampling policy optimisation.

    Paper: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585.
    Formula: `-sg(clip(r, 1 - low, 1 + high)) A l`: every token keeps a gradient, only its weight is
    bounded, so rare tokens that steer a long thought are not silenced.
    Denominator: `token_mean`.
    Differs from the paper: it bounds above only; that is `clip_eps 1` (a lower bound of 0), and
    `clip_eps_high 4` is then a cap of 5.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        ratio_BT = inputs.ratio_BT.detach()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        loss_BT = -ratio_BT.clamp(low, high) * inputs.advantages_BT * inputs.logprobs_BT
        return PolicyTerms(loss_BT, ratio_BT, (ratio_BT < low) | (ratio_BT > high))

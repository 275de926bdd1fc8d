"""The clipped family: PPO's pessimistic surrogate under four denominators and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.losses.protocols import PolicyInputs, PolicyTerms

__all__ = ["Dapo", "DrGrpo", "DualClip", "Grpo", "clipped_surrogate_BT"]


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


def bound_by_clip_BT(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return where the surrogate's gradient is zero because the clip binds."""
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)
    return above_BT | below_BT


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimisation.

    Paper: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300.
    Formula: `max(-A r, -A clip(r, 1 - low, 1 + high))`, `r = exp(l - anchor)`, with
    `A = (R - mean) / std` within the group.
    Denominator: `sequence_mean`, each sequence's own length, then the number of sequences; so a
    token of a short answer weighs more than one of a long answer.
    Differs from the paper: the KL penalty is off unless `kl_coef` is set.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        ratio_BT = inputs.ratio_BT
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss_BT = clipped_surrogate_BT(ratio_BT, inputs.advantages_BT, **bounds)
        bound_BT = bound_by_clip_BT(ratio_BT.detach(), inputs.advantages_BT, **bounds)
        return PolicyTerms(loss_BT, ratio_BT.detach(), bound_BT)


@dataclass(frozen=True)
class DrGrpo(Grpo):
    """GRPO done right: without its two biases.

    Paper: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    Formula: GRPO's, with `A = R - mean`: dividing by the deviation favours questions that are
    nearly always or nearly never solved.
    Denominator: `dr_grpo`, sequences x `loss_horizon`, a constant; so length does not change the
    weight of a token.
    Differs from the paper: the sampler's mismatch is corrected by default.
    """


@dataclass(frozen=True)
class Dapo(Grpo):
    """Decoupled clip and dynamic sampling policy optimisation; the default.

    Paper: Yu et al. 2025, "DAPO", arXiv:2503.14476.
    Formula: GRPO's with the upper bound raised ("clip-higher", 0.28), so that unlikely tokens may
    grow. Overlong shaping is a penalty on scores: see `advantages.overlong_penalty`.
    Denominator: `token_mean`, the trained tokens of the whole batch, never of a micro-batch.
    Differs from the paper: dynamic sampling is the environments' business
    (`ensure_scores_are_not_same` drops groups without a signal).
    """

    clip_high: float = 0.28


@dataclass(frozen=True)
class DualClip(Grpo):
    """PPO with a second bound for negative advantages.

    Paper: Ye et al. 2019, "Mastering Complex Control in MOBA Games", arXiv:1912.09729.
    Formula: for A < 0 `min(clipped surrogate, -A c)`: a token that became far likelier than when
    it was sampled cannot dominate the step. For A >= 0 GRPO's.
    Denominator: `token_mean`.
    Differs from the paper: no critic; advantages come from the group.
    """

    dual_clip: float = 3.0

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        terms = super().__call__(inputs)
        is_negative_BT = inputs.advantages_BT < 0
        ceiling_BT = -inputs.advantages_BT * self.dual_clip
        loss_BT = torch.where(
            is_negative_BT, torch.minimum(terms.loss_BT, ceiling_BT), terms.loss_BT
        )
        bound_BT = terms.bound_BT | (is_negative_BT & (terms.ratio_BT > self.dual_clip))
        return PolicyTerms(loss_BT, terms.ratio_BT, bound_BT)

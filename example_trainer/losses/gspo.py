"""GSPO: one ratio per sequence."""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.losses.clipped import bound_by_clip_BT, clipped_surrogate_BT
from example_trainer.losses.logprobs import LOG_RATIO_LIMIT
from example_trainer.losses.protocols import PolicyInputs, PolicyTerms
from example_trainer.losses.reductions import sequence_means_BT

__all__ = ["Gspo"]


@dataclass(frozen=True)
class Gspo:
    """Group sequence policy optimisation.

    Paper: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071.
    Formula: `max(-A s, -A clip(s, 1 - low, 1 + high))` with one ratio per sequence,
    `s = exp(mean_t (l - anchor))`. Computed as GSPO-token, `log s_t = sg(mean) + l - sg(l)`: the
    same value and gradient where all tokens share A, and right where they do not.
    Denominator: `sequence_mean`.
    Differs from the paper: the bounds are the common 0.2; the paper's, 3e-4 and 4e-4, fit the far
    narrower spread of a mean and are set with `clip_eps` and `clip_eps_high`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        difference_BT = (inputs.logprobs_BT - inputs.anchor_BT).detach()
        mean_BT = sequence_means_BT(difference_BT, inputs.mask_BT, inputs.sequence_ids_BT)
        log_ratio_BT = mean_BT + inputs.logprobs_BT - inputs.logprobs_BT.detach()
        ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss_BT = clipped_surrogate_BT(ratio_BT, inputs.advantages_BT, **bounds)
        bound_BT = bound_by_clip_BT(ratio_BT.detach(), inputs.advantages_BT, **bounds)
        return PolicyTerms(loss_BT, ratio_BT.detach(), bound_BT)

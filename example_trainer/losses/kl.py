"""Estimators of the KL divergence to a reference model, from sampled tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.losses.logprobs import log_ratio_BT
from example_trainer.losses.registry import KlEstimator

__all__ = ["KlPenalty", "kl_BT"]


def kl_BT(
    logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, *, estimator: KlEstimator
) -> torch.Tensor:
    r"""Estimate KL(policy || reference) per token.

    | estimator | formula | value | gradient as a loss |
    |---|---|---|---|
    | k1 | `l - f` | unbiased, may be negative | zero in expectation: it penalises nothing |
    | k2 | `(l - f)^2 / 2` | biased | that of the true KL, on policy |
    | k3 | `e^(f - l) - (f - l) - 1` | unbiased, never negative | of KL(reference \|\| policy) |

    Multiplied by the ratio `e^(l - sg l)`, as `KlPenalty.is_unbiased` does, a loss has the gradient
    of its expectation: for k1 and k3 that is KL(policy || reference) itself, for k2 its own biased
    value.

    Source: Schulman 2020, "Approximating KL Divergence". Differs in k3: the exponent is clamped.
    """
    if estimator == "k1":
        return logprobs_BT - ref_logprobs_BT
    if estimator == "k2":
        return 0.5 * (logprobs_BT - ref_logprobs_BT) ** 2
    log_BT = log_ratio_BT(ref_logprobs_BT, logprobs_BT)
    return log_BT.exp() - log_BT - 1.0


@dataclass(frozen=True)
class KlPenalty:
    """Adds `coef` times an estimate of KL(policy || reference) to every token's loss.

    Paper: the k3 form is GRPO's, Shao et al. 2024, arXiv:2402.03300, equation 4; with the ratio it
    is DeepSeek-V3.2's, arXiv:2512.02556.
    Formula: `coef * kl(l, f)`, with `is_unbiased` `coef * r * kl(l, f)`; see `kl_BT`.
    Denominator: the policy loss's own.
    Differs from the paper: r is the ratio of each token to the anchor, as in TRL; a correction
    against the sampler's mismatch does not multiply it.
    """

    coef: float
    estimator: KlEstimator = "k3"
    is_unbiased: bool = False
    """Whether the estimate is multiplied by the ratio, so that its gradient is unbiased."""

    def __call__(self, logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
        """Return (B, T) the estimate, neither weighed nor multiplied by the coefficient."""
        return kl_BT(logprobs_BT, ref_logprobs_BT, estimator=self.estimator)

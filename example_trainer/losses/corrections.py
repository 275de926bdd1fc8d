"""Weights against the sampler's mismatch: truncation and masks, per token and per sequence.

The engine that sampled and the trainer round differently and may hold weights of different age.
With w = exp(o - mu), detached, each class multiplies the policy loss of a token; KL, demonstrations
and distillation are left alone. Denominator of all: the policy loss's own, which counts dropped and
truncated tokens too, so that a correction never makes the others weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.losses.logprobs import LOG_RATIO_LIMIT
from example_trainer.losses.protocols import Mismatch, Weights

__all__ = [
    "GeometricMask",
    "SequenceMask",
    "SequenceTruncation",
    "TokenMask",
    "TokenTruncation",
]


@dataclass(frozen=True)
class TokenTruncation:
    """Truncated importance sampling per token; the default.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training".
    Formula: `min(w, cap)`. Biased per sequence, of low variance.
    Denominator: the policy loss's own.
    Differs from the paper: tokens without mu have weight 1.
    """

    cap: float = 2.0

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.log_weight_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class TokenMask:
    """IcePop: tokens on which the two engines disagree are dropped.

    Paper: Ling team 2025, "Every Step Evolves", arXiv:2510.18855.
    Formula: `w` inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from truncation: such a token teaches nothing instead of a bounded something, and so
    does one that the trainer finds much less likely than the sampler did.
    """

    cap: float = 5.0
    floor: float = 0.5

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.log_weight_BT)
        cut_BT = (weight_BT < self.floor) | (weight_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, weight_BT), cut_BT)


@dataclass(frozen=True)
class SequenceTruncation:
    """Truncated importance sampling per sequence.

    Source: verl and TRL, each under the name sequence-level truncated importance sampling.
    Formula: `min(exp(sum_t (o - mu)), cap)`, the same for every token of the sequence. Unbiased
    before the cap, of high variance on long sequences.
    Denominator: the policy loss's own.
    Differs from the token form: the product of all ratios, so one odd token moves all others.
    """

    cap: float = 2.0

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.sequence_sums_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class SequenceMask:
    """Sequences far from their sampler are dropped whole.

    Source: TRL's default, with cap 3 and no floor.
    Formula: `exp(sum_t (o - mu))` for every token where it is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `GeometricMask`: the product moves away from 1 with length, so long sequences are
    dropped sooner.
    """

    cap: float = 3.0
    floor: float = 0.0

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.sequence_sums_BT)
        cut_BT = (weight_BT < self.floor) | (weight_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, weight_BT), cut_BT)


@dataclass(frozen=True)
class GeometricMask:
    """Sequences whose tokens are on average far from their sampler are dropped whole.

    Source: NeMo RL's sequence mask (bounds 0.999 and 1.002) and SkyRL's (0.99 and 1.01).
    Formula: `w` of each token where `exp(mean_t (o - mu))` is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `SequenceMask`: the mean does not grow with length, hence the narrow bounds; and
    sequences that stay keep their token weights raw, without a cap.
    """

    cap: float = 1.01
    floor: float = 0.99

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        mean_BT = _bounded_exp(mismatch.sequence_means_BT)
        cut_BT = (mean_BT < self.floor) | (mean_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, _bounded_exp(mismatch.log_weight_BT)), cut_BT)


def _bounded_exp(log_BT: torch.Tensor) -> torch.Tensor:
    return log_BT.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

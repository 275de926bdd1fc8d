"""Weights against the sampler's mismatch: truncation and masks, per token and per sequence.

The engine that sampled and the trainer round differently and may hold weights of different age.
With w = exp(o - mu), detached, each class multiplies the policy loss of a token; KL, demonstrations
and distillation are left alone. Denominators still count dropped tokens.
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
    """Truncated importance sampling per token: `min(w, cap)`.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training". Biased per sequence, of low variance; the default.
    """

    cap: float = 2.0

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.log_weight_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class TokenMask:
    """IcePop: `w` inside `[floor, cap]`, 0 outside.

    Paper: Ling team 2025, "Every Step Evolves", arXiv:2510.18855. Differs from truncation: a token
    on which the engines disagree teaches nothing instead of a bounded something.
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
    """Truncated importance sampling per sequence: `min(exp(sum_t (o - mu)), cap)` for every token.

    Found in verl and TRL. Unbiased before the cap, of high variance on long sequences.
    """

    cap: float = 2.0

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""
        weight_BT = _bounded_exp(mismatch.sequence_sums_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class SequenceMask:
    """The sequence's product ratio inside `[floor, cap]`, 0 for the whole sequence outside.

    TRL's default, with cap 3 and no floor. The product grows with length, so long sequences are
    dropped sooner; see `GeometricMask`.
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
    """Token weights `w`, but 0 for sequences whose geometric mean ratio leaves `[floor, cap]`.

    NeMo RL's sequence mask (bounds 0.999 and 1.002) and SkyRL's (0.99 and 1.01): the mean
    `exp(mean_t (o - mu))` does not grow with length, hence the narrow bounds. The token weights
    of sequences that stay are raw, without a cap.
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

"""What a policy loss is given and what it answers, and what a correction is.

Notation in this package: l trainer logprob (with gradient), o the same without gradient when the
batch was built (proximal), mu the inference engine's logprob, f the reference model's, A advantage,
m mask, sg stop-gradient. Losses are minimised.

Shape suffixes: B rows of one micro-batch, T padded length. Every tensor is already shifted
(`batch`): position t is about token t+1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from example_trainer.losses.logprobs import log_ratio_BT
from example_trainer.losses.reductions import sequence_means_BT, sequence_sums_BT

__all__ = ["Correction", "Mismatch", "PolicyInputs", "PolicyLoss", "PolicyTerms", "Weights"]


@dataclass(frozen=True)
class PolicyInputs:
    """One micro-batch as a policy loss sees it."""

    logprobs_BT: torch.Tensor
    """(B, T) l, with gradient; finite at masked positions too."""
    anchor_BT: torch.Tensor
    """(B, T) o or mu, the denominator of the ratio; equal to sg(l) at masked positions and where
    mu is unknown, so that the ratio there is 1."""
    advantages_BT: torch.Tensor
    """(B, T) A."""
    mask_BT: torch.Tensor
    """(B, T) bool, positions this loss trains."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) number of the sequence within the micro-batch; None: one sequence per row."""

    @property
    def ratio_BT(self) -> torch.Tensor:
        """(B, T) exp(l - anchor), with gradient."""
        return log_ratio_BT(self.logprobs_BT, self.anchor_BT).exp()


class PolicyTerms(NamedTuple):
    """What a policy loss answers."""

    loss_BT: torch.Tensor
    """(B, T) loss of each token, with gradient; what stands at masked positions is not used."""
    ratio_BT: torch.Tensor
    """(B, T) the ratio its bound looked at, without gradient."""
    bound_BT: torch.Tensor
    """(B, T) bool, where its clip or mask changed the gradient."""


class PolicyLoss(Protocol):
    """One algorithm: the loss of every token of a micro-batch."""

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""


class Weights(NamedTuple):
    """What a correction answers, both without gradient."""

    weight_BT: torch.Tensor
    """(B, T) multiplies the policy loss of each token; 1 for a sequence without any mu."""
    cut_BT: torch.Tensor
    """(B, T) bool, where the correction truncated or dropped."""


@dataclass(frozen=True)
class Mismatch:
    """How far sampler and trainer are apart, on one micro-batch."""

    log_weight_BT: torch.Tensor
    """(B, T) o - mu without gradient, 0 where masked or where mu is unknown."""
    mask_BT: torch.Tensor
    """(B, T) bool, positions the policy loss trains."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) number of the sequence within the micro-batch; None: one sequence per row."""

    @property
    def sequence_sums_BT(self) -> torch.Tensor:
        """(B, T) sum of o - mu over the sequence of each position."""
        return sequence_sums_BT(self.log_weight_BT, self.sequence_ids_BT)

    @property
    def sequence_means_BT(self) -> torch.Tensor:
        """(B, T) mean of o - mu over the trained positions of the sequence of each position."""
        return sequence_means_BT(self.log_weight_BT, self.mask_BT, self.sequence_ids_BT)


class Correction(Protocol):
    """A weight against the difference between sampler and trainer."""

    def __call__(self, mismatch: Mismatch) -> Weights:
        """Turn the mismatch into weights."""

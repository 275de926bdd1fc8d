"""DPPO-style losses: tokens are dropped by how far their probability moved, not its ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.losses.logprobs import log_ratio_BT
from example_trainer.losses.protocols import PolicyInputs, PolicyTerms

__all__ = ["Dppo", "Ipo"]


@dataclass(frozen=True)
class Dppo:
    """Divergence-bounded policy optimisation with a quadratic pull to the sampler.

    Source: prime-rl's default loss.
    Formula: `-[keep] A exp(l - mu) + pull (l - mu)^2`. A token is dropped when its probability
    already moved by more than `max_shift` the way A asks: `e^l - e^mu > max_shift` for A > 0,
    `< -max_shift` for A <= 0. A ratio bound would silence rare tokens, whose ratio is large at
    next to no change of probability. The pull stays on dropped tokens.
    Denominator: `token_mean`.
    Differs from the source: tokens without mu count as on policy (ratio 1, no pull).
    """

    max_shift: float = 0.2
    pull: float = 1e-3

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        """Compute the per-token losses."""
        log_BT = log_ratio_BT(inputs.logprobs_BT, inputs.anchor_BT)
        dropped_BT = self.drops_BT(
            (inputs.logprobs_BT.exp() - inputs.anchor_BT.exp()).detach(), inputs.advantages_BT
        )
        policy_BT = torch.where(dropped_BT, 0.0, -inputs.advantages_BT * log_BT.exp())
        return PolicyTerms(policy_BT + self.pull * log_BT**2, log_BT.exp().detach(), dropped_BT)

    def drops_BT(self, shift_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        """Return where the probability moved too far in the direction A asks for."""
        up_BT = (shift_BT > self.max_shift) & (advantages_BT > 0)
        return up_BT | ((shift_BT < -self.max_shift) & (advantages_BT <= 0))


@dataclass(frozen=True)
class Ipo(Dppo):
    """DPPO with a bound on both sides, whatever the advantage.

    Source: prime-rl's ipo loss.
    Formula: DPPO's with `keep = |e^l - e^mu| <= max_shift`.
    Denominator: `token_mean`.
    Differs from DPPO: a token that drifted against its advantage is dropped too.
    """

    max_shift: float = 0.1

    def drops_BT(self, shift_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        """Return where the probability moved too far in either direction."""
        return shift_BT.abs() > self.max_shift

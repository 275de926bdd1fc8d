"""The loss of a batch: one algorithm, and whatever else the settings put beside it.

    policy loss x correction + kl      over the policy's tokens, one denominator
    + sft                              over the demonstrations' tokens
    + distillation                     over the positions a teacher answered for

Shape suffixes: B rows of one micro-batch, T padded length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.losses.choice import refuse_double_count
from example_trainer.losses.clipped import Dapo
from example_trainer.losses.distillation import Distillation, TeacherTokens
from example_trainer.losses.kl import KlPenalty
from example_trainer.losses.protocols import (
    Correction,
    Mismatch,
    PolicyInputs,
    PolicyLoss,
    Weights,
)
from example_trainer.losses.reductions import BatchTotals, masked_reduce
from example_trainer.losses.registry import Anchor, Reduction
from example_trainer.losses.sft import SupervisedLoss

__all__ = ["LossInputs", "LossTerms", "TrainingLoss"]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, shifted; None where the groups carried nothing of the kind."""

    trainer_logprobs_BT: torch.Tensor
    """(B, T) l, with gradient."""
    labels_BT: torch.Tensor
    """(B, T) ids or `IGNORE_INDEX`."""
    advantages_BT: torch.Tensor
    """(B, T) A."""
    inference_logprobs_BT: torch.Tensor
    """(B, T) mu, `MASKED_LOGPROB` where unknown; that sentinel is never exponentiated."""
    proximal_logprobs_BT: torch.Tensor | None = None
    """(B, T) o; None means the present l without gradient, right for one step per batch."""
    ref_logprobs_BT: torch.Tensor | None = None
    """(B, T) f, `MASKED_LOGPROB` where unknown."""
    is_sft_BT: torch.Tensor | None = None
    """(B, T) bool, tokens of demonstrations."""
    teacher: TeacherTokens | None = None
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) number of the sequence within the micro-batch; None: one sequence per row."""


class LossTerms(NamedTuple):
    """One micro-batch's share of the loss, and what the diagnostics want to see, detached."""

    loss: torch.Tensor
    """Scalar with gradient; the shares of all micro-batches add up to the loss of the batch."""
    mask_BT: torch.Tensor
    """(B, T) bool, tokens the policy loss trains."""
    ratio_BT: torch.Tensor
    """(B, T) ratio that the algorithm's bound saw."""
    bound_BT: torch.Tensor
    """(B, T) bool, where that bound changed the gradient."""
    weights: Weights | None
    """What the correction made of the mismatch."""
    kl_BT: torch.Tensor | None
    """(B, T) KL estimate, 0 where masked or unknown."""
    parts: dict[str, float]
    """Micro-batch shares of the parts in use: kl_penalty (multiplied by its coefficient), policy,
    sft and distill (before theirs), and the divergence from the teacher, which is no part of the
    loss."""


@dataclass(frozen=True)
class TrainingLoss:
    """Composes an algorithm, a correction, a KL penalty, demonstrations and distillation.

    With `anchor="trainer"` the ratio is `exp(l - o)`. One optimiser step is made per batch, so
    `o = sg(l)`: the ratio is 1 with the gradient of l, the clip cannot bind, and what corrects for
    stale or differently rounded rollouts is the detached weight of the correction. With
    `anchor="inference"` the ratio is `exp(l - mu)` and itself holds that mismatch; a correction
    beside it would count it twice and is refused. Tokens without mu have ratio and weight 1.

    Raises:
        ConfigError: anchor and correction contradict each other.
    """

    algorithm: PolicyLoss = field(default_factory=Dapo)
    anchor: Anchor = "trainer"
    correction: Correction | None = None
    reduction: Reduction = "token_mean"
    horizon: int = 1
    """Tokens per sequence that the reduction `dr_grpo` divides by."""
    policy_coef: float = 1.0
    """Weight of the policy loss; 0: what is rewarded moves nothing."""
    kl: KlPenalty | None = None
    sft: SupervisedLoss = field(default_factory=SupervisedLoss)
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        refuse_double_count(self.anchor, is_corrected=self.correction is not None)
        if self.horizon < 1:
            raise ConfigError(f"horizon={self.horizon}: needs at least one token per sequence")

    def __call__(self, inputs: LossInputs, totals: BatchTotals) -> LossTerms:
        """Compute this micro-batch's share of the loss; `totals` count the whole batch."""
        trained_BT = inputs.labels_BT != IGNORE_INDEX
        is_sft_BT = inputs.is_sft_BT
        mask_BT = trained_BT if is_sft_BT is None else trained_BT & ~is_sft_BT
        policy = self._policy_inputs(inputs, mask_BT)
        terms = self.algorithm(policy)
        weights = self._weights(inputs, mask_BT)
        loss_BT = terms.loss_BT if weights is None else weights.weight_BT * terms.loss_BT
        policy_share = self._reduce(loss_BT, policy, totals)
        loss, parts = self.policy_coef * policy_share, {"policy": policy_share}
        kl_BT = self._kl_BT(inputs, mask_BT)
        if self.kl is not None and kl_BT is not None:
            weighed_BT = kl_BT * policy.ratio_BT if self.kl.is_unbiased else kl_BT
            parts["kl_penalty"] = self.kl.coef * self._reduce(weighed_BT, policy, totals)
            loss = loss + parts["kl_penalty"]
        if is_sft_BT is not None:
            parts["sft"] = self.sft(
                inputs.trainer_logprobs_BT, trained_BT & is_sft_BT, totals.num_sft_tokens
            )
            loss = loss + self.sft.coef * parts["sft"]
        if self.distillation is not None and inputs.teacher is not None:
            parts["distill"] = self.distillation(
                inputs.teacher, trained_BT, totals.num_distill_tokens
            )
            parts["divergence"] = self.distillation.divergence(
                inputs.teacher, trained_BT, totals.num_distill_tokens
            )
            loss = loss + self.distillation.coef * parts["distill"]
        return LossTerms(
            loss=loss,
            mask_BT=mask_BT,
            ratio_BT=terms.ratio_BT,
            bound_BT=terms.bound_BT & mask_BT,
            weights=weights,
            kl_BT=None if kl_BT is None else kl_BT.detach(),
            parts={name: float(part.detach()) for name, part in parts.items()},
        )

    def _policy_inputs(self, inputs: LossInputs, mask_BT: torch.Tensor) -> PolicyInputs:
        logprobs_BT = torch.where(mask_BT, inputs.trainer_logprobs_BT, 0.0)
        if self.anchor == "inference":
            known_BT = mask_BT & (inputs.inference_logprobs_BT != MASKED_LOGPROB)
            anchor_BT = torch.where(
                known_BT, inputs.inference_logprobs_BT.to(logprobs_BT.dtype), logprobs_BT.detach()
            )
        else:
            anchor_BT = torch.where(mask_BT, _proximal_BT(inputs), 0.0)
        return PolicyInputs(
            logprobs_BT=logprobs_BT,
            anchor_BT=anchor_BT,
            advantages_BT=inputs.advantages_BT.to(logprobs_BT.dtype),
            mask_BT=mask_BT,
            sequence_ids_BT=inputs.sequence_ids_BT,
        )

    def _weights(self, inputs: LossInputs, mask_BT: torch.Tensor) -> Weights | None:
        if self.correction is None:
            return None
        proximal_BT = _proximal_BT(inputs)
        inference_BT = inputs.inference_logprobs_BT.to(proximal_BT.dtype)
        known_BT = mask_BT & (inference_BT != MASKED_LOGPROB)
        log_weight_BT = torch.where(known_BT, proximal_BT - inference_BT, 0.0)
        return self.correction(Mismatch(log_weight_BT, mask_BT, inputs.sequence_ids_BT))

    def _kl_BT(self, inputs: LossInputs, mask_BT: torch.Tensor) -> torch.Tensor | None:
        if self.kl is None or inputs.ref_logprobs_BT is None:
            return None
        known_BT = mask_BT & (inputs.ref_logprobs_BT != MASKED_LOGPROB)
        logprobs_BT = torch.where(known_BT, inputs.trainer_logprobs_BT, 0.0)
        reference_BT = torch.where(known_BT, inputs.ref_logprobs_BT.to(logprobs_BT.dtype), 0.0)
        return self.kl(logprobs_BT, reference_BT)

    def _reduce(
        self, loss_BT: torch.Tensor, policy: PolicyInputs, totals: BatchTotals
    ) -> torch.Tensor:
        return masked_reduce(
            loss_BT,
            policy.mask_BT,
            totals,
            reduction=self.reduction,
            horizon=self.horizon,
            sequence_ids_BT=policy.sequence_ids_BT,
        )


def _proximal_BT(inputs: LossInputs) -> torch.Tensor:
    if inputs.proximal_logprobs_BT is None:
        return inputs.trainer_logprobs_BT.detach()
    return inputs.proximal_logprobs_BT.detach()

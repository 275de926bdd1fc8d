"""The losses under one name: every object of `losses`, and the one the settings mean."""

from __future__ import annotations

from example_trainer.config import TrainingConfig
from example_trainer.losses.cispo import Cispo
from example_trainer.losses.clipped import Dapo, DrGrpo, DualClip, Grpo, clipped_surrogate_BT
from example_trainer.losses.corrections import (
    GeometricMask,
    SequenceMask,
    SequenceTruncation,
    TokenMask,
    TokenTruncation,
)
from example_trainer.losses.distillation import Distillation, TeacherTokens
from example_trainer.losses.dppo import Dppo, Ipo
from example_trainer.losses.gspo import Gspo
from example_trainer.losses.importance_sampling import ImportanceSampling
from example_trainer.losses.kl import KlPenalty, kl_BT
from example_trainer.losses.logprobs import log_ratio_BT, token_logprobs_BT, topk_logprobs_BTK
from example_trainer.losses.protocols import (
    Correction,
    Mismatch,
    PolicyInputs,
    PolicyLoss,
    PolicyTerms,
    Weights,
)
from example_trainer.losses.reductions import BatchTotals, masked_reduce
from example_trainer.losses.registry import ALGORITHMS, CORRECTIONS
from example_trainer.losses.sft import SupervisedLoss
from example_trainer.losses.training_loss import LossInputs, LossTerms, TrainingLoss

__all__ = [
    "ALGORITHMS",
    "CORRECTIONS",
    "BatchTotals",
    "Cispo",
    "Correction",
    "Dapo",
    "Distillation",
    "Dppo",
    "DrGrpo",
    "DualClip",
    "GeometricMask",
    "Grpo",
    "Gspo",
    "ImportanceSampling",
    "Ipo",
    "KlPenalty",
    "LossInputs",
    "LossTerms",
    "Mismatch",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyTerms",
    "SequenceMask",
    "SequenceTruncation",
    "SupervisedLoss",
    "TeacherTokens",
    "TokenMask",
    "TokenTruncation",
    "TrainingLoss",
    "Weights",
    "clipped_surrogate_BT",
    "kl_BT",
    "log_ratio_BT",
    "make_loss",
    "masked_reduce",
    "token_logprobs_BT",
    "topk_logprobs_BTK",
]


def make_loss(config: TrainingConfig) -> TrainingLoss:
    """Return the loss the settings describe."""
    choice = config.loss_choice
    bounds = (
        {"clip_low": choice.clip_low, "clip_high": choice.clip_high}
        if choice.algorithm.takes_clip
        else {}
    )
    if choice.name == "dual_clip":
        bounds["dual_clip"] = config.dual_clip
    return TrainingLoss(
        algorithm=choice.algorithm.load()(**bounds),
        anchor=choice.anchor,
        correction=_make_correction(config),
        reduction=choice.reduction,
        horizon=config.loss_horizon or config.seq_len,
        policy_coef=config.policy_coef,
        kl=KlPenalty(config.kl_coef, config.kl_estimator, is_unbiased=config.kl_unbiased)
        if config.kl_coef
        else None,
        sft=SupervisedLoss(config.sft_coef),
        distillation=Distillation(
            config.distill_coef, config.distill_loss, config.distill_temperature
        )
        if config.distill_coef
        else None,
    )


def _make_correction(config: TrainingConfig) -> Correction | None:
    chosen = config.loss_choice.correction
    if chosen is None:
        return None
    bounds = (
        {"cap": chosen.cap} if chosen.floor is None else {"cap": chosen.cap, "floor": chosen.floor}
    )
    correction: Correction = CORRECTIONS[chosen.name].load()(**bounds)
    return correction

"""Settings of advantages and losses, one class per group of flags."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from example_trainer.losses.choice import (
    DEFAULT_CLIP,
    DEFAULT_DUAL_CLIP,
    LossChoice,
    choose_loss,
)
from example_trainer.losses.registry import (
    AdvantageStd,
    AlgorithmName,
    Anchor,
    CorrectionName,
    KlEstimator,
    Reduction,
)

__all__ = ["ExtraLossFields", "GrpoFields"]


class GrpoFields(BaseModel):
    """Advantages and the policy loss."""

    algorithm: AlgorithmName = Field(
        default="dapo",
        description="Policy loss; it brings the settings below that stand at auto or none.",
    )
    policy_coef: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the policy loss; 0: no reward is used, what is learned comes from "
        "a teacher or from demonstrations alone.",
    )
    clip_eps: float = Field(
        default=DEFAULT_CLIP, gt=0, le=1, description="Lower clip: ratios below 1 - this."
    )
    clip_eps_high: float | None = Field(
        default=None,
        gt=0,
        description="Upper clip: ratios above 1 + this; none: 0.28 for dapo and cispo, else the "
        "same as clip_eps.",
    )
    dual_clip: float = Field(
        default=DEFAULT_DUAL_CLIP,
        gt=1,
        allow_inf_nan=False,
        description="Bound of the ratio at negative advantages (dual_clip).",
    )
    ratio_anchor: Literal["auto", Anchor] = Field(
        default="auto",
        description="Denominator of the ratio: the trainer's own logprobs before the step, or the "
        "inference engine's (then no importance correction). auto: inference for dppo, ipo and "
        "importance_sampling, else trainer.",
    )
    importance_correction: Literal["auto", "none", CorrectionName] = Field(
        default="auto",
        description="Weight exp(trainer - inference logprob) against the sampler's mismatch: "
        "truncated or masked (IcePop) per token, truncated or masked per sequence, or raw with "
        "sequences masked by their geometric mean. auto: token_truncate (token_mask with a floor) "
        "under the trainer anchor, none under the inference anchor.",
    )
    importance_cap: float | None = Field(
        default=None,
        gt=0,
        description="Upper bound of that weight; none: 2 for truncation, 5 for token_mask, 3 for "
        "sequence_mask, 1.01 for geometric_mask.",
    )
    importance_floor: float | None = Field(
        default=None,
        ge=0,
        description="Lower bound of a mask; none: 0.5 for token_mask, 0 for sequence_mask, 0.99 "
        "for geometric_mask.",
    )
    loss_reduction: Literal["auto", Reduction] = Field(
        default="auto",
        description="Mean over all trained tokens of the batch, mean of sequence means, sum over "
        "sequences x loss_horizon, mean of sequence sums, or plain sum. auto: the algorithm's.",
    )
    loss_horizon: int | None = Field(
        default=None, ge=1, description="Tokens dr_grpo divides each sequence by; none: seq_len."
    )
    advantage_std: Literal["auto", AdvantageStd] = Field(
        default="auto",
        description="Deviation a group's centred scores are divided by. auto: none for dr_grpo, "
        "dppo, ipo and importance_sampling, else population.",
    )
    advantage_eps: float = Field(
        default=1e-8, ge=0, allow_inf_nan=False, description="Added to that deviation."
    )
    overlong_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="DAPO's overlong shaping: completions of this many trained tokens or more "
        "lose 1 of their score, before advantages; none: off.",
    )
    overlong_buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="The penalty grows linearly over the last so many tokens before that.",
    )
    truncated_completions: Literal["train", "mask"] = Field(
        default="train",
        description="What to do with a trajectory that seq_len cuts or whose last completion the "
        "engine cut (finish_reasons of the group, else a completion of "
        "generation_params.max_tokens tokens): train on it, or mask it (overlong filtering).",
    )
    logprobs_mode: Literal["auto", "raw", "processed"] = Field(
        default="auto",
        description="Whether the engine's logprobs are after temperature scaling (processed) or "
        "before (raw). The trainer's logits are divided by the temperature in either case; raw "
        "logprobs are moved by what that changes. auto: processed for an engine launched here, "
        "else what the engine says, else raw.",
    )
    unsupported_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="What to do with a group field or override the loss cannot honour.",
    )
    on_bad_group: Literal["skip", "stop"] = Field(
        default="skip",
        description="What to do with a group that is malformed or refused: skip leaves it out of "
        "its batch, counts it (train/bad_groups) and goes on; stop ends the run with the reason.",
    )
    allow_tokenized_from_text: bool = Field(
        default=False,
        description="Train the policy loss on groups whose tokens were made from the text of a "
        "server without token ids; they have no logprobs and may not be what the model sampled.",
    )

    @property
    def loss_choice(self) -> LossChoice:
        """The policy loss with nothing left to auto.

        Raises:
            ConfigError: two settings contradict each other.
        """
        return choose_loss(
            self.algorithm,
            anchor=self.ratio_anchor,
            reduction=self.loss_reduction,
            advantage_std=self.advantage_std,
            clip_low=self.clip_eps,
            clip_high=self.clip_eps_high,
            correction=self.importance_correction,
            cap=self.importance_cap,
            floor=self.importance_floor,
            dual_clip=self.dual_clip,
            horizon=self.loss_horizon,
        )


class ExtraLossFields(BaseModel):
    """What is added to the policy loss."""

    kl_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the KL penalty to a reference model; 0: none.",
    )
    reference_model: str | None = Field(
        default=None,
        min_length=1,
        description="Hub name or directory of the frozen model of the KL penalty, scored in the "
        "trainer where groups carry no ref_logprobs; groups: every group carries them. none: under "
        "LoRA the model without its adapters, else kl_coef is refused.",
    )
    kl_unbiased: bool = Field(
        default=False,
        description="Multiply the KL estimate by the policy's ratio, which makes the gradient of "
        "k1 and k3 that of KL(policy || reference); TRL's use_bias_correction_kl.",
    )
    kl_estimator: KlEstimator = Field(
        default="k3",
        description="Estimator of that KL; k1 as a loss penalises nothing in expectation.",
    )
    sft_coef: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the likelihood of trajectories marked sft.",
    )
    distill_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the distillation from the groups' teacher arrays; 0: none, and "
        "groups that carry them are refused.",
    )
    distill_loss: Literal["cross_entropy", "reverse_kl"] = Field(
        default="cross_entropy",
        description="Cross entropy to the teacher's top tokens, or reverse KL within them.",
    )
    distill_temperature: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Divides the teacher's logprobs and the student's logits.",
    )

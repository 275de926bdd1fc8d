"""Settings of advantages and policy losses: names, defaults, and the loss that they select.

This module does not import torch, for the sake of the command line. The classes are in
`example_trainer.loss`: `POLICY_LOSSES` and `CORRECTION_CLASSES` have the same keys. Functions of
the user's own are loaded by `example_trainer.custom`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from atroposlib.errors import ConfigError

AlgorithmName = Literal[
    "dapo", "grpo", "dr_grpo", "dual_clip", "gspo", "cispo", "dppo", "ipo", "importance_sampling"
]
Anchor = Literal["trainer", "inference"]
Reduction = Literal["token_mean", "sequence_mean", "dr_grpo", "sequence_sum", "sum"]
AdvantageStd = Literal["sample", "population", "none"]
CorrectionName = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Algorithm:
    """A policy loss and the default settings of its paper."""

    paper: str
    reduction: Reduction = "token_mean"
    advantage_std: AdvantageStd = "population"
    anchors: tuple[Anchor, ...] = ("trainer", "inference")
    """Possible denominators of its ratio; the first is the default."""
    clip_high: float | None = None
    """Default upper clip; None: the same as the lower one."""
    takes_clip: bool = True
    """Whether `clip_low` and `clip_high` are arguments of the class."""


@dataclass(frozen=True)
class CorrectionRow:
    """Default bounds of a correction for the mismatch between sampler and trainer."""

    cap: float
    floor: float | None = None
    """Lower bound, None if the class has none."""


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "dapo": Algorithm("arXiv:2503.14476", clip_high=0.28),
    "grpo": Algorithm("arXiv:2402.03300", reduction="sequence_mean"),
    "dr_grpo": Algorithm("arXiv:2503.20783", reduction="dr_grpo", advantage_std="none"),
    "dual_clip": Algorithm("arXiv:1912.09729"),
    "gspo": Algorithm("arXiv:2507.18071", reduction="sequence_mean"),
    "cispo": Algorithm("arXiv:2506.13585", clip_high=0.28),
    "dppo": Algorithm(
        "prime-rl, default loss", advantage_std="none", anchors=("inference",), takes_clip=False
    ),
    "ipo": Algorithm(
        "prime-rl, ipo loss", advantage_std="none", anchors=("inference",), takes_clip=False
    ),
    "importance_sampling": Algorithm(
        "Tinker, importance_sampling",
        advantage_std="none",
        anchors=("inference", "trainer"),
        takes_clip=False,
    ),
}

CORRECTIONS: dict[CorrectionName, CorrectionRow] = {
    "token_truncate": CorrectionRow(cap=2.0),
    "token_mask": CorrectionRow(cap=5.0, floor=0.5),
    "sequence_truncate": CorrectionRow(cap=2.0),
    "sequence_mask": CorrectionRow(cap=3.0, floor=0.0),
    "geometric_mask": CorrectionRow(cap=1.01, floor=0.99),
}


DEFAULT_ALGORITHM: AlgorithmName = "dapo"
DEFAULT_CLIP = 0.2
DEFAULT_DUAL_CLIP = 3.0


@dataclass(frozen=True)
class CorrectionChoice:
    """A correction with the arguments of its class."""

    name: CorrectionName
    bounds: dict[str, float]


@dataclass(frozen=True)
class LossChoice:
    """Every setting of the policy loss, with `auto` resolved."""

    name: str
    """An algorithm's name, or `loss_fn`."""
    anchor: Anchor
    reduction: Reduction
    advantage_std: AdvantageStd
    clip_low: float
    clip_high: float
    bounds: dict[str, float]
    """Arguments of the class of the algorithm."""
    correction: CorrectionChoice | None


def refuse_double_count(anchor: Anchor, *, is_corrected: bool) -> None:
    """Raise `ConfigError` if a correction would count the ratio to the sampler twice."""
    if anchor == "inference" and is_corrected:
        raise ConfigError(
            "ratio_anchor=inference already weights each token by exp(trainer - inference "
            "logprob); an importance_correction or importance_cap would count that mismatch "
            "twice. Leave them out, or use ratio_anchor=trainer"
        )


class GrpoFields(BaseModel):
    """Advantages and the policy loss."""

    algorithm: AlgorithmName = Field(
        default=DEFAULT_ALGORITHM,
        description="Policy loss; it determines the defaults of the settings below.",
    )
    loss_fn: str | None = Field(
        default=None,
        min_length=1,
        description="Policy loss of your own in place of the algorithm's: FILE.py:NAME or "
        "MODULE:NAME of a function that returns the loss of every token.",
    )
    loss_fn_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Additional arguments of loss_fn by name, as JSON.",
    )
    advantage_fn: str | None = Field(
        default=None,
        min_length=1,
        description="Advantages of your own: FILE.py:NAME or MODULE:NAME of a function that turns "
        "the scores of a group into its advantages.",
    )
    advantage_fn_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Additional arguments of advantage_fn by name, as JSON.",
    )
    policy_coef: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the policy loss; 0: train on a teacher or on demonstrations only.",
    )
    clip_eps: float = Field(
        default=DEFAULT_CLIP, gt=0, le=1, description="Lower bound of the ratio: 1 - clip_eps."
    )
    clip_eps_high: float | None = Field(
        default=None,
        gt=0,
        description="Upper bound of the ratio: 1 + clip_eps_high; none: 0.28 for dapo and cispo, "
        "else the same as clip_eps.",
    )
    dual_clip: float = Field(
        default=DEFAULT_DUAL_CLIP,
        gt=1,
        allow_inf_nan=False,
        description="Upper bound of the ratio for negative advantages (dual_clip).",
    )
    ratio_anchor: Literal["auto", Anchor] = Field(
        default="auto",
        description="Denominator of the ratio: the trainer's own logprobs before the step, or the "
        "inference engine's (without importance correction). auto: inference for dppo, ipo and "
        "importance_sampling, else trainer.",
    )
    importance_correction: Literal["auto", "none", CorrectionName] = Field(
        default="auto",
        description="Weight exp(trainer - inference logprob) for the mismatch with the sampler: "
        "truncated or masked (IcePop) per token, truncated or masked per sequence, or unbounded "
        "with sequences masked by their geometric mean. auto: none with the inference anchor, "
        "else token_truncate, or token_mask if importance_floor is given.",
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
        default=None,
        ge=1,
        description="Constant sequence length in the denominator of dr_grpo; none: seq_len.",
    )
    advantage_std: Literal["auto", AdvantageStd] = Field(
        default="auto",
        description="Standard deviation by which a group's centered scores are divided. auto: none "
        "for dr_grpo, dppo, ipo and importance_sampling, else population.",
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
        description="Number of tokens before overlong_max_tokens over which the penalty grows "
        "linearly.",
    )
    truncated_completions: Literal["train", "mask"] = Field(
        default="train",
        description="Whether to train on trajectories truncated by seq_len or by the engine, or to "
        "mask them (overlong filtering). Truncation is determined by the group's finish_reasons; "
        "without them, a completion of generation_params.max_tokens tokens counts as truncated.",
    )
    max_token_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Maximum age in optimizer steps of the policy version that sampled a token; "
        "older tokens are masked, the others of their group stay. Tokens of unknown version stay. "
        "A group without token_versions was sampled with its policy_version. none: no limit.",
    )
    logprobs_mode: Literal["auto", "raw", "processed"] = Field(
        default="auto",
        description="Whether the engine's logprobs are after temperature scaling (processed) or "
        "before (raw). The trainer divides its logits by the temperature in either case, and "
        "corrects raw logprobs by the effect of that. auto: processed for an engine launched here, "
        "else as the engine reports, else raw.",
    )
    unsupported_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="Whether to reject or ignore group fields and overrides that the loss does not "
        "use.",
    )
    on_bad_group: Literal["skip", "stop"] = Field(
        default="skip",
        description="Handling of a group that is malformed or rejected: leave it out of its batch "
        "and count it (train/bad_groups), or end the run with the reason.",
    )
    allow_tokenized_from_text: bool = Field(
        default=False,
        description="Whether the policy loss accepts groups whose tokens were made from the text "
        "of a server without token ids; they have no logprobs and may differ from those sampled.",
    )

    @property
    def loss_choice(self) -> LossChoice:
        """The policy loss with `auto` resolved.

        Raises:
            ConfigError: two settings contradict each other, or one has no effect.
        """
        self._refuse_idle()
        row, name = ALGORITHMS[self.algorithm], str(self.algorithm)
        if self.loss_fn is not None:
            row, name = Algorithm(self.loss_fn, takes_clip=False), "loss_fn"
        anchor = row.anchors[0] if self.ratio_anchor == "auto" else self.ratio_anchor
        if anchor not in row.anchors:
            raise ConfigError(
                f"ratio_anchor={anchor}: {name} is defined on the ratio to the "
                f"{row.anchors[0]} logprobs; leave ratio_anchor at auto"
            )
        is_corrected = self.importance_correction not in ("auto", "none")
        refuse_double_count(anchor, is_corrected=is_corrected or self.importance_cap is not None)
        reduction = row.reduction if self.loss_reduction == "auto" else self.loss_reduction
        clip_high = self.clip_eps_high
        if not row.takes_clip and (self.clip_eps != DEFAULT_CLIP or clip_high is not None):
            raise ConfigError(f"clip_eps and clip_eps_high: {name} has no clip; leave them out")
        if name != "dual_clip" and self.dual_clip != DEFAULT_DUAL_CLIP:
            raise ConfigError(
                f"dual_clip={self.dual_clip}: needs algorithm=dual_clip, this is {name}"
            )
        if self.loss_horizon is not None and reduction != "dr_grpo":
            raise ConfigError(
                f"loss_horizon={self.loss_horizon}: needs loss_reduction=dr_grpo, "
                f"this is {reduction}"
            )
        if clip_high is None:
            clip_high = self.clip_eps if row.clip_high is None else row.clip_high
        bounds = {"clip_low": self.clip_eps, "clip_high": clip_high} if row.takes_clip else {}
        if name == "dual_clip":
            bounds["dual_clip"] = self.dual_clip
        return LossChoice(
            name=name,
            anchor=anchor,
            reduction=reduction,
            advantage_std=row.advantage_std if self.advantage_std == "auto" else self.advantage_std,
            clip_low=self.clip_eps,
            clip_high=clip_high,
            bounds=bounds,
            correction=self._correction(anchor),
        )

    def _refuse_idle(self) -> None:
        for name in ("loss_fn", "advantage_fn"):
            if getattr(self, f"{name}_args") and getattr(self, name) is None:
                raise ConfigError(f"{name}_args has no effect without {name}")
            if getattr(self, name) is not None and not self.policy_coef:
                raise ConfigError(f"{name} has no effect with policy_coef=0; leave one out")
        if self.loss_fn is not None and self.algorithm != DEFAULT_ALGORITHM:
            raise ConfigError(
                f"algorithm={self.algorithm} and loss_fn={self.loss_fn} are two policy losses; "
                "leave one out"
            )
        if self.advantage_fn is not None and self.advantage_std != "auto":
            raise ConfigError(
                f"advantage_std={self.advantage_std} has no effect with advantage_fn; leave it out"
            )

    def _correction(self, anchor: Anchor) -> CorrectionChoice | None:
        name, cap, floor = self.importance_correction, self.importance_cap, self.importance_floor
        if name == "none" or (name == "auto" and anchor == "inference"):
            if cap is not None or floor is not None:
                raise ConfigError(
                    "importance_cap and importance_floor have no effect without a correction; "
                    "leave them out, or set importance_correction"
                )
            return None
        if name == "auto":
            name = "token_truncate" if floor is None else "token_mask"
        row = CORRECTIONS[name]
        if row.floor is None and floor is not None:
            raise ConfigError(
                f"importance_floor={floor}: {name} has no lower bound; use token_mask, "
                "sequence_mask or geometric_mask"
            )
        cap = row.cap if cap is None else cap
        floor = row.floor if floor is None else floor
        if floor is not None and floor >= cap:
            raise ConfigError(f"importance_floor={floor} must be below importance_cap={cap}")
        return CorrectionChoice(
            name, {"cap": cap} if floor is None else {"cap": cap, "floor": floor}
        )

"""Names of the policy losses and corrections, their defaults, and how the settings choose one.

Importing this module does not import torch: the command line reads it. The classes are in
`example_trainer.loss`, in `POLICY_LOSSES` and `CORRECTION_CLASSES` under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atroposlib.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "CORRECTIONS",
    "DEFAULT_CLIP",
    "DEFAULT_DUAL_CLIP",
    "AdvantageStd",
    "Algorithm",
    "AlgorithmName",
    "Anchor",
    "CorrectionChoice",
    "CorrectionName",
    "CorrectionRow",
    "KlEstimator",
    "LossChoice",
    "Reduction",
    "choose_loss",
    "refuse_double_count",
]

AlgorithmName = Literal[
    "dapo",
    "grpo",
    "dr_grpo",
    "dual_clip",
    "gspo",
    "cispo",
    "dppo",
    "ipo",
    "importance_sampling",
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
    """A policy loss and the settings its paper pairs it with."""

    paper: str
    reduction: Reduction = "token_mean"
    advantage_std: AdvantageStd = "population"
    anchors: tuple[Anchor, ...] = ("trainer", "inference")
    """What its ratio may divide by; the first is the default."""
    clip_high: float | None = None
    """Upper clip where the flag is not given, None for the lower one mirrored."""
    takes_clip: bool = True
    """Whether `clip_low` and `clip_high` are arguments of the class."""


@dataclass(frozen=True)
class CorrectionRow:
    """A correction for the mismatch between sampler and trainer, and its usual bounds."""

    cap: float
    floor: float | None = None
    """Lower bound, None if the class takes none."""


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "dapo": Algorithm("arXiv:2503.14476", clip_high=0.28),
    "grpo": Algorithm("arXiv:2402.03300", reduction="sequence_mean"),
    "dr_grpo": Algorithm("arXiv:2503.20783", reduction="dr_grpo", advantage_std="none"),
    "dual_clip": Algorithm("arXiv:1912.09729"),
    "gspo": Algorithm("arXiv:2507.18071", reduction="sequence_mean"),
    "cispo": Algorithm("arXiv:2506.13585", clip_high=0.28),
    "dppo": Algorithm(
        "prime-rl, default loss",
        advantage_std="none",
        anchors=("inference",),
        takes_clip=False,
    ),
    "ipo": Algorithm(
        "prime-rl, ipo loss",
        advantage_std="none",
        anchors=("inference",),
        takes_clip=False,
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


DEFAULT_CLIP = 0.2
DEFAULT_DUAL_CLIP = 3.0


@dataclass(frozen=True)
class CorrectionChoice:
    """A correction with its bounds."""

    name: CorrectionName
    cap: float
    floor: float | None


@dataclass(frozen=True)
class LossChoice:
    """Every setting of the policy loss, nothing left to `auto`."""

    name: AlgorithmName
    anchor: Anchor
    reduction: Reduction
    advantage_std: AdvantageStd
    clip_low: float
    clip_high: float
    correction: CorrectionChoice | None

    @property
    def algorithm(self) -> Algorithm:
        """The registry row."""
        return ALGORITHMS[self.name]


def choose_loss(
    name: AlgorithmName = "dapo",
    *,
    anchor: Literal["auto", Anchor] = "auto",
    reduction: Literal["auto", Reduction] = "auto",
    advantage_std: Literal["auto", AdvantageStd] = "auto",
    clip_low: float = DEFAULT_CLIP,
    clip_high: float | None = None,
    correction: Literal["auto", "none", CorrectionName] = "auto",
    cap: float | None = None,
    floor: float | None = None,
    dual_clip: float = DEFAULT_DUAL_CLIP,
    horizon: int | None = None,
) -> LossChoice:
    """Fill in what the algorithm brings.

    Args:
        name: The algorithm.
        anchor: Denominator of the ratio; auto: the algorithm's own.
        reduction: Denominator of the loss; auto: the algorithm's own.
        advantage_std: Deviation that divides a group's scores; auto: the algorithm's own.
        clip_low: Ratios below 1 - this are clipped.
        clip_high: Ratios above 1 + this are clipped; None: the algorithm's own.
        correction: Weight against the sampler's mismatch; auto: truncated per token under the
            trainer anchor (masked when a floor is given), none under the inference anchor.
        cap: Upper bound of the correction; None: the correction's own.
        floor: Lower bound of the correction; None: the correction's own.
        dual_clip: Bound of `dual_clip`, the algorithm.
        horizon: Tokens that `dr_grpo`, the reduction, divides by; None: not given.

    Raises:
        ConfigError: two settings contradict each other, or one has nothing to act on.
    """
    row = ALGORITHMS[name]
    real_anchor = row.anchors[0] if anchor == "auto" else anchor
    if real_anchor not in row.anchors:
        raise ConfigError(
            f"ratio_anchor={real_anchor}: {name} is defined on the ratio to the "
            f"{row.anchors[0]} logprobs; leave ratio_anchor at auto"
        )
    refuse_double_count(
        real_anchor, is_corrected=correction not in ("auto", "none") or cap is not None
    )
    real_reduction = row.reduction if reduction == "auto" else reduction
    if not row.takes_clip and (clip_low != DEFAULT_CLIP or clip_high is not None):
        raise ConfigError(f"clip_eps and clip_eps_high: {name} has no clip; leave them out")
    _refuse_idle(name, real_reduction, dual_clip=dual_clip, horizon=horizon)
    if clip_high is None:
        clip_high = clip_low if row.clip_high is None else row.clip_high
    return LossChoice(
        name=name,
        anchor=real_anchor,
        reduction=real_reduction,
        advantage_std=row.advantage_std if advantage_std == "auto" else advantage_std,
        clip_low=clip_low,
        clip_high=clip_high,
        correction=_choose_correction(correction, real_anchor, cap=cap, floor=floor),
    )


def _refuse_idle(
    name: AlgorithmName, reduction: Reduction, *, dual_clip: float, horizon: int | None
) -> None:
    if name != "dual_clip" and dual_clip != DEFAULT_DUAL_CLIP:
        raise ConfigError(f"dual_clip={dual_clip}: needs algorithm=dual_clip, this is {name}")
    if horizon is not None and reduction != "dr_grpo":
        raise ConfigError(
            f"loss_horizon={horizon}: needs loss_reduction=dr_grpo, this is {reduction}"
        )


def refuse_double_count(anchor: Anchor, *, is_corrected: bool) -> None:
    """Refuse a ratio to the sampler together with a weight against the sampler's mismatch.

    Raises:
        ConfigError: both are asked for.
    """
    if anchor == "inference" and is_corrected:
        raise ConfigError(
            "ratio_anchor=inference already weighs each token by exp(trainer - inference "
            "logprob); an importance_correction or importance_cap would count that mismatch "
            "twice. Leave them out, or use ratio_anchor=trainer"
        )


def _choose_correction(
    name: Literal["auto", "none", CorrectionName],
    anchor: Anchor,
    *,
    cap: float | None,
    floor: float | None,
) -> CorrectionChoice | None:
    if name == "none" or (name == "auto" and anchor == "inference"):
        if cap is not None or floor is not None:
            raise ConfigError(
                "importance_cap and importance_floor bound a correction and there is none; "
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
    return CorrectionChoice(name, cap, floor)

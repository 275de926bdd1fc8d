"""The algorithms and corrections by name: where each lives and what it brings as defaults.

Free of torch, because the command line reads it. `load` imports the class.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ALGORITHMS",
    "CORRECTIONS",
    "AdvantageStd",
    "Algorithm",
    "AlgorithmName",
    "Anchor",
    "CorrectionName",
    "CorrectionRow",
    "KlEstimator",
    "Reduction",
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

_HERE = "example_trainer.losses"


@dataclass(frozen=True)
class Algorithm:
    """One row: a policy loss and the settings its paper pairs it with."""

    home: str
    """Module and class, `clipped:Grpo`."""
    paper: str
    reduction: Reduction = "token_mean"
    advantage_std: AdvantageStd = "population"
    anchors: tuple[Anchor, ...] = ("trainer", "inference")
    """What its ratio may divide by; the first is the default."""
    clip_high: float | None = None
    """Upper clip where the flag is not given, None for the lower one mirrored."""
    takes_clip: bool = True
    """Whether `clip_low` and `clip_high` are arguments of the class."""

    def load(self) -> type[Any]:
        """Import and return the class."""
        return _load(self.home)


@dataclass(frozen=True)
class CorrectionRow:
    """One row: a weight against the sampler's mismatch and its usual bounds."""

    home: str
    cap: float
    floor: float | None = None
    """Lower bound, None where the class has none."""

    def load(self) -> type[Any]:
        """Import and return the class."""
        return _load(self.home)


def _load(home: str) -> type[Any]:
    module, name = home.split(":")
    loaded: type[Any] = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    return loaded


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "dapo": Algorithm("clipped:Dapo", "arXiv:2503.14476", clip_high=0.28),
    "grpo": Algorithm("clipped:Grpo", "arXiv:2402.03300", reduction="sequence_mean"),
    "dr_grpo": Algorithm(
        "clipped:DrGrpo", "arXiv:2503.20783", reduction="dr_grpo", advantage_std="none"
    ),
    "dual_clip": Algorithm("clipped:DualClip", "arXiv:1912.09729"),
    "gspo": Algorithm("gspo:Gspo", "arXiv:2507.18071", reduction="sequence_mean"),
    "cispo": Algorithm("cispo:Cispo", "arXiv:2506.13585", clip_high=0.28),
    "dppo": Algorithm(
        "dppo:Dppo",
        "prime-rl, default loss",
        advantage_std="none",
        anchors=("inference",),
        takes_clip=False,
    ),
    "ipo": Algorithm(
        "dppo:Ipo",
        "prime-rl, ipo loss",
        advantage_std="none",
        anchors=("inference",),
        takes_clip=False,
    ),
    "importance_sampling": Algorithm(
        "importance_sampling:ImportanceSampling",
        "Tinker, importance_sampling",
        advantage_std="none",
        anchors=("inference", "trainer"),
        takes_clip=False,
    ),
}

CORRECTIONS: dict[CorrectionName, CorrectionRow] = {
    "token_truncate": CorrectionRow("corrections:TokenTruncation", cap=2.0),
    "token_mask": CorrectionRow("corrections:TokenMask", cap=5.0, floor=0.5),
    "sequence_truncate": CorrectionRow("corrections:SequenceTruncation", cap=2.0),
    "sequence_mask": CorrectionRow("corrections:SequenceMask", cap=3.0, floor=0.0),
    "geometric_mask": CorrectionRow("corrections:GeometricMask", cap=1.01, floor=0.99),
}

"""Group advantages: what turns the scores of one group into the multiplier of its log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

__all__ = ["group_advantages"]


def group_advantages(
    scores: Sequence[float],
    *,
    std: Literal["sample", "population", "none"],
    eps: float,
) -> list[float]:
    """Centre the scores of one group and divide them by their deviation.

    `(score - mean) / (deviation + eps)`. `sample` with 1e-6 is verl's number, with 1e-4 TRL's;
    `population` with 0 the earlier Atropos trainer's; `none` is Dr.GRPO's, the mean baseline
    alone. A group whose scores are all equal yields zeros: it carries no signal. A group of one
    keeps its raw score, because it has no siblings to be compared with.

    Args:
        scores: [G] one finite score per trajectory.
        std: Which deviation divides.
        eps: Added to the deviation.

    Returns:
        [G] advantages, in the order of `scores`.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1; Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783, for `none`.
    """
    if len(scores) == 1:
        return [float(scores[0])]
    if min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    centred = [score - mean for score in scores]
    if std == "none":
        return centred
    degrees = len(scores) - 1 if std == "sample" else len(scores)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / degrees)
    return [c / (deviation + eps) for c in centred]

"""Group advantages: from the scores of one group to the multipliers of its log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

__all__ = ["group_advantages", "overlong_penalty"]


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


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return what DAPO's overlong shaping adds to the score of a completion, from 0 down to -1.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`, -1 beyond.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
    """
    if num_tokens >= max_tokens:
        return -1.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0

"""Which level the next exercise has: one up when the last results at a level are good. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from environments.infinimath.problems import DESCRIPTIONS, MAX_LEVEL

__all__ = ["MathCurriculum"]

KEPT_RESULTS = 1000


class MathCurriculum:
    """The level of the exercises and what came of them.

    Args:
        level: where it starts, 1 to 7.
        progress_threshold: mean result at which it goes up.
        min_evaluations: results that mean is taken of.
        history: restored results, level -> 0s and 1s; the levels may be texts, as in JSON.
    """

    def __init__(
        self,
        *,
        level: int,
        progress_threshold: float,
        min_evaluations: int,
        history: Mapping[int | str, Sequence[int]] | None = None,
    ) -> None:
        self.level = level
        self.progress_threshold = progress_threshold
        self.min_evaluations = min_evaluations
        self.history = {int(key): list(values) for key, values in (history or {}).items()}

    def record(self, level: int, *, is_correct: bool) -> None:
        """Take note of one answer to an exercise of a level."""
        results = [*self.history.get(level, []), int(is_correct)]
        self.history[level] = results[-max(KEPT_RESULTS, self.min_evaluations) :]

    def advance(self) -> bool:
        """Go up one level when the latest results at this one allow it; tells whether it did."""
        recent = self.history.get(self.level, [])[-self.min_evaluations :]
        if self.level == MAX_LEVEL or len(recent) < self.min_evaluations:
            return False
        if statistics.fmean(recent) < self.progress_threshold:
            return False
        self.level += 1
        return True

    def success_rate(self) -> float:
        """Return the mean of the latest results at the level, 0.0 without any."""
        recent = self.history.get(self.level, [])[-self.min_evaluations :]
        return statistics.fmean(recent) if recent else 0.0

    def metrics(self) -> dict[str, float | str]:
        """Return where the curriculum stands."""
        rate = self.success_rate()
        return {
            "curriculum/current_level": self.level,
            "curriculum/max_level": MAX_LEVEL,
            "curriculum/progress_percent": 100 * (self.level - 1) / (MAX_LEVEL - 1),
            "curriculum/level_description": DESCRIPTIONS[self.level],
            "curriculum/current_level_success_rate": rate,
            "curriculum/threshold_to_advance": self.progress_threshold,
            "curriculum/remaining_to_threshold": max(0.0, self.progress_threshold - rate),
        }

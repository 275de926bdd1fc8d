"""The difficulty of a task's next item, from the scores of its last ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["Curriculum"]

START = 0.3
WINDOW = 5
STEP, JUMP = 0.05, 0.1
TOO_EASY, TOO_HARD = 0.9, 0.3


class Curriculum:
    """The complexity of each task, in [0, 1], moved towards a target accuracy.

    After every group the mean of the last five group accuracies decides: above 0.9 or below 0.3
    the complexity jumps by 0.1, otherwise it moves by 0.05, less when the five vary much.

    Args:
        target_accuracy: accuracy at which the complexity rests.
        accuracies: restored state, task to its last group accuracies.
        complexities: restored state, task to complexity.
    """

    def __init__(
        self,
        *,
        target_accuracy: float,
        accuracies: Mapping[str, list[float]] | None = None,
        complexities: Mapping[str, float] | None = None,
    ) -> None:
        self.target_accuracy = target_accuracy
        self.accuracies = {task: list(values) for task, values in (accuracies or {}).items()}
        self.complexities = dict(complexities or {})

    def complexity(self, task: str) -> float:
        """Return the complexity of a task's next item."""
        return self.complexities.get(task, START)

    def record(self, task: str, accuracy: float) -> None:
        """Take note of one group's accuracy, in [0, 1], and move the task's complexity."""
        recent = [*self.accuracies.get(task, []), accuracy][-WINDOW:]
        self.accuracies[task] = recent
        moved = self.complexity(task) + _move(recent, self.target_accuracy)
        self.complexities[task] = min(1.0, max(0.0, moved))

    def metrics(self) -> dict[str, float]:
        """Return the complexity of every task met so far, and their mean."""
        if not self.complexities:
            return {}
        values = {f"curriculum/{task}": c for task, c in self.complexities.items()}
        return {**values, "curriculum/mean_complexity": statistics.fmean(values.values())}

    def state(self) -> dict[str, Any]:
        """Return what the constructor restores, for a checkpoint."""
        return {"accuracies": self.accuracies, "complexities": self.complexities}


def _move(recent: list[float], target: float) -> float:
    accuracy = statistics.fmean(recent)
    if accuracy > TOO_EASY:
        return JUMP
    if accuracy < TOO_HARD:
        return -JUMP
    if accuracy == target:
        return 0.0
    stability = max(0.5, 1 - statistics.pstdev(recent))
    return STEP * stability if accuracy > target else -STEP * stability

r"""The exercises for practice without a model: get one, submit an answer, advance by level.

task = InfiniteMath(starting_level=2)
task.get_state()["problem"]          # "What is 15 percent of 240?"
task.submit_answer(r"\boxed{36}")    # Submission(is_correct=True, ...)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atroposlib.tasks.infinimath import (
    DESCRIPTIONS,
    Exercise,
    GeneratorKind,
    MathCurriculum,
    ProblemSource,
    is_equal,
    read_answer,
)

__all__ = ["InfiniteMath", "Submission"]


class Submission(NamedTuple):
    """Result of an answer."""

    is_correct: bool
    is_over: bool
    """Whether the exercise has ended and the next one is current."""
    has_advanced: bool
    """Whether the next exercise is of a higher level."""
    solution: str | None
    """Solution of the exercise that ended."""


class InfiniteMath:
    """A sequence of exercises; the arguments are settings of `InfiniteMathEnvConfig`."""

    def __init__(
        self,
        *,
        starting_level: int = 1,
        progress_threshold: float = 0.8,
        min_evaluations: int = 5,
        max_attempts_per_problem: int = 3,
        generator: GeneratorKind = "auto",
        seed: int = 0,
    ) -> None:
        self._source = ProblemSource(generator, seed=seed)
        self._curriculum = MathCurriculum(
            level=starting_level,
            progress_threshold=progress_threshold,
            min_evaluations=min_evaluations,
        )
        self._starting_level = starting_level
        self._max_attempts = max_attempts_per_problem
        self.reset()

    def reset(self) -> dict[str, Any]:
        """Clear all results, start with the first exercise and return the state."""
        self._curriculum.level = self._starting_level
        self._curriculum.history = {}
        self._number = -1
        self._pose()
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """Return the exercise and the state of the curriculum, without the solution."""
        return {
            "problem": self._problem.question,
            "level": self._problem.level,
            "level_description": DESCRIPTIONS[self._problem.level],
            "attempts": self._attempts,
            "max_attempts": self._max_attempts,
            "success_rate": self._curriculum.success_rate(),
        }

    def submit_answer(self, answer: str) -> Submission:
        """Check an answer; a right one or the last attempt ends the exercise."""
        is_correct = is_equal(read_answer(answer), self._problem.solution)
        self._attempts += 1
        if not is_correct and self._attempts < self._max_attempts:
            return Submission(False, False, False, None)
        solution = self._problem.solution
        self._curriculum.record(self._problem.level, is_correct=is_correct)
        has_advanced = self._curriculum.advance()
        self._pose()
        return Submission(is_correct, True, has_advanced, solution)

    def _pose(self) -> None:
        self._number += 1
        self._attempts = 0
        self._problem: Exercise = self._source.make(self._curriculum.level, self._number)

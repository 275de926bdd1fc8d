"""What the mathematics environments log, gathered between two logs."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.single_turn import Trajectory

__all__ = ["MathFigures", "eval_figures", "subset_counts"]

TABLES = {
    "normal": "train/normal_rollouts",
    "rlaif": "train/rlaif_rollouts",
    "judge": "judge_train/judge_rollouts",
    "selfcorrect": "judge_train/selfcorrect_rollouts",
}
TABLE_COLUMNS = ["prompt", "completion", "score", "gold answer"]


class MathFigures:
    """Values since the last log, and the latest rollouts of each kind.

    Args:
        most_rows: rows a table keeps.
    """

    def __init__(self, most_rows: int) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._rows: dict[str, deque[list[Any]]] = {kind: deque(maxlen=most_rows) for kind in TABLES}

    def note(self, name: str, *values: float) -> None:
        """Add values whose mean is logged under a name."""
        self._values[name] += values

    def note_solutions(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> None:
        """Add a group of solutions; a score of 1.0 is a correct one.

        Args:
            trajectories: [G].
            scores: [G].
        """
        self.note("train/pass_at_groupsize", float(1.0 in scores))
        self.note("train/percent_correct", *(float(score == 1.0) for score in scores))
        self.note("train/percent_overanswer", *(float(t.is_truncated) for t in trajectories))
        for trajectory, score in zip(trajectories, scores, strict=True):
            kind = "correct" if score == 1.0 else "incorrect"
            self.note(f"train/avg_{kind}_answer_len", trajectory.num_completion_tokens)

    def note_rollout(
        self, kind: str, prompt: str, completion: str, score: float, gold: str
    ) -> None:
        """Keep a row for the table of a kind."""
        self._rows[kind].append([prompt, completion, score, gold])

    def take(self) -> dict[str, float]:
        """Return the means, and begin anew."""
        means = {name: statistics.fmean(values) for name, values in self._values.items() if values}
        self._values.clear()
        return means

    def take_tables(self) -> dict[str, list[list[Any]]]:
        """Return the rows of each table that has some, and begin anew."""
        tables = {TABLES[kind]: list(rows) for kind, rows in self._rows.items() if rows}
        for rows in self._rows.values():
            rows.clear()
        return tables


def eval_figures(correct: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Return `eval/<subset>_percent_correct` and `eval/overall_percent_correct`.

    Args:
        correct: subset -> whether each of its answers is correct; one answer or more in all.
    """
    everything = {**correct, "overall": [value for values in correct.values() for value in values]}
    return {f"eval/{name}_percent_correct": statistics.fmean(v) for name, v in everything.items()}


def subset_counts(correct: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Return `<subset>_accuracy`, `_total` and `_correct` of each subset, and of all `overall`."""
    everything = {**correct, "overall": [value for values in correct.values() for value in values]}
    return {
        f"{name}_{what}": value
        for name, values in everything.items()
        for what, value in (
            ("accuracy", statistics.fmean(values)),
            ("total", len(values)),
            ("correct", sum(values)),
        )
    }

"""`PercentCorrect`: the metrics of environments whose answers are right or wrong."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.single_turn_env import SingleTurnEnv

__all__ = ["PercentCorrect"]


class PercentCorrect(SingleTurnEnv):
    """Logs the part of the answers whose score is above zero, in training and in evaluations."""

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return `train/percent_correct`."""
        return {"train/percent_correct": statistics.fmean(score > 0 for score in scores)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return `eval/percent_correct`."""
        return {"eval/percent_correct": statistics.fmean(s["score"] > 0 for s in samples)}

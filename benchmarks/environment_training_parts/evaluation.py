"""An environment's own `evaluate` command against the running engine, and what came out of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Measured", "evaluation_settings", "read_evaluation"]


@dataclass(frozen=True)
class Measured:
    """The result of one evaluation."""

    values: Sequence[float]
    """One per episode."""

    metrics: Mapping[str, float]
    """What the environment itself says."""

    @property
    def mean(self) -> float:
        """Mean over the episodes."""
        return statistics.fmean(self.values)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values))


def evaluation_settings(
    training: Mapping[str, Any], differing: Mapping[str, Any], *, folder: Path
) -> dict[str, Any]:
    """Return the settings of an evaluation from those of the training.

    Args:
        training: Sections of the environment's YAML file.
        differing: Settings of its section `env` that are others.
        folder: Where the results go.
    """
    env = {
        **training["env"],
        **differing,
        "data_dir_to_save_evals": str(folder),
        "data_path_to_save_groups": None,
        "metrics_path": str(folder / "evaluation_metrics.jsonl"),
    }
    return {**training, "env": env}


def read_evaluation(folder: Path, value: Callable[[float], float]) -> Measured:
    """Read what `evaluate` has left in a folder.

    Args:
        folder: See `evaluation_settings`.
        value: From the score of an episode to what is averaged.
    """
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    report = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return Measured([value(json.loads(line)["score"]) for line in lines], report["results"]["all"])

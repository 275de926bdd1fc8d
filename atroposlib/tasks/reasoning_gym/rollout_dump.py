"""Saving trajectories for later reading, in files that the page of groups can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atroposlib.envs.delivery import GroupWriter
from atroposlib.envs.single_turn_env import Trajectory
from atroposlib.tasks.reasoning_gym.config import ReasoningGymEnvConfig
from atroposlib.tasks.reasoning_gym.tasks import TaskItem

__all__ = ["RolloutDump"]


class RolloutDump:
    """Writes the trajectories that the settings ask for, each with its own score.

    Args:
        config: `dump_rollouts`, `dump_failed_rollouts`, the score threshold and the folder.
    """

    def __init__(self, config: ReasoningGymEnvConfig) -> None:
        self._config = config
        self._writers: dict[str, GroupWriter] = {}

    def save(
        self,
        item: TaskItem,
        messages: Sequence[Mapping[str, str]],
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
    ) -> None:
        """Write what is wanted of one group.

        Args:
            item: what was asked.
            messages: the prompt.
            trajectories: [G].
            scores: [G] as the task's scorer gave them.
        """
        pairs = list(zip(trajectories, scores, strict=True))
        if self._config.dump_failed_rollouts and not any(scores):
            self._write("failed_rollouts", item, messages, pairs)
        elif self._config.dump_rollouts:
            threshold = self._config.rollout_save_score_threshold
            good = [(trajectory, score) for trajectory, score in pairs if score > threshold]
            self._write("rollouts", item, messages, good)

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _write(
        self,
        kind: str,
        item: TaskItem,
        messages: Sequence[Mapping[str, str]],
        pairs: Sequence[tuple[Trajectory, float]],
    ) -> None:
        if not pairs:
            return
        if kind not in self._writers:
            path = Path(self._config.dump_dir) / f"reasoning_gym_{kind}.jsonl"
            self._writers[kind] = GroupWriter(path)
        record = {
            "task": item.task,
            "complexity": item.complexity,
            "gold_answer": item.entry["answer"],
            "messages": [trajectory.chat(messages) for trajectory, _ in pairs],
            "scores": [score for _, score in pairs],
        }
        self._writers[kind].write(record)

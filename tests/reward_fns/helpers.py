"""Reward functions and a logger with known answers."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.reward_fns import RewardFunction


class ConstantReward(RewardFunction):
    """The same raw reward for every completion."""

    def __init__(self, value: float = 1.0, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.value = value

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.value] * len(completions)


class LengthReward(RewardFunction):
    """The number of characters."""

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [len(self.get_content(each)) for each in completions]


class RaisingReward(RewardFunction):
    """Has a defect."""

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        raise KeyError("solution")


class RecordingLogger:
    """Keeps what it was told to log."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

"""The weighted sum of several reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import MetricLogger, RewardFunction
from atroposlib.errors import ConfigError

__all__ = ["CombinedReward"]

NORMALIZATIONS = ("none", "sum", "minmax")


@registry.register
class CombinedReward(RewardFunction):
    """The weighted sum of reward functions.

    Two constant rewards of 1 with the weights 2 and 3 give 5; with `normalization="sum"` 1.

    With `tolerate_errors=True`, here or for one part, a part that raises is counted, logged and
    omitted from the sum.

    Args:
        rewards: names or configurations, as for `registry.create`.
        normalization: "none"; "sum" divides by the sum of the weights if that is positive;
            "minmax" scales the rewards of one call to [0, 1] unless they are all equal.
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any]],
        normalization: Literal["none", "sum", "minmax"] = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if normalization not in NORMALIZATIONS:
            raise ConfigError(
                f"normalization is {normalization!r}; expected one of {', '.join(NORMALIZATIONS)}"
            )
        self.normalization = normalization
        self.reward_functions = [registry.create(reward) for reward in rewards]

    @property
    def name(self) -> str:
        return self._name or f"combined({','.join(part.name for part in self.reward_functions)})"

    def set_wandb_logger(self, logger: MetricLogger | None) -> None:
        super().set_wandb_logger(logger)
        for part in self.reward_functions:
            part.set_wandb_logger(logger)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return [G] weighted sums, normalized as configured."""
        if not completions:
            return []
        columns = self._weighted(completions, kwargs).values()
        return self._normalize([sum(c[i] for c in columns) for i in range(len(completions))])

    def parts(self, completions: list[Any], **kwargs: Any) -> list[dict[str, float]]:
        """Return [G] the weighted reward of each part by its name; their sums are the rewards.

        Names of parts that occur twice get a number. `normalization` must be "none" or "sum".
        """
        if self.normalization == "minmax":
            raise ConfigError('parts of rewards that are normalized by "minmax" have no sum')
        scale = self.weight / self._divisor()
        columns = self._weighted(completions, kwargs)
        return [
            {name: column[i] * scale for name, column in columns.items()}
            for i in range(len(completions))
        ]

    def _weighted(
        self, completions: list[Any], keywords: Mapping[str, Any]
    ) -> dict[str, list[float]]:
        """Return [G] weighted rewards of each part; zeros for one whose exception is tolerated."""
        columns: dict[str, list[float]] = {}
        for number, part in enumerate(self.reward_functions, start=1):
            tolerates_errors = self.tolerates_errors or part.tolerates_errors
            raw = part.try_compute(completions, keywords, tolerates_errors=tolerates_errors)
            name = part.name if part.name not in columns else f"{part.name}_{number}"
            columns[name] = [0.0] * len(completions)
            if raw is not None:
                columns[name] = [reward * part.weight for reward in raw]
                part.log_metrics(raw, columns[name])
        return columns

    def _divisor(self) -> float:
        sum_of_weights = sum(part.weight for part in self.reward_functions)
        return sum_of_weights if self.normalization == "sum" and sum_of_weights > 0 else 1.0

    def _normalize(self, totals: list[float]) -> list[float]:
        low, high = min(totals), max(totals)
        if self.normalization == "minmax" and high > low:
            return [(total - low) / (high - low) for total in totals]
        divisor = self._divisor()
        return [total / divisor for total in totals]

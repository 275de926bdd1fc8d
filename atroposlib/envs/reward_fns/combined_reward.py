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
        totals = [0.0] * len(completions)
        for part in self.reward_functions:
            tolerates_errors = self.tolerates_errors or part.tolerates_errors
            raw = part.try_compute(completions, kwargs, tolerates_errors=tolerates_errors)
            if raw is None:
                continue
            weighted = [reward * part.weight for reward in raw]
            part.log_metrics(raw, weighted)
            totals = [total + reward for total, reward in zip(totals, weighted, strict=True)]
        return self._normalize(totals)

    def _normalize(self, totals: list[float]) -> list[float]:
        if self.normalization == "sum":
            sum_of_weights = sum(part.weight for part in self.reward_functions)
            return [t / sum_of_weights for t in totals] if sum_of_weights > 0 else totals
        low, high = min(totals), max(totals)
        if self.normalization == "minmax" and high > low:
            return [(total - low) / (high - low) for total in totals]
        return totals

"""The linear length penalty of a group in which everything is right."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from atroposlib.utils.length_penalty import length_factor

__all__ = ["ThresholdLengthPenaltyCalculator", "ThresholdLengthPenaltyConfig"]


@dataclass
class ThresholdLengthPenaltyConfig:
    """Where the penalty begins and where it has taken everything."""

    max_token_length: int
    """L at which the score is 0; at least 1."""
    threshold_percentage: float = 0.5
    """Part of `max_token_length`, in [0, 1], up to which the score stays 1."""


class ThresholdLengthPenaltyCalculator:
    """Ranks the trajectories of a group by length when all of them are right."""

    def __init__(self, config: ThresholdLengthPenaltyConfig) -> None:
        self.config = config

    def apply_length_penalties(
        self, scores: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any] | None:
        """Replace the scores of the group, in place, when every one of them is 1.0.

        Args:
            scores: a group with `scores` [G] and `tokens` [G][L].

        Returns:
            The same group; None when a key is missing or no trajectory has a token.
        """
        if "scores" not in scores or not any(scores.get("tokens") or ()):
            return None
        if all(score == 1.0 for score in scores["scores"]):
            scores["scores"] = [
                length_factor(
                    len(tokens),
                    max_tokens=self.config.max_token_length,
                    free_fraction=self.config.threshold_percentage,
                )
                for tokens in scores["tokens"]
            ]
        return scores

"""Reward for step-by-step text: numbered steps, lists, bullet points, transition words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError

__all__ = ["ReasoningStepsReward", "merge_weights", "reasoning_steps_reward"]

TRANSITIONS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "next",
    "then",
    "finally",
    "subsequently",
    "afterward",
    "lastly",
    "initially",
    "to begin",
    "let's begin",
    "i'll first",
    "after that",
    "in conclusion",
    "eventually",
    "to solve",
    "begin by",
    "understand",
    "analyze",
    "apply",
    "compute",
)

FLAGS = re.IGNORECASE | re.MULTILINE
PATTERNS = {
    "numbered_steps": re.compile(r"\bstep\s+\d+[\s:]", FLAGS),
    "list_numbers": re.compile(r"^[ \t]*\d+\.\s", FLAGS),
    "bullet_points": re.compile(r"^[ \t]*[-*•]\s", FLAGS),
    "transition_words": re.compile(
        rf"\b(?:{'|'.join(words.replace(' ', '[ ]+') for words in TRANSITIONS)})\b", FLAGS
    ),
}
DEFAULT_WEIGHTS = {
    "numbered_steps": 0.5,
    "list_numbers": 0.5,
    "bullet_points": 0.4,
    "transition_words": 0.3,
}


def merge_weights(
    defaults: Mapping[str, float], weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the defaults, overridden by the given weights.

    Raises:
        ConfigError: a weight has an unknown name.
    """
    unknown = set(weights or ()) - set(defaults)
    if unknown:
        raise ConfigError(
            f"no weight is called {', '.join(sorted(unknown))}; expected {', '.join(defaults)}"
        )
    return {**defaults, **(weights or {})}


@registry.register
class ReasoningStepsReward(RewardFunction):
    """A score from 0 to 1 for the number of marks of step-by-step reasoning.

    Each kind of mark adds `min(1, count / min_steps)` times its weight; a long text adds
    `base_score`; the sum is at most 1. `Step 1: a Step 2: b Step 3: c` earns 0.5.

    Args:
        min_words: number of words above which a text earns `base_score`.
        min_steps: number of marks of one kind that earns its whole weight.
        base_score: see above.
        pattern_weights: overrides of the defaults: numbered_steps 0.5, list_numbers 0.5,
            bullet_points 0.4, transition_words 0.3.
        **kwargs: as for `RewardFunction`, such as `weight`.

    Raises:
        ConfigError: a pattern is unknown, or `min_steps` is below 1.
    """

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if min_steps < 1:
            raise ConfigError(f"min_steps is {min_steps}; expected at least 1")
        self.min_words = min_words
        self.min_steps = min_steps
        self.base_score = base_score
        self.pattern_weights = merge_weights(DEFAULT_WEIGHTS, pattern_weights)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self._score(self.get_content(each)) for each in completions]

    def _score(self, text: str) -> float:
        score = self.base_score if len(text.split()) > self.min_words else 0.0
        for kind, pattern in PATTERNS.items():
            count = len(pattern.findall(text))
            score += min(1.0, count / self.min_steps) * self.pattern_weights[kind]
        return min(1.0, score)


def reasoning_steps_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the rewards of `ReasoningStepsReward` with its defaults."""
    return ReasoningStepsReward().compute(completions, **kwargs)

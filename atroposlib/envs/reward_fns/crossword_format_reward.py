"""Reward for crossword answers in the format `1-Across: WORD`."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CrosswordFormatReward", "crossword_format_reward"]

ANSWER = r"(?<!\d)\d+-(?:Across|Down):\s+[A-Z][A-Z\s]*"
DEFAULT_PATTERNS = (f"(?i){ANSWER}", f"(?i)^(?:{ANSWER})+$")
ANSWER_WORD = re.compile(r"(?:Across|Down):\s*(\S+)", re.IGNORECASE)
CLOSING_PUNCTUATION = ".,;:!?)"


@registry.register
class CrosswordFormatReward(RewardFunction):
    """`reward_value` if a pattern matches and all answer words have valid letters only.

    Args:
        format_patterns: regular expressions, one of which must be found; None means an answer such
            as `12-Down: word`.
        reward_value: reward of a well-formed completion.
        penalize_invalid_chars: Whether to check the word after each `Across:` and `Down:`, without
            punctuation at its end.
        valid_chars: allowed letters; case is ignored.
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        format_patterns: Sequence[str | re.Pattern[str]] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = string.ascii_uppercase,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        patterns = DEFAULT_PATTERNS if format_patterns is None else format_patterns
        self.format_patterns = [re.compile(pattern) for pattern in patterns]
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = valid_chars

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [self.get_content(each) for each in completions]
        return [self.reward_value if self._is_formatted(text) else 0.0 for text in texts]

    def _is_formatted(self, text: str) -> bool:
        if not any(pattern.search(text) for pattern in self.format_patterns):
            return False
        return not self.penalize_invalid_chars or all(
            set(word.rstrip(CLOSING_PUNCTUATION).upper()) <= set(self.valid_chars.upper())
            for word in ANSWER_WORD.findall(text)
        )


def crossword_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the rewards of `CrosswordFormatReward` with its defaults."""
    return CrosswordFormatReward().compute(completions, **kwargs)

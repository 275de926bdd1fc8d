"""Whether crossword answers are written as `1-Across: WORD`."""

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
    """`reward_value` when a pattern matches and every answer word has valid letters only.

    Args:
        format_patterns: regular expressions, one of which must be found; None means an answer such
            as `12-Down: word` somewhere, or a text made of nothing else.
        reward_value: what a well-formed completion earns.
        penalize_invalid_chars: examine the word behind each `Across:` and `Down:`, as far as the
            next white space and without closing punctuation.
        valid_chars: the letters allowed, in either case.
        weight: what the reward is multiplied by.
        **kwargs: as for `RewardFunction`.
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
        """Return [G] `reward_value` or 0.0."""
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
    """Return what `CrosswordFormatReward` with its defaults gives."""
    return CrosswordFormatReward().compute(completions, **kwargs)

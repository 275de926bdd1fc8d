"""Reward for a pair of tags such as `<answer>...</answer>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["FormatReward", "format_reward"]

DEFAULT_TAGS = ("think", "answer")


@registry.register
class FormatReward(RewardFunction):
    """1.0 if the completion has a pair `<tag>...</tag>`, 0.0 otherwise.

    Args:
        preferred_tags: one or more tags without brackets; None means `think` and `answer`.
        require_all_tags: Whether every tag must occur, not just one.
        case_sensitive: Whether `<Think>` differs from `<think>`.
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        preferred_tags: Sequence[str] | str | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        tags = DEFAULT_TAGS if preferred_tags is None else preferred_tags
        self.preferred_tags = [tags] if isinstance(tags, str) else list(tags)
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(self._is_formatted(self.get_content(each))) for each in completions]

    def _is_formatted(self, text: str) -> bool:
        text = text if self.case_sensitive else text.lower()
        tags = [tag if self.case_sensitive else tag.lower() for tag in self.preferred_tags]
        found = [_has_pair(text, tag) for tag in tags]
        return bool(found) and (all(found) if self.require_all_tags else any(found))


def _has_pair(text: str, tag: str) -> bool:
    start = text.find(f"<{tag}>")
    return start >= 0 and text.find(f"</{tag}>", start) >= 0


def format_reward(
    completions: list[Any], preferred_tags: Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """Return the rewards of `FormatReward` with these tags."""
    return FormatReward(preferred_tags=preferred_tags).compute(completions, **kwargs)

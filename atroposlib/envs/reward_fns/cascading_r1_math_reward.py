"""Reward for mathematical accuracy, and for the format of correct answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.envs.reward_fns.registry import registry

__all__ = ["accuracy_reward", "cascading_r1_math_reward", "format_reward", "get_completion_content"]

ONE_LEADING_BLOCK = re.compile(r"<think>[^<]*</think>([^<]*)")


def get_completion_content(completion: Any) -> str:
    """Return the text of a completion with any role, or its `str` if it has no text.

    Args:
        completion: a string; a mapping with `content`, or with `content` in its `message`; a list,
            of which the first element counts.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and completion:
        return get_completion_content(completion[0])
    if isinstance(completion, Mapping):
        if "content" in completion:
            return str(completion["content"])
        message = completion.get("message")
        if isinstance(message, Mapping) and "content" in message:
            return str(message["content"])
    return str(completion)


def format_reward(completions: list[Any], reward_value: float = 0.5, **kwargs: Any) -> list[float]:
    """Return [G] `reward_value` for a leading think block, text after it, and no other `<`."""
    matches = [ONE_LEADING_BLOCK.fullmatch(get_completion_content(each)) for each in completions]
    return [reward_value if match and match[1].strip() else 0.0 for match in matches]


def accuracy_reward(completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
    """Return the rewards of `AccuracyReward` with its defaults, for messages of any role."""
    texts = [get_completion_content(each) for each in completions]
    return AccuracyReward().compute(texts, solution)


def cascading_r1_math_reward(
    completions: list[Any], solution: Any = None, **kwargs: Any
) -> list[float]:
    """Return [G] 1.5 for a correct answer in the correct format, 1.0 for a correct one, or 0.0."""
    accuracies = accuracy_reward(completions, solution)
    formats = format_reward(completions)
    return [
        accuracy + form if accuracy else 0.0
        for accuracy, form in zip(accuracies, formats, strict=True)
    ]


registry.register_function("cascading_r1_math", cascading_r1_math_reward)

"""Rewards for reasoning in think tags and the answer after them: format, accuracy, and both."""

from __future__ import annotations

import re
from typing import Any, TypedDict

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_per_completion

__all__ = [
    "AccuracyXReward",
    "FormatReasoningReward",
    "R1Reward",
    "accuracy_reward",
    "format_reasoning_reward",
    "parse_reasoning_response",
    "r1_reward",
]

THINK_END = "</think>"
THINK_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ParsedReasoning(TypedDict):
    """The parts of a completion."""

    thinking_content: str
    response: str
    multiple_thinking: bool
    """Whether there was more than one think block."""


def parse_reasoning_response(
    text: Any, *, allow_multiple_thinking: bool = False
) -> ParsedReasoning:
    """Split a completion at its think block.

    With one block, return the text in it and the text after it, both stripped. With no or several
    blocks, there is no thinking, and the whole text is the response. Tags are case-sensitive.

    Args:
        text: the completion; another object becomes its `str`, which is the response.
        allow_multiple_thinking: Whether to accept several blocks: the first is the thinking, and
            the text after the last is the response.
    """
    blocks = _think_blocks(text) if isinstance(text, str) else []
    if not blocks or (len(blocks) > 1 and not allow_multiple_thinking):
        return ParsedReasoning(
            thinking_content="", response=str(text), multiple_thinking=len(blocks) > 1
        )
    return ParsedReasoning(
        thinking_content=blocks[0][1].strip(),
        response=text[blocks[-1].end() :].strip(),
        multiple_thinking=len(blocks) > 1,
    )


def _think_blocks(text: str) -> list[re.Match[str]]:
    # The limit avoids quadratic time on a text of opening tags.
    return list(THINK_BLOCK.finditer(text, 0, max(text.rfind(THINK_END), 0) + len(THINK_END)))


@registry.register
class FormatReasoningReward(RewardFunction):
    """`reward_value` for one think block with text in it and text after it.

    Args:
        reward_value: reward of a well-formed completion.
        require_thinking: Whether the block must have text.
        require_response: Whether there must be text after the block.
        allow_multiple_thinking: Whether several blocks are well-formed.
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [
            self.reward_value if self._is_formatted(self.get_content(each)) else 0.0
            for each in completions
        ]

    def _is_formatted(self, text: str) -> bool:
        parsed = parse_reasoning_response(
            text, allow_multiple_thinking=self.allow_multiple_thinking
        )
        return (
            (self.allow_multiple_thinking or not parsed["multiple_thinking"])
            and (not self.require_thinking or bool(parsed["thinking_content"].strip()))
            and (not self.require_response or bool(parsed["response"].strip()))
        )


@registry.register
class AccuracyXReward(RewardFunction):
    """`reward_value` if the response contains the solution.

    Args:
        exact_match: Whether the response must equal the solution.
        case_sensitive: Whether upper and lower case differ.
        reward_value: reward of a correct completion.
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """Return [G] `reward_value` or 0.0.

        Args:
            completions: [G] completions.
            solution: one for all, or [G]; other objects than strings become their `str`. Without a
                solution, the reward is 0.0.
            **kwargs: ignored.
        """
        solutions = one_per_completion(solution, len(completions))
        return [
            self.reward_value if self._is_correct(self.get_content(each), gold) else 0.0
            for each, gold in zip(completions, solutions, strict=True)
        ]

    def _is_correct(self, text: str, solution: Any) -> bool:
        gold = "" if solution is None else str(solution)
        response = parse_reasoning_response(text)["response"]
        if not self.case_sensitive:
            gold, response = gold.lower(), response.lower()
        if not gold.strip():
            return False
        return gold.strip() == response.strip() if self.exact_match else gold in response


@registry.register
class R1Reward(RewardFunction):
    """The sum of format and accuracy, each 1 or 0 times its weight.

    With the solution `4`, `<think>a</think> The answer is 4` earns 1.5, `4` earns 1.0, and
    `<think>a</think>` 0.0.

    Args:
        format_weight: reward of a well-formed completion (`FormatReasoningReward`).
        accuracy_weight: reward of a correct response (`AccuracyXReward`).
        **kwargs: as for `RewardFunction`, such as `weight`.
    """

    def __init__(
        self,
        format_weight: float = 0.5,
        accuracy_weight: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_weight = format_weight
        self.accuracy_weight = accuracy_weight
        self._format = FormatReasoningReward(reward_value=1.0)
        self._accuracy = AccuracyXReward()

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        formats = self._format.compute(completions)
        accuracies = self._accuracy.compute(completions, solution)
        return [
            form * self.format_weight + accuracy * self.accuracy_weight
            for form, accuracy in zip(formats, accuracies, strict=True)
        ]


def format_reasoning_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the rewards of `FormatReasoningReward` with its defaults."""
    return FormatReasoningReward().compute(completions, **kwargs)


def accuracy_reward(completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
    """Return the rewards of `AccuracyXReward` with its defaults."""
    return AccuracyXReward().compute(completions, solution, **kwargs)


def r1_reward(completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
    """Return the rewards of `R1Reward` with its defaults."""
    return R1Reward().compute(completions, solution, **kwargs)

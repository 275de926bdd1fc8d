r"""Whether the mathematical answer of a completion equals the gold answer.

completion -> text behind the last </think> -> math-verify (boxed LaTeX first)
                                            -> else a plain number in \boxed{} or after ####
"""

from __future__ import annotations

import math
import re
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_per_completion
from atroposlib.utils.math_check import check_math_answer

__all__ = ["AccuracyReward", "accuracy_reward"]

THINK_END = "</think>"
BOX = "\\boxed"
BOXED_CONTENT = re.compile(r"\\boxed\{([^{}]*)\}")
MARKED_NUMBER = re.compile(r"####\s*([-+]?[\d.,]*\d)")


@registry.register
class AccuracyReward(RewardFunction):
    r"""1.0 when the answer of the completion equals the gold answer, 0.0 otherwise.

    Checking is work for a CPU and may take long on odd input: environments call it through their
    score pool.

    Args:
        tolerance: plain numbers this close to each other are equal.
        split_on_think_tag: look only at what follows the last `</think>`.
        max_boxed_threshold: more boxes than this behind `</think>` are a guess among many and earn
            nothing.
        weight: what the reward is multiplied by.
        **kwargs: as for `RewardFunction`.
    """

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self,
        completions: list[Any],
        solution: Any = None,
        ground_truth: Any = None,
        **kwargs: Any,
    ) -> list[float]:
        """Compare each completion with its gold answer.

        Args:
            completions: [G] completions.
            solution: one gold answer for all, or [G]; what follows `####` counts where that occurs.
            ground_truth: the same; wins over `solution`.
            **kwargs: ignored.

        Returns:
            [G] 1.0 or 0.0; 0.0 where there is no gold answer.
        """
        golds = one_per_completion(
            solution if ground_truth is None else ground_truth, len(completions)
        )
        return [
            float(gold is not None and self._is_correct(self.get_content(each), str(gold)))
            for each, gold in zip(completions, golds, strict=True)
        ]

    def _is_correct(self, text: str, gold: str) -> bool:
        if self.split_on_think_tag and THINK_END in text:
            text = text.rsplit(THINK_END, 1)[1]
            if text.count(BOX) > self.max_boxed_threshold:
                return False
        return _verify_answer(text, _extract_final_answer(gold), self.tolerance)


def _extract_final_answer(text: str) -> str:
    """Return what follows the last `####` on its line, or the whole text without one."""
    if "####" not in text:
        return text.strip()
    return text.rsplit("####", 1)[1].split("\n", 1)[0].strip()


def _normalize_numerical_value(text: str) -> float | None:
    r"""Return the number that a text is, thousands commas and `\boxed{}` removed; None if none."""
    boxed = BOXED_CONTENT.search(text)
    plain = (boxed[1] if boxed else text).replace(",", "").strip()
    try:
        number = float(plain)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _verify_answer(content: str, gold_answer: str, tolerance: float = 1e-6) -> bool:
    """Return whether a text, thinking removed, holds the gold answer; never raises."""
    if not gold_answer:
        return False
    verdict = check_math_answer(content, gold_answer, skip_thinking=False)
    if verdict.is_gold_readable and verdict.answer_parsed:
        return verdict.is_correct
    gold = _normalize_numerical_value(gold_answer)
    answer = _plain_number(content)
    return gold is not None and answer is not None and abs(answer - gold) < tolerance


def _plain_number(content: str) -> float | None:
    """Return the number in the first box, else the one behind the first `####`."""
    for match in (BOXED_CONTENT.search(content), MARKED_NUMBER.search(content)):
        number = _normalize_numerical_value(match[1]) if match else None
        if number is not None:
            return number
    return None


def accuracy_reward(
    completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """Return what `AccuracyReward` with its defaults gives."""
    return AccuracyReward().compute(completions, solution, ground_truth, **kwargs)

r"""Rewards for an answer that equals the gold answer: a mathematical one, or a text.

completion -> text after the last </think> -> math-verify (boxed LaTeX first)
                                           -> else a plain number in \boxed{} or after ####
"""

from __future__ import annotations

import math
import re
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_per_completion
from atroposlib.utils.math_check import answer_text, check_math_answer

__all__ = ["AccuracyReward", "AnswerTextReward", "accuracy_reward"]

THINK_END = "</think>"
BOX = "\\boxed"
BOXED_CONTENT = re.compile(r"\\boxed\{([^{}]*)\}")
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
MARKED_NUMBER = re.compile(r"####\s*([-+]?[\d.,]*\d)")


@registry.register
class AccuracyReward(RewardFunction):
    r"""1.0 if the answer of the completion equals the gold answer, 0.0 otherwise.

    Call it through a score pool: the check needs a CPU and can be slow.

    Args:
        tolerance: maximum difference of equal plain numbers.
        split_on_think_tag: Whether to read only the text after the last `</think>`.
        max_boxed_threshold: maximum number of boxes after `</think>`; more are guesses and earn 0.
        **kwargs: as for `RewardFunction`, such as `weight`.
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
        """Return [G] 1.0 or 0.0; 0.0 without a gold answer.

        Args:
            completions: [G] completions.
            solution: one gold answer for all, or [G]; the part after `####`, if it occurs.
            ground_truth: the same; overrides `solution`.
            **kwargs: ignored.
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
    """Return the text after the last `####` on its line, or the whole text without one."""
    if "####" not in text:
        return text.strip()
    return text.rsplit("####", 1)[1].split("\n", 1)[0].strip()


def _normalize_numerical_value(text: str) -> float | None:
    r"""Return a text without commas and `\boxed{}` as a number, or None."""
    boxed = BOXED_CONTENT.search(text)
    plain = (boxed[1] if boxed else text).replace(",", "").strip()
    if "_" in plain:
        return None  # Python reads 25_8, a number in base 8, as 258
    try:
        number = float(plain)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _verify_answer(content: str, gold_answer: str, tolerance: float = 1e-6) -> bool:
    """Return whether a text without thinking has the gold answer; never raises."""
    if not gold_answer:
        return False
    verdict = check_math_answer(content, gold_answer, skip_thinking=False)
    if verdict.is_gold_readable and verdict.answer_parsed:
        return verdict.is_correct
    gold = _normalize_numerical_value(gold_answer)
    answer = _plain_number(content)
    return gold is not None and answer is not None and abs(answer - gold) < tolerance


def _plain_number(content: str) -> float | None:
    """Return the number in the first box, else the one after the first `####`."""
    for match in (BOXED_CONTENT.search(content), MARKED_NUMBER.search(content)):
        number = _normalize_numerical_value(match[1]) if match else None
        if number is not None:
            return number
    return None


def accuracy_reward(
    completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """Return the rewards of `AccuracyReward` with its defaults."""
    return AccuracyReward().compute(completions, solution, ground_truth, **kwargs)


@registry.register
class AnswerTextReward(RewardFunction):
    r"""1.0 if the text in `<answer>` tags equals the gold answer, 0.0 otherwise.

    Case, surrounding punctuation and repeated spaces do not count, and numbers are compared by
    value. Without tags, the answer is the last `\boxed{}`, else the last line that is not empty.
    """

    def compute(
        self,
        completions: list[Any],
        solution: Any = None,
        ground_truth: Any = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return [G] 1.0 or 0.0; 0.0 without a gold answer; arguments as for `AccuracyReward`."""
        golds = one_per_completion(
            solution if ground_truth is None else ground_truth, len(completions)
        )
        return [
            float(gold is not None and _is_same_text(_final_answer(self.get_content(each)), gold))
            for each, gold in zip(completions, golds, strict=True)
        ]


def _final_answer(completion: str) -> str:
    text = answer_text(completion)
    before, closed, _ = text.rpartition("</answer>")
    if closed:
        text = before.rpartition("<answer>")[2]
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1] if lines and not closed else text


def _last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, nested braces included; None if not closed."""
    _, box, rest = text.rpartition(f"{BOX}{{")
    depth = 1
    for brace in re.finditer(r"[{}]", rest if box else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return None


def _is_same_text(answer: str, gold: Any) -> bool:
    wanted, found = _plain(_extract_final_answer(str(gold))), _plain(answer)
    if wanted == found:
        return bool(wanted)
    numbers = (_normalize_numerical_value(wanted), _normalize_numerical_value(found))
    return None not in numbers and numbers[0] == numbers[1]


def _plain(text: str) -> str:
    text = TEXT_COMMAND.sub(r"\1", text).replace("\u2212", "-").replace("{,}", ",")
    return " ".join(text.casefold().split()).strip(" .,;:!?\"'`*$")

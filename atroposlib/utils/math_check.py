"""Check of a mathematical answer in a completion against the gold answer.

    completion -> text after the last </think> -> boxed LaTeX -> compared with the gold answer

A check may take long and, for unusual input such as `9^{9^{9}}`, forever: call it through a
`ScorePool`, which has a time limit of its own. Outside of worker processes, the time limits of
math-verify apply in the main thread; they use signals, which other threads cannot receive.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
import threading
from functools import cache
from typing import Any, NamedTuple

__all__ = ["MathVerdict", "answer_text", "check_math_answer"]

logger = logging.getLogger(__name__)

THINK_END = "</think>"
WORKER_IMPORTS = ("math_verify",)
TIME_LIMIT_S = 5
"""Limit of each step of a check in the main thread; an answer over the limit is incorrect."""


_THOUSANDS = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[,;:! ]|[ ~\u00a0\u2009\u202f])\d{3})+(?!\d)")
"""A number with spaces between its groups of three digits; a product, for the parser."""
_SIGN = re.compile(r"(?<![\w})\]])(?<![\w})\]] )[\u2010-\u2015\ufe63\uff0d](?=\s?[\w.\\(])")
"""A dash in the place of a minus sign, but not that of a range or a difference."""
_CURRENCY = re.compile(r"[\u20ac\u00a3\u00a5\u20b9]\s?(?=\d)|(?<=\d)\s?[\u20ac\u00a3\u00a5\u20b9]")
_SPACE = re.compile(r"~|(?<!\\)\\ ")


class MathVerdict(NamedTuple):
    """The result of one check."""

    is_correct: bool
    is_gold_readable: bool
    """Whether the gold answer could be parsed; if not, the item is invalid."""
    gold_parsed: str
    """The parsed gold answer, for records."""
    answer_parsed: str
    """The parsed answer of the completion; empty without one."""


def answer_text(completion: str) -> str:
    """Return the text after the last `</think>`, or before a `<think>` that is not closed."""
    if THINK_END in completion:
        return completion.rsplit(THINK_END, 1)[1]
    return completion.split("<think>", 1)[0] if "<think>" in completion else completion


def check_math_answer(completion: str, gold: str, *, skip_thinking: bool = True) -> MathVerdict:
    r"""Compare the answer of a completion with the gold answer; never raises.

    The answer is the first match of math-verify: boxed LaTeX before other LaTeX. A plain number in
    prose is not an answer.

    Args:
        completion: the whole completion, thinking included.
        gold: the gold answer as plain text or LaTeX, with or without `\boxed{}`.
        skip_thinking: whether only the `answer_text` is searched.
    """
    _silence_parsers()
    boxed_gold = gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"
    gold_parsed = _parse(_retyped(boxed_gold), _latex_config(strict=False))
    if not gold_parsed:
        return MathVerdict(False, False, "", "")
    text = answer_text(completion) if skip_thinking else completion
    answer_parsed = _parse(_retyped(text), _latex_config(strict=True))
    is_correct = bool(answer_parsed) and _verify(gold_parsed, answer_parsed)
    return MathVerdict(is_correct, True, str(gold_parsed), str(answer_parsed or ""))


def _retyped(text: str) -> str:
    """Return a text with numbers in the characters that the parser knows."""
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = _CURRENCY.sub("", _SIGN.sub("-", text))
    return _SPACE.sub(" ", text)


@cache
def _silence_parsers() -> None:
    # They warn of every answer over the time limit, and that the limits are disabled in threads.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _latex_config(*, strict: bool) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    if not strict:
        return LatexExtractionConfig()
    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False,
            malformed_operators=False,
            basic_latex=True,
            boxed="all",
            units=True,
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )


def _parse(text: str, config: Any) -> list[Any]:
    from math_verify import parse

    try:
        return list(
            parse(
                text,
                extraction_config=[config],
                extraction_mode="first_match",
                parsing_timeout=_time_limit_s(),
            )
        )
    except Exception as error:  # noqa: BLE001 - the parser fails in many ways on unusual text
        logger.debug("not readable as mathematics: %s", error)
        return []


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=_time_limit_s()))
    except Exception as error:  # noqa: BLE001 - comparison also fails in many ways
        logger.debug("not comparable: %s", error)
        return False


def _time_limit_s() -> int | None:
    is_main_thread = threading.current_thread() is threading.main_thread()
    return TIME_LIMIT_S if is_main_thread and multiprocessing.parent_process() is None else None


if multiprocessing.parent_process() is not None:
    # A scoring worker that imports this module for its first call imports the parsers too, before
    # the time limit of the call begins.
    import math_verify  # noqa: F401 - kept in sys.modules for the calls

"""Checking a mathematical answer in a completion against the gold answer.

    completion -> text after the last </think> -> boxed LaTeX -> compared with the gold answer

Checking may take long and, on odd input, for ever: call it through a `ScorePool`. The time limits
of math-verify itself work by signals, in the main thread only, and are switched off.
"""

from __future__ import annotations

import logging
import multiprocessing
from functools import cache
from typing import Any, NamedTuple

__all__ = ["MathVerdict", "answer_text", "check_math_answer"]

logger = logging.getLogger(__name__)

THINK_END = "</think>"


class MathVerdict(NamedTuple):
    """The result of one check."""

    is_correct: bool
    """Whether the answer equals the gold answer."""
    is_gold_readable: bool
    """False when the gold answer could not be parsed: the item is at fault, not the completion."""
    gold_parsed: str
    """The parsed gold answer, for records."""
    answer_parsed: str
    """The same of the completion; empty when no answer was found."""


def answer_text(completion: str) -> str:
    """Return what follows the last `</think>`, or everything when there is none.

    A completion that opens `<think>` and never closes it has no answer: empty text.
    """
    if THINK_END in completion:
        return completion.rsplit(THINK_END, 1)[1]
    return completion.split("<think>", 1)[0] if "<think>" in completion else completion


def check_math_answer(completion: str, gold: str, *, skip_thinking: bool = True) -> MathVerdict:
    r"""Compare the answer of a completion with the gold answer; never raises.

    The answer is what math-verify finds first: boxed LaTeX before other LaTeX. A bare number in
    prose does not count.

    Args:
        completion: everything the policy wrote, thinking included.
        gold: the answer as plain text or LaTeX, with or without `\boxed{}`.
        skip_thinking: look at `answer_text` only; False takes the text as it is.
    """
    _silence_parsers()
    boxed_gold = gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"
    gold_parsed = _parse(boxed_gold, _latex_config(strict=False))
    if not gold_parsed:
        return MathVerdict(False, False, "", "")
    text = answer_text(completion) if skip_thinking else completion
    answer_parsed = _parse(text, _latex_config(strict=True))
    is_correct = bool(answer_parsed) and _verify(gold_parsed, answer_parsed)
    return MathVerdict(is_correct, True, str(gold_parsed), str(answer_parsed or ""))


@cache
def _silence_parsers() -> None:
    # They warn that their own time limits are off, which is what this module wants.
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
                parsing_timeout=None,
            )
        )
    except Exception as error:  # noqa: BLE001 - the parser fails in many ways on odd text
        logger.debug("not readable as mathematics: %s", error)
        return []


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=None))
    except Exception as error:  # noqa: BLE001 - comparing odd expressions fails in many ways
        logger.debug("not comparable: %s", error)
        return False


if multiprocessing.parent_process() is not None:
    # A worker that scores: it imports this module before the time of its first call begins, and
    # the parsers take seconds to load, on a busy machine longer than an answer may take.
    import math_verify  # noqa: F401 - kept in sys.modules for the calls

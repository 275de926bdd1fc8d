r"""Reading the answer to an exercise and comparing it. Pure.

thinking</think> text with \boxed{answer} -> answer -> normalised -> equal to the solution?
"""

from __future__ import annotations

import re
from fractions import Fraction

from atroposlib.envs.conversation import visible_text

__all__ = ["first_boxed", "has_thought", "is_equal", "read_answer"]

BOX = "\\boxed{"
MAX_ANSWER = 2000
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
MIXED = re.compile(r"(-?)\b([0-9]{1,20})\s{0,3}\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}")
"""A whole number with a fraction behind it means their sum."""
NAMED = re.compile(r"^[a-z]=(?=[-+]?[0-9.])")
BASE = re.compile(r"^([01]+)_\(?2\)?$")
FORMATTING = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|left|right|displaystyle|quad|qquad)\b|\\[,;! ]"
)
NUMBER = re.compile(r"-?[0-9]{1,40}(?:/[0-9]{1,40}|\.[0-9]{1,40})?")


def has_thought(completion: str) -> bool:
    """Whether the completion has one block of thinking with something in it, before its answer."""
    opened, tag, rest = completion.partition("<think>")
    thought, closed, answer = rest.partition("</think>")
    is_single = "<think>" not in answer and "</think>" not in answer
    return bool(tag and closed and thought.strip()) and not opened.strip() and is_single


def first_boxed(text: str) -> str | None:
    r"""Return what stands in the first `\boxed{}`, with nested braces; None if it is not closed."""
    inside = text.partition(BOX)[2][:MAX_ANSWER]
    depth = 1
    for index, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:index].strip()
    return None


def read_answer(completion: str) -> str:
    """Return the first boxed answer behind the thinking, else the last line there."""
    text = visible_text(completion)
    if BOX in text:
        return first_boxed(text) or ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:MAX_ANSWER] if lines else ""


def is_equal(answer: str, solution: str) -> bool:
    """Compare two answers as numbers where both are, else as text without LaTeX and spaces."""
    one, other = _normalized(answer), _normalized(solution)
    if bool(NAMED.match(one)) != bool(NAMED.match(other)):  # `x=5` answers 5, but not `y=5`
        one, other = NAMED.sub("", one), NAMED.sub("", other)
    if not one:
        return False
    if NUMBER.fullmatch(one) and NUMBER.fullmatch(other):
        try:
            return Fraction(one) == Fraction(other)
        except ZeroDivisionError:
            return False
    return one == other


def _normalized(text: str) -> str:
    text = text[:MAX_ANSWER].replace("\N{MINUS SIGN}", "-")
    text = MIXED.sub(lambda m: f"{m[1]}{int(m[2]) * int(m[4]) + int(m[3])}/{m[4]}", text)
    text = FRACTION.sub(r"\1/\2", text)
    text = re.sub(r"[\\{}$,\s]", "", FORMATTING.sub("", text))
    text = BASE.sub(r"\1", text.lower().rstrip("."))
    return re.sub(r"^(-?)\.(?=[0-9])", r"\g<1>0.", text.removeprefix("+"))

"""Whether what a program gave is what a test expects; pure."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

__all__ = ["is_same_output", "is_same_value", "pass_at_k"]

RELATIVE = 1e-9
MAX_NUMBER_CHARACTERS = 400


def is_same_output(printed: str, expected: str) -> bool:
    """Compare printed text line by line; `1.50` equals `1.5`, spaces around words do not count."""
    left, right = printed.strip().splitlines(), expected.strip().splitlines()
    return len(left) == len(right) and all(map(_is_same_line, left, right))


def is_same_value(returned: Any, expected: Any) -> bool:
    """Compare values as JSON has them; floats up to rounding, truth values are no numbers."""
    try:
        return _is_same(returned, expected)
    except RecursionError:
        return False


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that one of k samples, drawn from these, is correct.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, section 2.1.
    """
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _is_same_line(left: str, right: str) -> bool:
    words, others = left.split(), right.split()
    return len(words) == len(others) and all(map(_is_same_word, words, others))


def _is_same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    numbers = (_number(left), _number(right))
    return None not in numbers and numbers[0] == numbers[1]


def _number(word: str) -> Decimal | None:
    if not word.isascii() or len(word) > MAX_NUMBER_CHARACTERS:
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) or isinstance(right, float):
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return are_numbers and _is_close(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def _is_close(left: float, right: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=RELATIVE)
    except OverflowError:  # an integer beyond the floats
        return False

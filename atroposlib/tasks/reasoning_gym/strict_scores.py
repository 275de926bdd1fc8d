"""Stricter rules for tasks whose own scorer one constant answer satisfies. Pure.

task, answer, entry ─► the most the answer can be worth ─► the package's score, but no more
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

__all__ = ["highest_score"]

TRIED = 0.01
"""What the package gives for a wrong answer to puzzle24."""
TOLERANCE = 1e-3
PLAIN = re.compile(r"[0-9+\-*/()\s]{1,2000}")
NOT_FINITE = re.compile(r"nan|inf", re.IGNORECASE)
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def highest_score(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the most an answer can be worth, whatever the package's scorer says.

    Args:
        task: name in the package.
        answer: from `extract_answer`.
        entry: what the package made, with the gold answer and its metadata.

    The package counts numbers by their digits, so that 0e0 and 1_19 escape it, compares no number
    of puzzle24 with those given, takes the common beginning of two probabilities for their
    likeness, and NaN for no distance at all.
    """
    if task == "countdown":
        return float(PLAIN.fullmatch(answer) is not None)
    if task == "puzzle24":
        return 1.0 if _makes_24(answer, entry["metadata"]["numbers"]) else TRIED
    if task == "coin_flip":
        return float(_is_probability(answer, entry))
    if task == "complex_arithmetic":
        return float(NOT_FINITE.search(answer) is None)
    return 1.0


def _makes_24(answer: str, numbers: list[int]) -> bool:
    used: list[int] = []
    try:
        tree = ast.parse(answer.strip(), mode="eval") if PLAIN.fullmatch(answer) else None
        return (
            tree is not None and _value(tree.body, used) == 24 and sorted(used) == sorted(numbers)
        )
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value of an expression; its numbers are added to `used`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _is_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    rational = (entry.get("metadata") or {}).get("rational") or {}
    golds = [str(entry["answer"])]
    if rational:
        golds.append(f"{rational['numerator']}/{rational['denominator']}")
    try:
        # By floats: as a fraction, 1e999999999 would be written out.
        above, _, below = answer.replace(",", "").partition("/")
        value = float(above) / float(below or 1)
        return any(math.isclose(value, float(Fraction(gold)), rel_tol=TOLERANCE) for gold in golds)
    except (ValueError, ZeroDivisionError, OverflowError):
        return False

"""From a completion to the text that may be handed to a scorer: extraction and safety.

Several scorers of the reasoning-gym package run the answer as Python, by `eval` or by sympy's
`parse_expr`. A completion is not trusted to be run: such a scorer sees an answer only when its
syntax tree holds nothing but literals or, for sympy, names, arithmetic and well-known functions. A
name is not a literal: `eval` looks it up among the scorer's variables, the right answer among them.
Other scorers repeat a move as often as an answer says; such a count has few digits.
"""

from __future__ import annotations

import ast
import math
import re

__all__ = ["extract_answer", "is_safe_answer"]

EVALUATED_BY_PYTHON = frozenset(["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
EVALUATED_BY_SYMPY = frozenset(
    [
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    ]
)
MATH_FUNCTIONS = frozenset(["Abs", "Rational", "exp", "ln", "log", "sqrt"]) | frozenset(
    ["acos", "asin", "atan", "cos", "cosh", "cot", "csc", "sec", "sin", "sinh", "tan", "tanh"]
)
LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load)
ARITHMETIC_NODES = (
    ast.Name,
    ast.BinOp,
    ast.UnaryOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.USub,
    ast.UAdd,
)
STRING_OF_LETTERS = re.compile(r"[A-E]+")
"""An answer of string_insertion, which Python reads as a name; no scorer has such a variable."""
MANY_MOVES = {"rubiks_cube": re.compile(r"\d{2}"), "rush_hour": re.compile(r"[+-]\d{2}")}
PROPOSITION = re.compile(r"[A-Z\u00ac\u2227\u2228\u2192\u2194()\s]{1,500}")
LONG_EXPONENT = re.compile(r"[0-9._][eE][-+]?[0-9_]{3}")
"""sympy writes such a number out: 1e999999999 never ends."""
MAX_ANSWER_CHARACTERS = 10_000
MAX_LENGTHENING = 4
"""Times the gold answer's length that an answer may have, if that is more."""
MAX_EXPRESSION_CHARACTERS = 2_000
MAX_POWER = 1_000

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str | None:
    """Return the one answer a completion gives, or None.

    Text inside `<think>` does not count; a chat template may have opened it in the prompt, and a
    block that is never closed reaches to the end. Several answers count as no answer.
    """
    text = _without_thinking(completion)
    if text.count("<answer>") != 1:
        return None
    match = ANSWER.search(text)
    if match is None:
        return None
    return match[1].strip() or None


def _without_thinking(completion: str) -> str:
    *thoughts, rest = completion.split("</think>")
    shown: list[str] = []
    for thought in thoughts:
        before, opened, _ = thought.partition("<think>")
        if opened:
            shown.append(before)
        else:  # the chat template opened it: everything so far was thought
            shown.clear()
    return "".join([*shown, rest.partition("<think>")[0]])


def is_safe_answer(answer: str, task: str, *, gold: str | None = None) -> bool:
    """Return whether a task's scorer may be given an answer, knowing that it may run it.

    Args:
        answer: from `extract_answer`.
        task: task name in the package.
        gold: the item's own answer; None where many are right.
    """
    if len(answer) > max(MAX_ANSWER_CHARACTERS, MAX_LENGTHENING * len(gold or "")):
        return False
    if task in MANY_MOVES:
        return MANY_MOVES[task].search(answer) is None
    if task == "propositional_logic":
        # Its scorer tries all values of any text in the place of a variable.
        return PROPOSITION.fullmatch(answer) is not None
    if task == "string_insertion" and STRING_OF_LETTERS.fullmatch(answer):
        return True
    if task not in EVALUATED_BY_PYTHON | EVALUATED_BY_SYMPY:
        return True
    if len(answer) > MAX_EXPRESSION_CHARACTERS:
        return False
    if task in EVALUATED_BY_SYMPY and LONG_EXPONENT.search(answer):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        # `eval` fails on it as well, after which those scorers compare texts.
        return task in EVALUATED_BY_PYTHON
    except (ValueError, RecursionError, MemoryError):
        return False
    if task in EVALUATED_BY_SYMPY:
        return _is_arithmetic(tree)
    return all(isinstance(node, LITERAL_NODES) for node in ast.walk(tree))


def _is_arithmetic(tree: ast.Expression) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = isinstance(node.func, ast.Name) and node.func.id in MATH_FUNCTIONS
            if not named or node.keywords:
                return False
        elif isinstance(node, ast.Constant):
            # sympy runs texts as well; complex and boolean constants are not answers.
            if type(node.value) not in (int, float):
                return False
        elif not isinstance(node, LITERAL_NODES + ARITHMETIC_NODES):
            return False
    return _power(tree.body) <= MAX_POWER


def _power(node: ast.AST) -> float:
    """Return how high a value is raised at most: powers of powers multiply, 9**9**9 is not run."""
    inner = max([1.0, *map(_power, ast.iter_child_nodes(node))])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node.left) * _bound(node.right)
    return inner


def _bound(exponent: ast.AST) -> float:
    """Return what the absolute value of an exponent cannot exceed; infinite when unsure."""
    if isinstance(exponent, ast.Constant):
        return abs(exponent.value)  # type: ignore[arg-type]
    if isinstance(exponent, ast.Name):
        return 1.0
    if isinstance(exponent, ast.UnaryOp):
        return _bound(exponent.operand)
    if isinstance(exponent, ast.Call):
        return max([1.0, *map(_bound, exponent.args)])
    if isinstance(exponent, ast.BinOp):
        left, right = _bound(exponent.left), _bound(exponent.right)
        if isinstance(exponent.op, ast.Add | ast.Sub):
            return left + right
        if isinstance(exponent.op, ast.Mult):
            return left * right
        divisor = exponent.right
        is_division = isinstance(exponent.op, ast.Div | ast.FloorDiv)
        if is_division and isinstance(divisor, ast.Constant) and _bound(divisor) >= 1:
            return left
    return math.inf

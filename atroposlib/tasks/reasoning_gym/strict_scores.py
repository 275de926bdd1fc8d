"""Stricter rules for tasks whose own scorer pays for answers that solve nothing. Pure.

    task, answer, entry ─► highest_score    the package's score, but no more than this
    task, entry ─► trivial_answers ─► partial_credit    what is beyond the best of them
    task, entry ─► can_be_copied    the entry is not asked

An answer that is right keeps its score of 1.0; only what wrong answers earn is changed.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

__all__ = [
    "NOT_VALID",
    "can_be_copied",
    "concludes_anything",
    "highest_score",
    "partial_credit",
    "repeats_a_premise",
    "trivial_answers",
]

TRIED = 0.01
"""The package's score for a wrong answer to puzzle24."""
TOLERANCE = 1e-3
PLAIN = re.compile(r"[0-9+\-*/()\s]{1,2000}")
NOT_FINITE = re.compile(r"nan|inf", re.IGNORECASE)
FLOORS: Mapping[str, float] = {
    "calendar_arithmetic": 0.6,  # any day of the week, or a number that is off by a tenth
    "figlet_font": 0.2,  # two letters of the word
    "polynomial_equations": 0.9,  # one number, 0.1 from the root
    "rectangle_count": 0.6,  # a count that is off by one or two
    "spell_backward": 0.25,  # letters that happen to be the same
    "time_intervals": 0.98,  # a time within a fiftieth of the longest interval
    "word_sorting": 0.2,  # the words in any order
}
"""Score of the package that an answer may reach without solving anything."""
NO_WAY_TO_FILL = '["No solution"]'
CONTAINED = 0.8
"""The same of an answer that contains the right one: several are named, or it is some digits of a
number. The package takes for its score what part of the answer is right."""
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def highest_score(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the maximum score of an answer, regardless of the package's scorer.

    Args:
        task: name in the package.
        answer: from `extract_answer`.
        entry: what the package made, with the gold answer and its metadata.

    The package counts numbers by their digits, so that 0e0 and 1_19 escape it, compares no number
    of puzzle24 with those given, takes the common beginning of two probabilities for their
    likeness, NaN for no distance at all and for sorted, and any text for no solution.
    """
    if task == "countdown":
        return float(PLAIN.fullmatch(answer) is not None)
    if task == "puzzle24":
        return 1.0 if _makes_24(answer, entry["metadata"]["numbers"]) else TRIED
    if task == "coin_flip":
        return float(_is_probability(answer, entry))
    if task in ("complex_arithmetic", "number_sorting"):
        return float(NOT_FINITE.search(answer) is None)
    if task == "polynomial_equations" and not str(entry["answer"]).strip():
        return float(answer in ('""', "''"))
    return 1.0


def partial_credit(
    task: str, score: float, trivial_scores: Sequence[float], *, contains_gold: bool
) -> float:
    """Return what the package's score of a wrong answer is worth.

    Args:
        task: name in the package.
        score: below 1, from the package.
        contains_gold: whether the right answer is a part of this one.
        trivial_scores: the package's scores of `trivial_answers` to the same entry.

    Returns:
        0 for what the best trivial answer earns, and from there evenly up to 1.
    """
    contained = CONTAINED if contains_gold else 0.0
    floor = max([contained, FLOORS.get(task, 0.0), *trivial_scores])
    return (score - floor) / (1.0 - floor) if score > floor else 0.0


def trivial_answers(task: str, entry: Mapping[str, Any]) -> list[str]:
    """Return answers that can be written without solving anything; empty where none pays.

    Args:
        task: name in the package.
        entry: what the package made.

    They are the question's own words or board, and a board that is filled with one value.
    """
    write = TRIVIAL.get(task)
    return [] if write is None else write(entry)


def can_be_copied(task: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has no answer to be found: none at all, or one the question shows.

    Most strings of string_insertion have no place where anything is to be inserted, and the package
    counts the answer that jugs cannot be filled so as wrong.
    """
    if entry["answer"] is None:
        return False
    answer = str(entry["answer"]).strip()
    if task == "jugs" and answer == NO_WAY_TO_FILL:
        return True
    if task == "pool_matrix":
        return bool(entry["metadata"]["pool_size"] == 1)
    shown = SHOWN.get(task)
    return not answer or (shown is not None and answer == shown(entry["metadata"]))


OTHER_JOINTS = "\u2228\u2192\u2194"
"""OR, IMPLIES and IFF."""
ScoreAnswer = Callable[[str, Mapping[str, Any]], float]
"""The package's score of an answer to an entry."""
NOT_VALID = 0.05
"""The package's score for a conclusion that does not follow."""


def repeats_a_premise(answer: str, entry: Mapping[str, Any], score: ScoreAnswer) -> bool:
    """Return whether a conclusion says no more than one premise does, or than any two joined.

    Args:
        answer: a proposition.
        entry: of propositional_logic.
        score: of the package, which accepts any conclusion that follows.
    """
    if answer == entry["metadata"]["example_answer"]:
        return False
    alone = [
        {**entry, "metadata": {**entry["metadata"], "premises": [premise]}}
        for premise in entry["metadata"]["premises"]
    ]
    return any(score(part, one) > NOT_VALID for part in _joined_by_and(answer) for one in alone)


def concludes_anything(entry: Mapping[str, Any], score: ScoreAnswer) -> bool:
    """Return whether an entry of propositional_logic cannot be used as a question.

    Its premises contradict each other, so that everything follows from them, or its own example
    does not follow.
    """
    variable = entry["metadata"]["variables"][0]
    contradiction = score(f"{variable} ∧ ¬{variable}", entry)
    example = str(entry["metadata"]["example_answer"])
    return contradiction > NOT_VALID or score(example, entry) < 1.0


def _joined_by_and(proposition: str) -> list[str]:
    """Return what the outermost AND joins; the proposition alone where it is no such thing."""
    text = proposition.strip()
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in OTHER_JOINTS:
            return [text]
        if depth == 0 and character == "∧":
            parts.append(text[start:i])
            start = i + 1
    if not parts:
        return [text]
    return [part for joined in (*parts, text[start:]) for part in _joined_by_and(joined)]


def _closing(text: str) -> int:
    """Return where the bracket is closed that a text begins with; -1 where it is not."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return -1


def _as_lines(board: Sequence[Sequence[Any]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in board)


def _filled(entry: Mapping[str, Any]) -> list[str]:
    """Return a board of digits with all its blanks filled by 1, by 2, ..."""
    puzzle = entry["metadata"]["puzzle"]
    return [
        _as_lines([[cell or digit for cell in row] for row in puzzle])
        for digit in range(1, len(puzzle) + 1)
    ]


def _dead_or_unchanged(entry: Mapping[str, Any]) -> list[str]:
    """Return a board of the game of life with no living cell, and the one shown."""
    shown = str(entry["question"]).rpartition("\n\n")[2].strip().rstrip(".")
    return [re.sub("1", "0", shown), shown]


def _all_alike(entry: Mapping[str, Any]) -> list[str]:
    """Return two answers: all are knights, and all are knaves."""
    terms, names = entry["metadata"]["knight_knave_terms"], entry["metadata"]["names"]
    kinds = (terms["a_knight"], terms["a_knave"])
    return [", and ".join(f"{name} is {kind}" for name in names) for kind in kinds]


TRIVIAL: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "futoshiki": _filled,
    "game_of_life": _dead_or_unchanged,
    "knights_knaves": _all_alike,
    "letter_jumble": lambda entry: [" ".join(entry["metadata"]["scrambled_words"])],
    "mini_sudoku": _filled,
    "prime_factorization": lambda entry: [str(entry["metadata"]["number"])],
    "sentence_reordering": lambda entry: [str(entry["question"]).rpartition("sentence: ")[2]],
    "spell_backward": lambda entry: [str(entry["metadata"]["word"])],
    "string_manipulation": lambda entry: [str(entry["metadata"]["string"])],
    "sudoku": _filled,
    "word_sorting": lambda entry: [", ".join(entry["metadata"]["transformed_words"])],
}
SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "number_sequence": lambda metadata: str(metadata["sequence"][-2]),
    "polynomial_multiplication": lambda metadata: str(metadata["polynomial_expr"]),
    "rotate_matrix": lambda metadata: _as_lines(metadata["matrix"]),
    "string_insertion": lambda metadata: str(metadata["string"]),
    "string_manipulation": lambda metadata: str(metadata["string"]),
}
"""The part of a question that may already be its answer."""


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
    raise ValueError(f"{type(node).__name__} is not arithmetic")


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

"""Scores of groups, and what is read out of answers; pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

__all__ = [
    "Pair",
    "boxed_word",
    "concise_scores",
    "lead_of_first",
    "least_similar_pair",
    "score",
    "zero_answer",
    "zero_reply",
]

MIN_LENGTH_SPREAD = 0.1
"""Part of the shortest trajectory by which the longest must be longer, for lengths to count."""
COMPARED_CHARACTERS = 2000
"""End of an answer that is compared with others: comparing takes time that grows faster."""
WORD = re.compile(r"\w+|[^\w\s]")
BOX = "\\boxed{"
BOXED_WORD = re.compile(r"\s{0,9}(?:\\(?:text|textbf|mathrm|mathbf)\{\s{0,9})?(\w{1,20})\s{0,9}\}")
ANSWER_START, ANSWER_END = "<answer>", "</answer>"


class Pair(NamedTuple):
    """Two of several texts."""

    first: int
    second: int
    similarity: float
    """0 nothing in common, 1 equal."""


def score(*, is_correct: bool, is_cut: bool = False) -> float:
    """Return what an answer is worth: 1.0 when it is correct and was not cut, else -1.0."""
    return 1.0 if is_correct and not is_cut else -1.0


def concise_scores(lengths: Sequence[int]) -> list[float] | None:
    """Rank correct trajectories by their length, None when they are about equally long.

    Args:
        lengths: [G] tokens.

    Returns:
        [G] from 1.0 for the shortest to -1.0 for the longest, along half a cosine.
    """
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if spread <= MIN_LENGTH_SPREAD * shortest:
        return None
    return [math.cos(math.pi * (length - shortest) / spread) for length in lengths]


def least_similar_pair(texts: Sequence[str]) -> Pair:
    """Return the two texts that have least in common; slow, for the score pool.

    Words are compared, for characters would take half a minute for sixteen texts.

    Args:
        texts: two or more.
    """
    ends = [WORD.findall(text[-COMPARED_CHARACTERS:]) for text in texts]
    pairs = (
        Pair(i, k, difflib.SequenceMatcher(None, ends[i], ends[k], autojunk=False).ratio())
        for i, k in combinations(range(len(ends)), 2)
    )
    return min(pairs, key=lambda pair: pair.similarity)


def boxed_word(answer: str, words: Sequence[str]) -> str | None:
    r"""Return which of some words is in the last `\boxed{}` of an answer, None for any other."""
    _before, box, rest = answer.rpartition(BOX)
    read = BOXED_WORD.match(rest) if box else None
    found = read[1].lower() if read else ""
    return next((word for word in words if word.lower() == found), None)


def lead_of_first(forward: Sequence[str], reversed_: Sequence[str]) -> float:
    """Return by how many votes the first of two solutions is ahead; 0 is a tie.

    Args:
        forward: answers of judges that saw the first solution first, without their thinking.
        reversed_: answers of those that saw the second one first. A vote that cannot be read is
            none.
    """
    worth = {"1": 1, "2": -1, None: 0}
    ahead = sum(worth[boxed_word(answer, ("1", "2"))] for answer in forward)
    return ahead - sum(worth[boxed_word(answer, ("1", "2"))] for answer in reversed_)


def zero_reply(reply: str, *, is_cut: bool) -> str:
    """Return a reply with the closing tag that the engine took away as a stop string."""
    is_open = reply.rfind(ANSWER_START) > reply.rfind(ANSWER_END)
    return f"{reply} {ANSWER_END}" if is_open and not is_cut else reply


def zero_answer(reply: str) -> str | None:
    """Return the content of the last closed answer tag that holds a box, None when none does."""
    end = len(reply)
    while (end := reply.rfind(ANSWER_END, 0, end)) != -1:
        start = reply.rfind(ANSWER_START, 0, end)
        if start == -1:
            return None
        content = reply[start + len(ANSWER_START) : end]
        if BOX in content:
            return content
        end = start
    return None

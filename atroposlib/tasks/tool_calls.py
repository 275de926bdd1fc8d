"""Reading tool calls from text, and comparing them with the expected calls. Pure.

"<tool_call>{...}</tool_call>" ─► read_calls ─► [call] ─► calls_match(expected, written)
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["ReadCalls", "calls_match", "covers", "num_matching", "read_calls"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_DEPTH = 50
"""Maximum nesting depth of a call's JSON."""
MAX_LITERAL_CHARACTERS = 20_000


class ReadCalls(NamedTuple):
    """The calls of a text."""

    calls: list[dict[str, Any]]
    """Contents of the blocks that are JSON objects, in order."""
    num_broken: int
    """Number of other blocks."""
    rest: str
    """Text outside the blocks."""


def read_calls(text: str, *, allow_literals: bool = False) -> ReadCalls:
    """Read every closed `<tool_call>` block of a text.

    Args:
        text: a completion without its thinking.
        allow_literals: whether Python literals such as `{'name': 'f'}` are also accepted.
    """
    blocks, rest = _split(text)
    read = [_read_object(block.strip(), allow_literals) for block in blocks]
    calls = [call for call in read if call is not None]
    return ReadCalls(calls, len(read) - len(calls), rest)


def calls_match(
    expected: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]], *, coerce: bool = False
) -> bool:
    """Whether the written calls can be paired with the expected ones so that each pair `covers`.

    The order does not matter.
    """
    num_expected = len(expected)
    return num_expected == len(written) == num_matching(expected, written, coerce=coerce)


def num_matching(
    expected: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]], *, coerce: bool = False
) -> int:
    """Return the maximum number of disjoint pairs of an expected and a written call that `covers`.

    A call may match several expected ones, so this is a bipartite matching by augmenting paths.
    """
    fits = [
        [i for i, call in enumerate(written) if covers(wanted, call, coerce=coerce)]
        for wanted in expected
    ]
    taken_by: dict[int, int] = {}

    def place(wanted: int, tried: set[int]) -> bool:
        for call in fits[wanted]:
            if call in tried:
                continue
            tried.add(call)
            if call not in taken_by or place(taken_by[call], tried):
                taken_by[call] = wanted
                return True
        return False

    return sum(place(wanted, set()) for wanted in range(len(expected)))


def covers(expected: Any, actual: Any, *, coerce: bool = False) -> bool:
    """Whether a value equals the expected one; objects may have further keys, at any depth.

    Args:
        expected: parsed JSON.
        actual: parsed JSON.
        coerce: whether a string is parsed as JSON if the other value is not a string, so that
            `"5"` equals 5.
    """
    if coerce and isinstance(expected, str) != isinstance(actual, str):
        expected, actual = _as_value(expected), _as_value(actual)
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and covers(value, actual[key], coerce=coerce)
            for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(expected) == len(actual)
            and all(covers(e, a, coerce=coerce) for e, a in zip(expected, actual, strict=True))
        )
    # Python has True == 1.
    return isinstance(expected, bool) == isinstance(actual, bool) and bool(expected == actual)


def _split(text: str) -> tuple[list[str], str]:
    """Return the contents of closed blocks, and the rest; linear in the length."""
    blocks: list[str] = []
    rest: list[str] = []
    position = 0
    while True:
        start = text.find(OPEN, position)
        end = -1 if start < 0 else text.find(CLOSE, start)
        if end < 0:
            return blocks, "".join([*rest, text[position:]])
        rest.append(text[position:start])
        blocks.append(text[start + len(OPEN) : end])
        position = end + len(CLOSE)


def _read_object(text: str, allow_literals: bool) -> dict[str, Any] | None:
    is_literal = allow_literals and len(text) <= MAX_LITERAL_CHARACTERS
    readers = (json.loads, ast.literal_eval) if is_literal else (json.loads,)
    for read in readers:
        try:
            value = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(value, dict) and _is_json(value, MAX_DEPTH):
            return value
    return None


def _is_json(value: Any, left: int) -> bool:
    """Whether a value is JSON with a nesting depth of at most `left`."""
    if isinstance(value, dict):
        is_fine = left > 0 and all(isinstance(key, str) for key in value)
        return is_fine and all(_is_json(part, left - 1) for part in value.values())
    if isinstance(value, list | tuple):
        return left > 0 and all(_is_json(part, left - 1) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)  # NaN equals nothing, itself included
    return value is None or isinstance(value, str | bool | int)


def _as_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if _is_json(parsed, MAX_DEPTH) else value

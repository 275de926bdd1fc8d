"""What a decoded group must satisfy, told from the lengths of its rows; pure.

`scored_data.check_group` holds on both sides of the wire; here it is asked about rows of which
only the length is known, because a codec never holds all numbers of a group at once. The other
checks concern what only a foreign sender can get wrong: the outer shape of opaque fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import category

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, MAX_SCORE, check_group

__all__ = ["Lengths", "check_layout", "check_opaque", "is_loose"]

MAX_LABEL_CHARACTERS = 256
"""Longest name of a part of the reward, and longest finish reason."""
MAX_REWARD_PARTS = 256
"""Parts that one reward may have."""

Lengths = Sequence[int | None]
"""[G] entries of each row; None for one that is no row of numbers."""

_ALIGNED_FIELDS = tuple(f for f in GROUP_FIELDS if f.aligned)
_LOOSE_FIELDS = tuple(f for f in GROUP_FIELDS if f.per_trajectory and not f.required)


def check_opaque(name: str, value: Any) -> None:
    """Check the outer shape of a field whose content is the business of others.

    Raises:
        GroupError: names the path.
    """
    if name == "messages":
        _check_messages(value)
    elif name in ("generation_params", "group_overrides"):
        if not isinstance(value, dict):
            raise GroupError(f"{name}: expected an object or null")
    elif name == "overrides":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of objects or null")
        for i, override in enumerate(value):
            if not isinstance(override, dict):
                raise GroupError(f"{name}[{i}]: expected an object")
    elif name == "reward_parts":
        _check_reward_parts(value)
    elif name == "finish_reasons":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of strings or null")
        for i, reason in enumerate(value):
            if not isinstance(reason, str | None):
                raise GroupError(f"{name}[{i}]: expected a string or null")
            _check_label(f"{name}[{i}]", reason or "")
    elif name == "tokenized_from_text" and not isinstance(value, bool):
        raise GroupError(f"{name}: expected true, false or null")


def _check_reward_parts(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("reward_parts: expected a list of objects or null")
    for i, parts in enumerate(value):
        if not isinstance(parts, dict | None):
            raise GroupError(f"reward_parts[{i}]: expected an object or null")
        if parts is not None and len(parts) > MAX_REWARD_PARTS:
            raise GroupError(f"reward_parts[{i}]: {len(parts)} parts, at most {MAX_REWARD_PARTS}")
        for part, number in (parts or {}).items():
            _check_label(f"reward_parts[{i}]: the name {part!r:.60}", part)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise GroupError(f"reward_parts[{i}].{part}: expected a number, got {number!r:.60}")


def _check_label(path: str, text: str) -> None:
    """Refuse what becomes the name of a metric, or of a filter, and could break the line it is in.

    Raises:
        GroupError: it is too long, or holds control characters.
    """
    if len(text) > MAX_LABEL_CHARACTERS:
        raise GroupError(f"{path}: {len(text)} characters, expected at most {MAX_LABEL_CHARACTERS}")
    if not text.isprintable() and any(category(char) in ("Cc", "Zl", "Zp") for char in text):
        raise GroupError(f"{path}: expected no control characters")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("messages: expected a list with one list of messages per trajectory")
    for i, conversation in enumerate(value):
        # Plain strings are the older form of a conversation; they are stored as given.
        if isinstance(conversation, str):
            continue
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}]: expected a list of messages")
        for j, message in enumerate(conversation):
            if isinstance(message, str):
                continue
            if not isinstance(message, dict) or not message.keys() >= {"role", "content"}:
                raise GroupError(
                    f"messages[{i}][{j}]: role and content are required in every message"
                )


def check_layout(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> None:
    """Ask `check_group` whether counts, lengths and scores are right.

    Args:
        lengths: of every field that is there, by name; `scores` aside.
        scores: [G] the scores.

    Raises:
        GroupError: as `check_group`.
    """
    if _is_right(lengths, scores):  # in a tenth of the time
        return
    rows: dict[str, Any] = {
        name: [_Row(length or 0) for length in of_field] for name, of_field in lengths.items()
    }
    check_group({**rows, "scores": scores})


def _is_right(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> bool:
    tokens = lengths.get("tokens", ())
    return (
        0 < len(tokens) == len(scores)
        and -MAX_SCORE <= min(scores) <= max(scores) <= MAX_SCORE
        and math.isfinite(sum(scores))
        and all(
            lengths.get(field.name, None if field.required else tokens) == tokens
            for field in _ALIGNED_FIELDS
        )
    )


class _Row:
    """Stands for a row of numbers that were checked already."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[float]:
        return iter(())


def is_loose(lengths: Mapping[str, Lengths]) -> bool:
    """Whether an optional field has other counts or lengths than `tokens`; accepted, but odd."""
    tokens = lengths["tokens"]
    for field in _LOOSE_FIELDS:
        rows = lengths.get(field.name)
        if not rows:
            continue
        if len(rows) != len(tokens):
            return True
        if any(
            length is not None and length != expected
            for length, expected in zip(rows, tokens, strict=True)
        ):
            return True
    return False

"""What a decoded group must satisfy beyond `scored_data.check_group`; pure.

`check_group` holds on both sides of the wire. These checks concern what only a foreign sender can
get wrong: the outer shape of opaque fields, and numbers that slipped through lax conversion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS

__all__ = ["check_finite", "check_opaque", "is_loose"]

_UNCHECKED_FLOAT_FIELDS = tuple(
    f.name for f in GROUP_FIELDS if f.dtype == "float" and not f.required and not f.aligned
)
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


def check_finite(fields: Mapping[str, Any]) -> None:
    """Refuse `"nan"` and `"inf"` strings, which lax number conversion lets through.

    Raises:
        GroupError: names the field and the row.
    """
    for name in _UNCHECKED_FLOAT_FIELDS:
        for i, row in enumerate(fields[name] or ()):
            if not _is_finite(row):
                raise GroupError(f"{name}[{i}]: holds a number that is not finite")


def _is_finite(value: float | list[Any]) -> bool:
    if not isinstance(value, list):
        return math.isfinite(value)
    if value and isinstance(value[0], list):
        return all(map(_is_finite, value))
    return all(map(math.isfinite, value))


def is_loose(fields: Mapping[str, Any]) -> bool:
    """Whether an optional field has other counts or lengths than `tokens`; accepted, but odd."""
    tokens = fields["tokens"]
    for field in _LOOSE_FIELDS:
        rows = fields[field.name]
        if not rows or not isinstance(rows, list):
            continue
        if len(rows) != len(tokens):
            return True
        if field.dtype != "json" and any(
            isinstance(row, list) and len(row) != len(ids)
            for row, ids in zip(rows, tokens, strict=True)
        ):
            return True
    return False

"""Finds the rows of a JSON group by looking for brackets only; pure.

A row of numbers ends at the next `]`, so most of a group's bytes need not be looked at to find
where its columns lie. What is found this way is exact once every row has been decoded as an array:
an array that ends at the first `]` is the whole value. An opaque value ends where the next key
begins, which is tried. The walk stops at the first thing it does not know, and says where; the rest
is for a real parser.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from atroposlib.scored_data import GROUP_FIELDS

__all__ = ["RowTexts", "Walk", "walk_group"]

_ROW_FIELDS = frozenset(f.name for f in GROUP_FIELDS if f.shape == "GL")
_OPAQUE_FIELDS = frozenset(f.name for f in GROUP_FIELDS if f.dtype == "json") - {"env_id"}
_NAMES = b"|".join(f.name.encode() for f in GROUP_FIELDS)
_NEXT_KEY = re.compile(rb',[ \t\r\n]*"(?:%b)"[ \t\r\n]*:' % _NAMES)
_OPENING = re.compile(rb"[ \t\r\n]*\{")
_KEY = re.compile(rb'[ \t\r\n]*"([a-z_]+)"[ \t\r\n]*:[ \t\r\n]*')
_NULL = re.compile(rb"null(?=[ \t\r\n,}])")
_INTEGER = re.compile(rb"-?[0-9]+(?=[ \t\r\n,}])")
_AFTER_VALUE = re.compile(rb"[ \t\r\n]*([,}])")
_ROWS_OPENING = re.compile(rb"\[[ \t\r\n]*(?=\[)")
_AFTER_ROW = re.compile(rb"[ \t\r\n]*([,\]])[ \t\r\n]*")


_CALL_BYTES = 256 * 1024
"""What one search looks at, so that other threads get their turn in between."""
_MAX_KEY_BYTES = 64
_MAX_TRIES = 4
"""Keys inside a value may look like the next key of the group; then a parser is quicker."""
_value_decoder = msgspec.json.Decoder(msgspec.Raw)


class RowTexts(NamedTuple):
    """Where a field with one row per trajectory lies; nothing is copied."""

    rows: list[memoryview]
    """[G] the text of each row."""
    whole: memoryview
    """The text of all of it."""


class Walk(NamedTuple):
    """What a walk found."""

    fields: dict[str, Any]
    """None for null, the text of single values, a `RowTexts` where there are rows."""
    end: int
    """Behind the closing brace, or behind the comma before the first field not walked."""
    is_complete: bool
    """Whether the closing brace was reached."""


def walk_group(body: bytes, start: int = 0) -> Walk | None:
    """Walk over one group.

    Args:
        body: what was received.
        start: where the object begins.

    Returns:
        What was found; None when not even the first field could be walked, or a key comes twice.
    """
    opening = _OPENING.match(body, start)
    if opening is None:
        return None
    fields: dict[str, Any] = {}
    position = opening.end()
    while True:
        key = _KEY.match(body, position)
        found = _walk_value(body, key.group(1).decode(), key.end()) if key else None
        after = _AFTER_VALUE.match(body, found[1]) if found else None
        if key is None or found is None or after is None:
            return Walk(fields, position, False) if fields else None
        if key.group(1).decode() in fields:
            return None  # nobody would look at the first value
        fields[key.group(1).decode()] = found[0]
        position = after.end()
        if after.group(1) == b"}":
            return Walk(fields, position, True)


def _walk_value(body: bytes, name: str, start: int) -> tuple[Any, int] | None:
    null = _NULL.match(body, start)
    if null is not None:
        return None, null.end()
    if name in _ROW_FIELDS:
        return _walk_rows(body, start)
    if name == "scores":
        end = body.find(b"]", start) + 1
        return (body[start:end], end) if end and body.startswith(b"[", start) else None
    if name in _OPAQUE_FIELDS:
        return _walk_opaque(body, start)
    integer = _INTEGER.match(body, start) if name in ("env_id", "policy_version") else None
    return (integer.group(), integer.end()) if integer else None


def _walk_opaque(body: bytes, start: int) -> tuple[bytes, int] | None:
    end = start
    for _ in range(_MAX_TRIES):
        end = _find_next_key(body, end + 1)
        if end < 0:
            return None
        text = body[start:end]
        try:
            # A text that is one whole value, and is followed by a comma, is all of the value.
            _value_decoder.decode(text)
        except (msgspec.DecodeError, RecursionError):
            continue
        return text, end
    return None


def _find_next_key(body: bytes, start: int) -> int:
    while start < len(body):
        found = _NEXT_KEY.search(body, start, start + _CALL_BYTES + _MAX_KEY_BYTES)
        if found is not None:
            return found.start()
        start += _CALL_BYTES
    return -1


def _walk_rows(body: bytes, start: int) -> tuple[RowTexts, int] | None:
    opening = _ROWS_OPENING.match(body, start)
    view = memoryview(body)
    rows: list[memoryview] = []
    position = opening.end() if opening else len(body)
    while body.startswith(b"[", position):
        end = body.find(b"]", position) + 1
        rows.append(view[position:end])
        after = _AFTER_ROW.match(body, end) if end else None
        if after is None:
            return None
        if after.group(1) == b"]":
            end = after.start(1) + 1
            return RowTexts(rows, view[start:end]), end
        position = after.end()
    return None

"""Reading calls written as JSON objects, and writing them; pure, and never raises on any text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.tool_formats.calls import FunctionCall

__all__ = [
    "NamedCall",
    "ReadValue",
    "call_of",
    "is_end",
    "object_of",
    "read_json",
    "skip_space",
    "to_json",
    "whole_value",
]

_SPACE = re.compile(r"\s*")
# An end-of-turn token may follow a call when special tokens were kept in the text.
_END = re.compile(r"\s*(?:(?:<\|[^|<>]*\|>|</s>)\s*)*\Z")


class ReadValue(NamedTuple):
    """A JSON value and where it ended."""

    value: Any
    """What `json` makes of it."""
    end: int
    """Index behind it."""


class NamedCall(NamedTuple):
    """What a JSON object calls."""

    name: str
    """Name of the function, never empty."""
    arguments: str
    """JSON text of an object."""
    call_id: str | None
    """Text under `id`, if any."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


# Not strict: models put line breaks into strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def read_json(text: str, start: int) -> ReadValue | None:
    """Read the JSON value that begins at `start` or behind the space there; None without one."""
    try:
        return ReadValue(*_DECODER.raw_decode(text, skip_space(text, start)))
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no space."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def is_end(text: str, start: int) -> bool:
    """Whether only space and end-of-turn tokens are left."""
    return _END.match(text, start) is not None


def to_json(value: Any) -> str | None:
    """Return JSON text that any parser and UTF-8 accept; None for a number out of range."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_utf8(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any) -> NamedCall | None:
    """Return what an object such as `{"name": ..., "arguments": {...}}` calls.

    The arguments may also be named `parameters`, be JSON text themselves, or be missing; the
    object may lie under `function`. None for anything else.
    """
    if not isinstance(value, dict):
        return None
    call_id = value.get("id")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = whole_value(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not _is_utf8(name):
        return None
    text = to_json(arguments) if isinstance(arguments, dict) else None
    if text is None:
        return None
    return NamedCall(name, text, call_id if isinstance(call_id, str) and call_id else None)


def object_of(call: FunctionCall, arguments_key: str = "arguments") -> Mapping[str, Any]:
    """Return the object that describes a call; arguments that are no JSON stay text."""
    return {"name": call.name, arguments_key: whole_value(call.arguments, blank={})}


def whole_value(text: str, *, blank: Any = None) -> Any:
    """Return the JSON value a text consists of; `blank` without any, the text if it is no JSON."""
    if not text.strip():
        return blank
    read = read_json(text, 0)
    return read.value if read is not None and is_end(text, read.end) else text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Llama 3: calls as bare JSON objects, several divided by semicolons, sometimes behind a tag.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", "parameters": {}}
    <|python_tag|>{"name": "search", "parameters": {"query": "cats"}}

Without the tag an object counts when the answer begins with it, or when it names a tool of the
request: answers hold JSON of other kinds too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.server_handling.tool_formats.calls import (
    FoundCall,
    FunctionCall,
    ToolCallFormat,
    parameter_schemas,
)
from atroposlib.envs.server_handling.tool_formats.json_calls import (
    NamedCall,
    call_of,
    object_of,
    read_json,
    skip_space,
)

__all__ = ["Llama3JsonFormat"]

TAG = "<|python_tag|>"

_OBJECT = re.compile(r'\{\s*"')
_NEXT = re.compile(r"\s*(?:[;,]\s*)?(?:<\|python_tag\|>\s*)?(?=[\[{])")


class Llama3JsonFormat(ToolCallFormat):
    """Objects with `name` and `parameters` (or `arguments`), or a list of them."""

    separator = "; "

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion; see `ToolCallFormat`."""
        tag = text.find(TAG, start)
        first = skip_space(text, start)
        if text.startswith(("{", "["), first):
            return _read_calls(text, first, first)
        if tag >= 0:
            return _read_calls(text, tag, tag + len(TAG))
        position = _known_object(text, first, set(parameter_schemas(tools)))
        return [] if position is None else _read_calls(text, position, position)

    def frame_of(self, name: str) -> tuple[str, str] | None:
        """Return the object around the parameters; see `ToolCallFormat`."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', "}"

    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return the objects, divided by semicolons."""
        return "; ".join(
            json.dumps(object_of(call, "parameters"), ensure_ascii=False) for call in calls
        )


def _known_object(text: str, start: int, names: set[str]) -> int | None:
    """Return the index of the first object that calls one of `names`."""
    found = _OBJECT.search(text, start)
    while found is not None:
        read = read_json(text, found.start())
        if read is None:
            return None
        calls = _calls_in(read.value)
        if calls and calls[0].name in names:
            return found.start()
        found = _OBJECT.search(text, read.end)
    return None


def _read_calls(text: str, start: int, position: int) -> list[FoundCall]:
    """Read the calls from `position` on; the first one begins at `start`."""
    found: list[FoundCall] = []
    while True:
        read = read_json(text, position)
        calls = _calls_in(read.value) if read else None
        if read is None or not calls:
            return []
        found += [FoundCall(c.name, c.arguments, start, read.end, c.call_id) for c in calls]
        following = _NEXT.match(text, read.end)
        if following is None:
            return found
        start, position = read.end, following.end()


def _calls_in(value: Any) -> list[NamedCall] | None:
    """Return the calls of an object or a list of objects; None if one of them is no call."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        call = call_of(entry) if _has_arguments(entry) else None
        if call is None:
            return None
        calls.append(call)
    return calls


def _has_arguments(entry: Any) -> bool:
    inner = entry.get("function", entry) if isinstance(entry, dict) else None
    return isinstance(inner, dict) and bool({"arguments", "parameters"} & inner.keys())

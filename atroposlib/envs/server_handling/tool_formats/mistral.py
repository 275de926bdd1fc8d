"""Mistral: `[TOOL_CALLS]` and a list, or in newer tokenizers a name and its arguments per mark.

[TOOL_CALLS] [{"name": "search", "arguments": {"query": "cats"}}]
[TOOL_CALLS]search[ARGS]{"query": "cats"}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}
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
)
from atroposlib.envs.server_handling.tool_formats.json_calls import (
    call_of,
    is_end,
    object_of,
    read_json,
    skip_space,
)

__all__ = ["MistralFormat"]

MARK = "[TOOL_CALLS]"

_NAMED = re.compile(
    r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


class MistralFormat(ToolCallFormat):
    """Reads both spellings.

    Args:
        writes_names: Render a mark, a name and arguments per call instead of one list.
    """

    def __init__(self, *, writes_names: bool = False) -> None:
        self.writes_names = writes_names

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion; see `ToolCallFormat`."""
        calls: list[FoundCall] = []
        mark = text.find(MARK, start)
        while mark >= 0:
            inside = skip_space(text, mark + len(MARK))
            is_list = text.startswith("[", inside)
            read = _read_list(text, mark, inside + 1) if is_list else _read_one(text, mark, inside)
            if not read:
                return []
            calls += read
            mark = text.find(MARK, calls[-1].end)
        return calls

    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return the calls behind one mark, or behind one each."""
        objects = [object_of(call) for call in calls]
        if not self.writes_names:
            return f"{MARK} {json.dumps(objects, ensure_ascii=False)}"
        return "".join(
            f"{MARK}{o['name']}[ARGS]{json.dumps(o['arguments'], ensure_ascii=False)}"
            for o in objects
        )


def _read_list(text: str, start: int, position: int) -> list[FoundCall] | None:
    """Read the objects of a list that may lack its closing bracket at the end of the text."""
    calls: list[FoundCall] = []
    while True:
        read = read_json(text, position)
        call = call_of(read.value) if read else None
        if read is None or call is None:
            return None
        calls.append(FoundCall(call.name, call.arguments, start, read.end, call.call_id))
        position = skip_space(text, read.end)
        if text.startswith("]", position) or is_end(text, position):
            return calls
        if not text.startswith(",", position):
            return None
        start, position = position, position + 1


def _read_one(text: str, start: int, position: int) -> list[FoundCall] | None:
    """Read a name with its arguments, or one object that lacks the list around it."""
    head = _NAMED.match(text, position)
    read = read_json(text, head.end() if head else position)
    if read is None:
        return None
    value = (
        {"name": head["name"], "arguments": read.value, "id": head["id"]} if head else read.value
    )
    call = call_of(value)
    if call is None:
        return None
    return [FoundCall(call.name, call.arguments, start, read.end, call.call_id)]

"""Hermes: each call a JSON object between `<tool_call>` tags; Qwen2.5 and Qwen3 write it too.

Let me look.
<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>
"""

from __future__ import annotations

import json
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

__all__ = ["CLOSE", "OPEN", "HermesFormat", "closing_end", "read_tagged_json"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesFormat(ToolCallFormat):
    """Any number of tagged JSON objects; only the last tag may be left open."""

    trigger = OPEN

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion; see `ToolCallFormat`."""
        calls: list[FoundCall] = []
        position = text.find(OPEN, start)
        while position >= 0:
            call = read_tagged_json(text, position)
            if call is None:
                return []
            calls.append(call)
            position = text.find(OPEN, call.end)
        return calls

    def frame_of(self, name: str) -> tuple[str, str] | None:
        """Return the tag and the object around the arguments; see `ToolCallFormat`."""
        return (
            f'{OPEN}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
            f"}}{CLOSE}",
        )

    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return one tagged object per line."""
        return "\n".join(
            f"{OPEN}{json.dumps(object_of(call), ensure_ascii=False)}{CLOSE}" for call in calls
        )


def read_tagged_json(text: str, start: int) -> FoundCall | None:
    """Read the JSON call whose opening tag is at `start`; None if it is broken."""
    read = read_json(text, start + len(OPEN))
    call = call_of(read.value) if read else None
    if read is None or call is None:
        return None
    end = closing_end(text, read.end)
    if end is None:
        return None
    return FoundCall(call.name, call.arguments, start, end, call.call_id)


def closing_end(text: str, start: int) -> int | None:
    """Return the index behind the closing tag, or of the end of a text that lacks it; else None."""
    position = skip_space(text, start)
    if text.startswith(CLOSE, position):
        return position + len(CLOSE)
    return len(text) if is_end(text, start) else None

"""Qwen: Hermes' tagged JSON (Qwen2.5, Qwen3), or a function element in the tag (Qwen3-Coder).

    <tool_call>                                              <tool_call>
    {"name": "search", "arguments": {"query": "cats"}}       <function=search>
    </tool_call>                                             <parameter=query>
                                                             cats
                                                             </parameter>
                                                             </function>
                                                             </tool_call>

Parameters of a function element carry no type: the tool's schema decides, and text stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.tool_formats.calls import (
    FoundCall,
    FunctionCall,
    ToolCallFormat,
    parameter_schemas,
)
from atroposlib.envs.server_handling.tool_formats.hermes import (
    CLOSE,
    OPEN,
    closing_end,
    read_tagged_json,
)
from atroposlib.envs.server_handling.tool_formats.json_calls import (
    is_end,
    object_of,
    skip_space,
    to_json,
    whole_value,
)

__all__ = ["QwenFormat"]

_MARK = re.compile(rf"{OPEN}|<function=")
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>|\Z))\s*", re.DOTALL
)
_PYTHON_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


class QwenFormat(ToolCallFormat):
    """Reads tagged JSON and function elements.

    Args:
        writes_elements: Render function elements, as Qwen3-Coder does, instead of JSON.
    """

    trigger = OPEN

    def __init__(self, *, writes_elements: bool = False) -> None:
        self.writes_elements = writes_elements

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion; see `ToolCallFormat`."""
        schemas = parameter_schemas(tools)
        calls: list[FoundCall] = []
        mark = _MARK.search(text, start)
        while mark is not None:
            call = _read_call(text, mark.start(), schemas)
            if call is None:
                return []
            calls.append(call)
            mark = _MARK.search(text, call.end)
        return calls

    def frame_of(self, name: str) -> tuple[str, str] | None:
        """Return the tag and the object around the arguments; None for function elements."""
        if self.writes_elements:
            return None
        named = json.dumps(name, ensure_ascii=False)
        return f'{OPEN}\n{{"name": {named}, "arguments": ', f"}}\n{CLOSE}"

    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return one tag per call, each tag on a line of its own."""
        write = _element if self.writes_elements else _json
        return "\n".join(f"{OPEN}\n{write(call)}\n{CLOSE}" for call in calls)


def _read_call(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> FoundCall | None:
    is_tagged = text.startswith(OPEN, start)
    inside = skip_space(text, start + len(OPEN)) if is_tagged else start
    if not text.startswith("<function=", inside):
        return read_tagged_json(text, start)
    call = _read_element(text, inside, schemas)
    end = closing_end(text, call.end) if call and is_tagged else call and call.end
    return call._replace(start=start, end=end) if call and end is not None else None


def _read_element(
    text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]
) -> FoundCall | None:
    """Read the function element at `start`; only the last of a completion may be left open."""
    head = _FUNCTION.match(text, start)
    if head is None:
        return None
    name, position = head[1].strip(), head.end()
    types = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, position)) is not None:
        arguments[parameter[1].strip()] = _typed(parameter[2], types.get(parameter[1].strip()))
        position = parameter.end()
    is_closed = text.startswith("</function>", position)
    arguments_text = to_json(arguments)
    if not name or arguments_text is None or not (is_closed or is_end(text, position)):
        return None
    end = position + len("</function>") if is_closed else len(text)
    return FoundCall(name, arguments_text, start, end)


def _typed(text: str, schema: Any) -> Any:
    """Return the value a parameter's text stands for under its schema, None if it has none."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema) if isinstance(schema, Mapping) else set()
    if not kinds or "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    if text.strip() in _PYTHON_WORDS:
        return _PYTHON_WORDS[text.strip()]
    return whole_value(text, blank=text)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types a schema allows; empty when it does not say."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    kinds: set[str] = set()
    for one in [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]:
        kinds |= _kinds(one)
    # What a reference points at is not looked up: JSON is tried, and text kept where it is none.
    return kinds | {"object"} if {"$ref", "allOf"} & schema.keys() else kinds


def _listed(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = schema.get(key)
    return [e for e in entries if isinstance(e, Mapping)] if isinstance(entries, list) else []


def _json(call: FunctionCall) -> str:
    return json.dumps(object_of(call), ensure_ascii=False)


def _element(call: FunctionCall) -> str:
    arguments = object_of(call)["arguments"]
    lines = [f"<function={call.name}>"]
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={name}>", shown, "</parameter>"]
    return "\n".join([*lines, "</function>"])

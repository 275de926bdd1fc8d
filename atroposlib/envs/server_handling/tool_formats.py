"""Formats of tool calls of model families, and the registry that finds one by name.

Sections: the formats Hermes, Qwen, Llama 3 and Mistral; the registry. Further formats are in
`tagged_tool_formats`. To add a format, pass a subclass of `ToolCallFormat` to `registry.register`;
the name then works as `tool_parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.tagged_tool_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    GlmFormat,
    ListedCallsFormat,
    NamedArgumentsFormat,
    PythonCallsFormat,
)
from atroposlib.envs.server_handling.tool_calls import (
    FoundCall,
    FunctionCall,
    NamedCall,
    ToolCallFormat,
    call_of,
    is_end,
    json_of,
    object_of,
    parameter_schemas,
    read_json,
    skip_space,
    to_json,
    typed_value,
)

__all__ = [
    "FoundCall", "FunctionCall", "GlmFormat", "HermesFormat", "ListedCallsFormat",
    "Llama3JsonFormat", "MistralFormat", "NamedArgumentsFormat", "PythonCallsFormat", "QwenFormat",
    "ToolCallFormat", "ToolFormatRegistry", "registry",
]  # fmt: skip

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesFormat(ToolCallFormat):
    """Hermes: one JSON object per call between `<tool_call>` tags, also used by Qwen2.5 and Qwen3.

    Only the last tag may be left open. Example:

        Let me look.
        <tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>
    """

    trigger = OPEN

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
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
        return (
            f'{OPEN}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
            f"}}{CLOSE}",
        )

    def render(self, calls: Sequence[FunctionCall]) -> str:
        return "\n".join(f"{OPEN}{json_of(call)}{CLOSE}" for call in calls)


def read_tagged_json(text: str, start: int) -> FoundCall | None:
    """Read the JSON call whose opening tag is at `start`; None if it is malformed."""
    read = read_json(text, start + len(OPEN))
    call = call_of(read.value) if read else None
    if read is None or call is None:
        return None
    end = closing_end(text, read.end)
    if end is None:
        return None
    return FoundCall(call.name, call.arguments, start, end, call.call_id)


def closing_end(text: str, start: int) -> int | None:
    """Return the index after the closing tag, or the end of a text that lacks it; else None."""
    position = skip_space(text, start)
    if text.startswith(CLOSE, position):
        return position + len(CLOSE)
    return len(text) if is_end(text, start) else None


_MARK = re.compile(rf"{OPEN}|<function=")
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>|\Z))\s*", re.DOTALL
)


class QwenFormat(ToolCallFormat):
    """Qwen: tagged JSON as in Hermes (Qwen2.5, Qwen3), or function elements (Qwen3-Coder).

        <tool_call>                                              <tool_call>
        {"name": "search", "arguments": {"query": "cats"}}       <function=search>
        </tool_call>                                             <parameter=query>
                                                                 cats
                                                                 </parameter>
                                                                 </function>
                                                                 </tool_call>

    Both are parsed. Parameters of a function element have no type: the tool's schema decides, and
    without one the value stays text.

    Args:
        writes_elements: Render function elements, as Qwen3-Coder does, instead of JSON.
    """

    trigger = OPEN

    def __init__(self, *, writes_elements: bool = False) -> None:
        self.writes_elements = writes_elements

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
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
        if self.writes_elements:
            return None
        named = json.dumps(name, ensure_ascii=False)
        return f'{OPEN}\n{{"name": {named}, "arguments": ', f"}}\n{CLOSE}"

    def render(self, calls: Sequence[FunctionCall]) -> str:
        write = _element if self.writes_elements else json_of
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
        key, text_of_value = (
            parameter[1].strip(),
            parameter[2].removeprefix("\n").removesuffix("\n"),
        )
        arguments[key] = typed_value(text_of_value, types.get(key))
        position = parameter.end()
    is_closed = text.startswith("</function>", position)
    arguments_text = to_json(arguments)
    if not name or arguments_text is None or not (is_closed or is_end(text, position)):
        return None
    end = position + len("</function>") if is_closed else len(text)
    return FoundCall(name, arguments_text, start, end)


def _element(call: FunctionCall) -> str:
    arguments = object_of(call)["arguments"]
    lines = [f"<function={call.name}>"]
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={name}>", shown, "</parameter>"]
    return "\n".join([*lines, "</function>"])


TAG = "<|python_tag|>"

_OBJECT = re.compile(r'\{\s*"')
_NEXT = re.compile(r"\s*(?:[;,]\s*)?(?:<\|python_tag\|>\s*)?(?=[\[{])")


class Llama3JsonFormat(ToolCallFormat):
    """Llama 3: JSON objects with `name` and `parameters` (or `arguments`), or a list of them.

    Several calls are separated by semicolons; a tag may come first:

        {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", ...}
        <|python_tag|>{"name": "search", "parameters": {"query": "cats"}}

    Answers may contain other JSON. So without the tag, an object is a call only if the answer
    begins with it, or if it names a tool of the request.
    """

    separator = "; "

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        tag = text.find(TAG, start)
        first = skip_space(text, start)
        if text.startswith(("{", "["), first):
            return _read_calls(text, first, first)
        if tag >= 0:
            return _read_calls(text, tag, tag + len(TAG))
        position = _known_object(text, first, set(parameter_schemas(tools)))
        return [] if position is None else _read_calls(text, position, position)

    def frame_of(self, name: str) -> tuple[str, str] | None:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', "}"

    def render(self, calls: Sequence[FunctionCall]) -> str:
        return "; ".join(json_of(call, "parameters") for call in calls)


def _known_object(text: str, start: int, names: set[str]) -> int | None:
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
    """Return the calls of an object or a list of objects; None if one of them is not a call."""
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


MARK = "[TOOL_CALLS]"

_NAMED = re.compile(
    r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


class MistralFormat(ToolCallFormat):
    """Mistral: `[TOOL_CALLS]` and a list; with newer tokenizers a name and arguments per mark.

        [TOOL_CALLS] [{"name": "search", "arguments": {"query": "cats"}}]
        [TOOL_CALLS]search[ARGS]{"query": "cats"}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}

    Both are parsed.

    Args:
        writes_names: Render a mark, a name and arguments per call instead of one list.
    """

    def __init__(self, *, writes_names: bool = False) -> None:
        self.writes_names = writes_names

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
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


class ToolFormatRegistry:
    """Finds formats by name; case and the characters `-`, `.` and `_` are ignored."""

    def __init__(self) -> None:
        self._formats: dict[str, ToolCallFormat] = {}
        self._names: list[str] = []

    def register(self, tool_format: ToolCallFormat, *names: str) -> None:
        """Register a format under `names`, replacing earlier registrations of these names."""
        for name in names:
            self._names = [known for known in self._names if _key(known) != _key(name)]
            self._names.append(name)
            self._formats[_key(name)] = tool_format

    def find(self, name: str) -> ToolCallFormat | None:
        return self._formats.get(_key(name))

    def names(self) -> list[str]:
        return sorted(self._names)


def _key(name: str) -> str:
    return name.lower().translate({ord(mark): None for mark in "-._"})


registry = ToolFormatRegistry()
registry.register(HermesFormat(), "hermes", "granite4", "ernie45")
registry.register(Llama3JsonFormat(), "llama3_json", "llama3", "llama4_json")
registry.register(QwenFormat(), "qwen", "qwen2.5", "qwen3", "qwen3_json")
registry.register(QwenFormat(writes_elements=True), "qwen3_coder", "qwen3_xml")
registry.register(MistralFormat(), "mistral")
registry.register(MistralFormat(writes_names=True), "mistral_v11")
registry.register(DEEPSEEK_V3, "deepseek_v3")
registry.register(DEEPSEEK_V31, "deepseek_v31")
registry.register(KIMI_K2, "kimi_k2")
registry.register(GlmFormat(), "glm45", "glm47")
registry.register(PythonCallsFormat(), "pythonic")
registry.register(PythonCallsFormat("<|python_start|>", "<|python_end|>"), "llama4_pythonic")
registry.register(
    PythonCallsFormat("<|tool_call_start|>", "<|tool_call_end|>", needs_opening=True), "lfm2"
)
registry.register(
    PythonCallsFormat("<function_calls>", "</function_calls>", writes_lines=True), "olmo3"
)
registry.register(
    ListedCallsFormat("<tool_calls>", closing="</tool_calls>"), "jamba", "hunyuan_a13b"
)
registry.register(ListedCallsFormat("functools"), "phi4_mini_json")
registry.register(ListedCallsFormat("<|tool_call|>", "<tool_call>"), "granite")
registry.register(
    ListedCallsFormat(
        "<|action_start|><|plugin|>",
        closing="<|action_end|>",
        arguments_key="parameters",
        writes_list=False,
    ),
    "internlm",
)

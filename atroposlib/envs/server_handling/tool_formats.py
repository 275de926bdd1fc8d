"""Parse and render tool calls in the formats of model families; pure, and never raises on text.

    completion ─► ToolCallFormat.find_calls ─► FoundCall, ...
    calls of other origin ─► ToolCallFormat.render ─► the text the model would have written

Sections: the interface `ToolCallFormat`; JSON helpers; the formats Hermes, Qwen, Llama 3 and
Mistral; the registry that finds a format by name. To add a format, pass a subclass of
`ToolCallFormat` to `registry.register`; the name then works as `tool_parser`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel


class FunctionCall(BaseModel):
    """Name and arguments of a call."""

    name: str
    arguments: str
    """JSON text of an object, as in the chat APIs."""


class ToolCall(BaseModel):
    """One call in the format of the chat APIs.

    `ToolCall(id="a1B2c3D4e", function=FunctionCall(name="add", arguments='{"a": 1}'))`
    """

    id: str
    """Id by which the tool's result message refers to the call."""
    type: Literal["function"] = "function"
    function: FunctionCall


class FoundCall(NamedTuple):
    """A call read from a completion."""

    name: str
    """Name of the function, never empty."""
    arguments: str
    """JSON text of an object."""
    start: int
    """Index in the completion where the call begins, including its tag."""
    end: int
    call_id: str | None = None
    """Id written by the model; None in most formats."""


class ToolCallFormat(ABC):
    """Tool-call syntax of one model family. Implementations hold no state.

    Attributes:
        trigger: Text that begins every call and nothing else; None if the format has none.
        separator: Text between calls.
    """

    trigger: str | None = None
    separator: str = "\n"

    @abstractmethod
    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion in their order.

        If one call is malformed, the list is empty, so that a partial set of calls is never
        executed. Never raises, whatever the text.

        Args:
            text: The completion.
            start: Index where the search begins, after the thinking.
            tools: Tool definitions of the request, as the caller gave them.
        """

    def frame_of(self, name: str) -> tuple[str, str] | None:
        """Return the text before and after the arguments; None if they are not a JSON object."""
        return None

    @abstractmethod
    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return the text of calls; `find_calls` parses it back to the same calls."""


def parameter_schemas(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Map the name of every tool to the JSON schemas of its parameters by their names.

    Malformed definitions, which callers may send, are left out.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas


_SPACE = re.compile(r"\s*")
# An end-of-turn token may follow a call when special tokens were kept in the text.
_END = re.compile(r"\s*(?:(?:<\|[^|<>]*\|>|</s>)\s*)*\Z")


class ReadValue(NamedTuple):
    """A decoded JSON value and its end."""

    value: Any
    end: int


class NamedCall(NamedTuple):
    """A call described by a JSON object; fields as in `FoundCall`."""

    name: str
    arguments: str
    call_id: str | None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


# Not strict: models put line breaks into strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def read_json(text: str, start: int) -> ReadValue | None:
    """Read the JSON value at `start`, after optional whitespace; None if there is none."""
    try:
        return ReadValue(*_DECODER.raw_decode(text, skip_space(text, start)))
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, start: int) -> int:
    """Return the index of the first non-whitespace character from `start` on."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def is_end(text: str, start: int) -> bool:
    """Whether only whitespace and end-of-turn tokens are left."""
    return _END.match(text, start) is not None


def to_json(value: Any) -> str | None:
    """Return standard JSON text that can be encoded as UTF-8; None for a number out of range."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_utf8(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any) -> NamedCall | None:
    """Return the call in an object such as `{"name": ..., "arguments": {...}}`.

    The arguments may also be named `parameters`, be JSON text, or be missing; the object may be
    nested under `function`. None for any other value.
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
    """Return the object that describes a call; arguments that are not JSON stay text."""
    return {"name": call.name, arguments_key: whole_value(call.arguments, blank={})}


def _json(call: FunctionCall, arguments_key: str = "arguments") -> str:
    return json.dumps(object_of(call, arguments_key), ensure_ascii=False)


def whole_value(text: str, *, blank: Any = None) -> Any:
    """Return a text decoded as JSON; `blank` if it is empty, the text itself if it is not JSON."""
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
        return "\n".join(f"{OPEN}{_json(call)}{CLOSE}" for call in calls)


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
_PYTHON_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


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
    """Convert the text of a parameter to a value according to its schema."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema) if isinstance(schema, Mapping) else set()
    if not kinds or "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    if text.strip() in _PYTHON_WORDS:
        return _PYTHON_WORDS[text.strip()]
    return whole_value(text, blank=text)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not restrict them."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    kinds: set[str] = set()
    for one in [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]:
        kinds |= _kinds(one)
    # References are not resolved: the value is decoded if it is JSON, else kept as text.
    return kinds | {"object"} if {"$ref", "allOf"} & schema.keys() else kinds


def _listed(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = schema.get(key)
    return [e for e in entries if isinstance(e, Mapping)] if isinstance(entries, list) else []


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
        return "; ".join(_json(call, "parameters") for call in calls)


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
registry.register(HermesFormat(), "hermes")
registry.register(Llama3JsonFormat(), "llama3_json", "llama3", "llama4_json")
registry.register(QwenFormat(), "qwen", "qwen2.5", "qwen3", "qwen3_json")
registry.register(QwenFormat(writes_elements=True), "qwen3_coder", "qwen3_xml")
registry.register(MistralFormat(), "mistral")
registry.register(MistralFormat(writes_names=True), "mistral_v11")

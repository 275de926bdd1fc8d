"""Tool calls: their objects, the interface of their formats, and helpers to read their JSON.

    completion ─► ToolCallFormat.find_calls ─► FoundCall, ...
    calls of other origin ─► ToolCallFormat.render ─► the text the model would have written

Pure, and never raises on text. The formats are in `tool_formats`.
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
    """Return standard JSON text that can be encoded as UTF-8; None if there is none for a value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_utf8(text) else json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
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
    if not isinstance(name, str) or not name or not is_utf8(name):
        return None
    text = to_json(arguments) if isinstance(arguments, dict) else None
    if text is None:
        return None
    return NamedCall(name, text, call_id if isinstance(call_id, str) and call_id else None)


def object_of(call: FunctionCall, arguments_key: str = "arguments") -> Mapping[str, Any]:
    """Return the object that describes a call; arguments that are not JSON stay text."""
    return {"name": call.name, arguments_key: whole_value(call.arguments, blank={})}


def json_of(call: FunctionCall, arguments_key: str = "arguments") -> str:
    """Return that object as JSON text."""
    return json.dumps(object_of(call, arguments_key), ensure_ascii=False)


def whole_value(text: str, *, blank: Any = None) -> Any:
    """Return a text decoded as JSON; `blank` if it is empty, the text itself if it is not JSON."""
    if not text.strip():
        return blank
    read = read_json(text, 0)
    return read.value if read is not None and is_end(text, read.end) else text


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded, which lone surrogates prevent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_PYTHON_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


def typed_value(text: str, schema: Any) -> Any:
    """Convert the text of a parameter to a value according to its schema."""
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

"""Formats of tool calls of DeepSeek, Kimi, GLM, Llama 4, LFM2, OLMo, Granite and others.

    NamedArgumentsFormat   NAME, then JSON arguments, between tokens
    GlmFormat              NAME and elements of keys and values
    PythonCallsFormat      [NAME(key=value), ...], read as literals, never executed
    ListedCallsFormat      a mark and a JSON list of objects

Pure, and never raises on text. `tool_formats` registers them under the names that vLLM gives them.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.tool_calls import (
    FoundCall,
    FunctionCall,
    NamedCall,
    ToolCallFormat,
    call_of,
    is_end,
    object_of,
    parameter_schemas,
    read_json,
    skip_space,
    typed_value,
)

__all__ = [
    "DEEPSEEK_V3",
    "DEEPSEEK_V31",
    "KIMI_K2",
    "GlmFormat",
    "ListedCallsFormat",
    "NamedArgumentsFormat",
    "PythonCallsFormat",
]


class NamedArgumentsFormat(ToolCallFormat):
    """A name and JSON arguments per call, all calls in one section.

        <|tool_calls_section_begin|><|tool_call_begin|>functions.search:0
        <|tool_call_argument_begin|>{"query": "cats"}<|tool_call_end|><|tool_calls_section_end|>

    Args:
        section: Tokens around all calls.
        call: Tokens around a call.
        head: Pattern of what precedes the arguments, with the group `name` and maybe `id`.
        template: What is written for a call, of `{name}`, `{index}` and `{arguments}`.
        tail: Pattern of what follows the arguments.
    """

    def __init__(
        self, section: tuple[str, str], call: tuple[str, str], head: str, template: str, tail: str
    ) -> None:
        self._section, self._call = section, call
        self._head, self._tail = re.compile(head), re.compile(tail)
        self._template = template

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        calls: list[FoundCall] = []
        position = text.find(self._call[0], start)
        while position >= 0:
            call = self._read(text, position)
            if call is None:
                return []
            calls.append(call)
            position = text.find(self._call[0], call.end)
        if calls:
            section = text.find(self._section[0], start, calls[0].start)
            if section >= 0:
                calls[0] = calls[0]._replace(start=section)
            after = skip_space(text, calls[-1].end)
            if text.startswith(self._section[1], after):
                calls[-1] = calls[-1]._replace(end=after + len(self._section[1]))
        return calls

    def _read(self, text: str, start: int) -> FoundCall | None:
        head = self._head.match(text, start + len(self._call[0]))
        read = read_json(text, head.end()) if head else None
        if head is None or read is None:
            return None
        named = {"name": head["name"].strip(), "arguments": read.value, "id": _group(head, "id")}
        call = call_of(named)
        tail = self._tail.match(text, read.end)
        end = tail.end() if tail else read.end
        if text.startswith(self._call[1], end):
            end += len(self._call[1])
        elif is_end(text, end):
            end = len(text)
        else:
            return None
        return FoundCall(call.name, call.arguments, start, end, call.call_id) if call else None

    def render(self, calls: Sequence[FunctionCall]) -> str:
        written = [
            self._template.format(
                name=call.name,
                index=index,
                arguments=json.dumps(object_of(call)["arguments"], ensure_ascii=False),
            )
            for index, call in enumerate(calls)
        ]
        opening, closing = self._call
        inside = "".join(f"{opening}{each}{closing}" for each in written)
        return f"{self._section[0]}{inside}{self._section[1]}"


def _group(match: re.Match[str], name: str) -> str | None:
    found: str | None = match.groupdict().get(name)
    return found


def _deepseek(name: str) -> str:
    bar, space = "\uff5c", "\u2581"
    return f"<{bar}{name.replace(' ', space)}{bar}>"


_SEP = _deepseek("tool sep")
_DEEPSEEK_SECTION = (_deepseek("tool calls begin"), _deepseek("tool calls end"))
_DEEPSEEK_CALL = (_deepseek("tool call begin"), _deepseek("tool call end"))

DEEPSEEK_V3 = NamedArgumentsFormat(
    _DEEPSEEK_SECTION,
    _DEEPSEEK_CALL,
    head=rf"\s*function{_SEP}(?P<name>[^\n]+)\n```json\s*",
    template=f"function{_SEP}{{name}}\n```json\n{{arguments}}\n```",
    tail=r"\s*```\s*",
)
DEEPSEEK_V31 = NamedArgumentsFormat(
    _DEEPSEEK_SECTION,
    _DEEPSEEK_CALL,
    head=rf"(?P<name>[^\n<]+){_SEP}",
    template=f"{{name}}{_SEP}{{arguments}}",
    tail=r"\s*",
)
KIMI_K2 = NamedArgumentsFormat(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    head=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+):\d+)\s*<\|tool_call_argument_begin\|>",
    template="functions.{name}:{index}<|tool_call_argument_begin|>{arguments}",
    tail=r"\s*",
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = "</arg_value>"


class GlmFormat(ToolCallFormat):
    """GLM: a name, and an element for each key and each value.

        <tool_call>search
        <arg_key>query</arg_key>
        <arg_value>cats</arg_value>
        </tool_call>

    Values have no type: the tool's schema decides, and without one the value stays text.
    """

    trigger = _OPEN

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        schemas = parameter_schemas(tools)
        calls: list[FoundCall] = []
        position = text.find(_OPEN, start)
        while position >= 0:
            call = _read_glm_call(text, position, schemas)
            if call is None:
                return []
            calls.append(call)
            position = text.find(_OPEN, call.end)
        return calls

    def render(self, calls: Sequence[FunctionCall]) -> str:
        return "\n".join(map(_glm_text, calls))


def _read_glm_call(
    text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]
) -> FoundCall | None:
    name = _GLM_NAME.match(text, start + len(_OPEN))
    if name is None:
        return None
    types, position = schemas.get(name[1], {}), name.end()
    arguments: dict[str, Any] = {}
    while (key := _GLM_KEY.match(text, position)) is not None:
        end = text.find(_GLM_VALUE_END, key.end())
        if end < 0:
            return None
        arguments[key[1].strip()] = typed_value(text[key.end() : end], types.get(key[1].strip()))
        position = end + len(_GLM_VALUE_END)
    position = skip_space(text, position)
    is_closed = text.startswith(_CLOSE, position)
    call = call_of({"name": name[1], "arguments": arguments})
    if call is None or not (is_closed or is_end(text, position)):
        return None
    end = position + len(_CLOSE) if is_closed else len(text)
    return FoundCall(call.name, call.arguments, start, end)


def _glm_text(call: FunctionCall) -> str:
    arguments = object_of(call)["arguments"]
    lines = [f"{_OPEN}{call.name}"]
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<arg_key>{name}</arg_key>", f"<arg_value>{shown}{_GLM_VALUE_END}"]
    return "\n".join([*lines, _CLOSE])


class _Region(NamedTuple):
    """A part of a completion that may be calls."""

    text: str
    start: int
    end: int


class PythonCallsFormat(ToolCallFormat):
    """Calls in the syntax of Python, with literals as arguments; read, never executed.

        [search(query="cats"), get_time()]
        <|tool_call_start|>[search(query="cats")]<|tool_call_end|>

    `true`, `false` and `null` are read as in JSON.

    Args:
        opening: Token before the calls; empty if they are the whole completion.
        closing: Token after them.
        needs_opening: Whether a list without the token is text.
        writes_lines: Write one call per line instead of a list, as OLMo does.
    """

    def __init__(
        self,
        opening: str = "",
        closing: str = "",
        *,
        needs_opening: bool = False,
        writes_lines: bool = False,
    ) -> None:
        self._opening, self._closing = opening, closing
        self._needs_opening, self._writes_lines = needs_opening, writes_lines

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        region = self._region(text, start)
        if region is None:
            return []
        return [
            FoundCall(call.name, call.arguments, region.start, region.end)
            for call in _python_calls(region.text)
        ]

    def _region(self, text: str, start: int) -> _Region | None:
        position = text.find(self._opening, start) if self._opening else -1
        if position >= 0:
            inside = position + len(self._opening)
            end = text.find(self._closing, inside)
            if end < 0:
                return _Region(_without_end(text[inside:]), position, len(text))
            return _Region(text[inside:end], position, end + len(self._closing))
        first = skip_space(text, start)
        if self._needs_opening or not text.startswith("[", first):
            return None
        return _Region(_without_end(text[first:]), first, len(text))

    def render(self, calls: Sequence[FunctionCall]) -> str:
        written = [_python_text(call) for call in calls]
        inside = "\n".join(written) if self._writes_lines else f"[{', '.join(written)}]"
        return f"{self._opening}{inside}{self._closing}"


_END_TOKENS = re.compile(r"(?:<\|[^|<>]*\|>|</s>|\s)*\Z")
_LAST_CHARACTERS = 200


def _without_end(text: str) -> str:
    """Return a text without the end-of-turn tokens after it."""
    start = max(0, len(text) - _LAST_CHARACTERS)
    found = _END_TOKENS.search(text, start)
    return text[: found.start()] if found else text


_WORDS = {"true": True, "false": False, "null": None}


class _JsonWords(ast.NodeTransformer):
    """Replaces the names of JSON's constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _python_calls(text: str) -> list[NamedCall]:
    """Return the calls of a list, or of lines; none if anything else is among them."""
    stripped = text.strip()
    if not stripped.startswith("["):
        lines = [line.strip() for line in stripped.splitlines() if line.strip()]
        stripped = f"[{', '.join(lines)}]"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # unusual escapes in texts
            tree = _JsonWords().visit(ast.parse(stripped, mode="eval")).body
        found = [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _python_call(node: ast.expr) -> NamedCall | None:
    """Return one call; raises `ValueError` if an argument is not a literal."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        value = ast.literal_eval(argument.value)
        arguments |= value if argument.arg is None else {argument.arg: value}
    return call_of({"name": name, "arguments": arguments})


def _python_text(call: FunctionCall) -> str:
    arguments = object_of(call)["arguments"]
    items = list(arguments.items()) if isinstance(arguments, dict) else []
    named = [(key, value) for key, value in items if _is_name(key)]
    others = {key: value for key, value in items if not _is_name(key)}
    parts = [f"{key}={value!r}" for key, value in named]
    return f"{call.name}({', '.join([*parts, *([f'**{others!r}'] if others else [])])})"


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


class ListedCallsFormat(ToolCallFormat):
    """A mark and a JSON list of calls, or one call.

        <tool_calls>[{"name": "search", "arguments": {"query": "cats"}}]</tool_calls>
        functools[{"name": "search", "arguments": {"query": "cats"}}]

    Args:
        openings: Marks before the list; the first one is written.
        closing: Mark after it; may be missing at the end.
        arguments_key: Key of the arguments that is written.
        writes_list: Write one list of all calls; otherwise a mark and an object per call.
    """

    def __init__(
        self,
        *openings: str,
        closing: str = "",
        arguments_key: str = "arguments",
        writes_list: bool = True,
    ) -> None:
        self._openings, self._closing = openings, closing
        # A mark that has no closing one may also be a word of a text.
        follows = "" if closing else r"(?=\s*[\[{])"
        self._mark = re.compile(f"(?:{'|'.join(map(re.escape, openings))}){follows}")
        self._arguments_key, self._writes_list = arguments_key, writes_list

    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        calls: list[FoundCall] = []
        mark = self._mark.search(text, start)
        while mark is not None:
            read = self._read(text, mark)
            if not read:
                return []
            calls += read
            mark = self._mark.search(text, read[-1].end)
        return calls

    def _read(self, text: str, mark: re.Match[str]) -> list[FoundCall]:
        read = read_json(text, mark.end())
        if read is None:
            return []
        entries = read.value if isinstance(read.value, list) else [read.value]
        calls = [call for call in map(call_of, entries) if call is not None]
        end = skip_space(text, read.end)
        if self._closing and text.startswith(self._closing, end):
            end += len(self._closing)
        elif self._closing and not is_end(text, end):
            return []
        else:
            end = read.end
        if len(calls) < len(entries):
            return []
        return [FoundCall(c.name, c.arguments, mark.start(), end, c.call_id) for c in calls]

    def render(self, calls: Sequence[FunctionCall]) -> str:
        objects = [object_of(call, self._arguments_key) for call in calls]
        written = [objects] if self._writes_list else objects
        return "".join(
            f"{self._openings[0]}{json.dumps(each, ensure_ascii=False)}{self._closing}"
            for each in written
        )

"""Each format reads what it writes, what its models write, and refuses the rest without raising."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.tool_formats import (
    FunctionCall,
    HermesFormat,
    Llama3JsonFormat,
    MistralFormat,
    QwenFormat,
    ToolCallFormat,
    ToolFormatRegistry,
    registry,
)
from tests.growth import assert_linear
from tests.server_handling.tool_call_samples import CALLS, HERMES_CALL, NAMES, SEARCH, TEXTS

pytestmark = pytest.mark.slow

Calls = list[tuple[str, Any]]

TYPED: dict[str, Any] = {
    "function": {
        "name": "typed",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "rows": {"type": "array"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "options": {"$ref": "#/$defs/Options"},
            }
        },
    }
}

JSON_FORMATS = {
    "hermes": HermesFormat(),
    "qwen": QwenFormat(),
    "llama3_json": Llama3JsonFormat(),
    "mistral": MistralFormat(),
    "mistral_v11": MistralFormat(writes_names=True),
}
ELEMENTS = QwenFormat(writes_elements=True)
ELEMENT_CALL = (
    "<tool_call>\n<function=search>\n"
    "<parameter=query>\ncats\n</parameter>\n"
    "</function>\n</tool_call>"
)
MARKS = (
    st.sampled_from(["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<think>"])
    | st.sampled_from(["<parameter=p>", "</parameter>", "<|python_tag|>", "</think>", "</s>"])
    | st.sampled_from(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", "{}", ";", ","])
    | st.sampled_from(['{"name": "f", "arguments": ', '"', "\\ud800", "NaN", "1e999", " ", "\n"])
)


def read(tool_format: ToolCallFormat, text: str, tools: list[Any] | None = None) -> Calls:
    found = tool_format.find_calls(text, 0, tools or [SEARCH])
    return [(call.name, json.loads(call.arguments)) for call in found]


def write(tool_format: ToolCallFormat, calls: Calls) -> str:
    return tool_format.render(
        [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]
    )


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=40)
@given(calls=CALLS)
def test_any_calls_written_are_read_back(name: str, calls: Calls) -> None:
    assert read(JSON_FORMATS[name], write(JSON_FORMATS[name], calls)) == calls


@pytest.mark.parametrize("name", ["hermes", "qwen", "mistral", "mistral_v11"])
@settings(max_examples=40)
@given(before=TEXTS, calls=CALLS)
def test_calls_begin_behind_the_text_before_them(name: str, before: str, calls: Calls) -> None:
    tool_format = JSON_FORMATS[name]

    found = tool_format.find_calls(before + write(tool_format, calls), 0, [])

    assert found[0].start == len(before)
    assert len(found) == len(calls)


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, TEXTS, max_size=3)), min_size=1, max_size=3
    )
)
def test_function_elements_keep_texts(calls: Calls) -> None:
    assume(not any("</parameter>" in v or "<function" in v for _, a in calls for v in a.values()))

    assert read(ELEMENTS, write(ELEMENTS, calls)) == calls


@settings(max_examples=40)
@given(
    count=st.integers(),
    flag=st.booleans(),
    rows=st.lists(st.integers() | st.booleans()),
    maybe=st.none() | st.sampled_from(["", "1", "\n", "true"]),
    options=st.dictionaries(NAMES, st.integers()),
)
def test_function_elements_take_types_from_the_schema(**arguments: Any) -> None:
    calls = [("typed", {"text": "5", **arguments})]

    assert read(ELEMENTS, write(ELEMENTS, calls), [TYPED]) == calls


@pytest.mark.parametrize("tool_format", [*JSON_FORMATS.values(), ELEMENTS])
@settings(max_examples=40)
@given(text=st.lists(MARKS | TEXTS, max_size=30).map("".join))
def test_no_text_raises_and_found_calls_are_usable(tool_format: ToolCallFormat, text: str) -> None:
    for call in tool_format.find_calls(text, 0, [SEARCH, None, {"function": 3}, {"name": []}]):
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)
        assert 0 <= call.start < call.end <= len(text)
        call.arguments.encode()


@pytest.mark.parametrize("tool_format", [*JSON_FORMATS.values(), ELEMENTS])
@settings(max_examples=40)
@given(calls=CALLS, data=st.data())
def test_cut_calls_never_raise(
    tool_format: ToolCallFormat, calls: Calls, data: st.DataObject
) -> None:
    text = write(tool_format, calls)

    read(tool_format, text[: data.draw(st.integers(0, len(text)))])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", HERMES_CALL, ["cats"]),
        ("hermes", f"Let me look.\n{HERMES_CALL}\n{HERMES_CALL} done", ["cats", "cats"]),
        ("hermes", HERMES_CALL.removesuffix("</tool_call>"), ["cats"]),
        ("hermes", HERMES_CALL.replace("</tool_call>", "\n<|im_end|>\n"), ["cats"]),
        ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"query\\": 1}"}', [1]),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>', [None]),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}', ["a\nb"]),
        ("qwen", HERMES_CALL, ["cats"]),
        ("qwen", ELEMENT_CALL, ["cats"]),
        ("qwen", f"Well.\n{ELEMENT_CALL}\n{HERMES_CALL}", ["cats", "cats"]),
        ("qwen", ELEMENT_CALL.removesuffix("</tool_call>"), ["cats"]),
        ("qwen", ELEMENT_CALL.removesuffix("\n</function>\n</tool_call>"), ["cats"]),
        ("qwen", ELEMENT_CALL.removeprefix("<tool_call>\n"), ["cats"]),
        ("qwen", "<function=search></function>", [None]),
        ("llama3_json", '{"name": "search", "parameters": {"query": "cats"}}', ["cats"]),
        ("llama3_json", '\n{"name": "other", "parameters": {"query": 1}}<|eom_id|>', [1]),
        ("llama3_json", 'Hm: {"a": 1} {"name": "search", "parameters": {"query": 1}}', [1]),
        ("llama3_json", 'x <|python_tag|>{"name": "f", "parameters": {"query": 1}}', [1]),
        (
            "llama3_json",
            '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            [None] * 2,
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"query": 1}}\n{"name": "g", "parameters": {"query": 2}}',
            [1, 2],
        ),
        (
            "llama3_json",
            '{"type": "function", "function": {"name": "f", "parameters": {"query": 1}}}',
            [1],
        ),
        ("mistral", 'So[TOOL_CALLS] [{"name": "f", "arguments": {"query": 1}}]</s>', [1]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"query": 1}}', [1]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"query": 1}}', [1]),
        ("mistral", '[TOOL_CALLS]f{"query": 1}[TOOL_CALLS]g[ARGS]{"query": 2}', [1, 2]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"query": 1}', [1]),
    ],
)
def test_what_models_write_is_read(name: str, text: str, expected: list[Any]) -> None:
    tool_format = registry.find(name)

    assert tool_format is not None
    assert [arguments.get("query") for _, arguments in read(tool_format, text)] == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "no call"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {</tool_call>'),
        ("hermes", f"{HERMES_CALL}<tool_call>{{</tool_call>"),
        ("hermes", f"{HERMES_CALL.removesuffix('</tool_call>')}{HERMES_CALL}"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>["f"]</tool_call>'),
        ("qwen", "<tool_call><function=></function></tool_call>"),
        ("qwen", "<function=f><parameter=p>unfinished"),
        ("qwen", "<function=f>text</function>"),
        ("qwen", "<tool_call><function=f></function> and"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g"'),
        ("llama3_json", 'As in {"name": "unknown", "parameters": {}}'),
        ("llama3_json", "[]"),
        ("llama3_json", '<|python_tag|>search.call(query="cats")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}} and'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
        ("mistral", '[TOOL_CALLS]f{}[TOOL_CALLS]g"'),
    ],
)
def test_broken_calls_are_none_at_all(name: str, text: str) -> None:
    tool_format = registry.find(name)

    assert tool_format is not None
    assert read(tool_format, text) == []


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (None, "1", "1"),
        ({}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "about 3", "about 3"),
        ({"type": "object"}, "", ""),
        ({"oneOf": [{"type": "integer"}, 3]}, "7", 7),
    ],
)
def test_parameter_text_is_read_by_its_schema(schema: Any, text: str, expected: Any) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"p": schema}}}]
    call = f"<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>"

    assert read(ELEMENTS, call, tools) == [("f", {"p": expected})]


@pytest.mark.parametrize(
    ("start", "repeated", "end"),
    [
        ("", "<tool_call>" * 600, ""),
        ("", HERMES_CALL * 120, ""),
        ("", '{"name": ' * 600, ""),
        ("", '{"a": 1} ' * 600, "</think>" * 10_000),
        ("[TOOL_CALLS]", "a" * 6_000, ""),
        ('[TOOL_CALLS]f{"a": ', "[" * 6_000, ""),
        ("<function=f>", "<parameter=p>x</parameter>" * 300, ""),
        ("<function=f>", "<parameter=p>" * 600, ""),
        ('{"name": "f", "parameters": {}}', " " * 6_000, "x"),
        (HERMES_CALL.removesuffix("</tool_call>"), " " * 6_000, "x"),
        ("", "<|" * 3_000, ""),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen", "llama3_json", "mistral"])
def test_hostile_text_takes_no_square_of_its_length(
    name: str, start: str, repeated: str, end: str
) -> None:
    tool_format = registry.find(name)
    assert tool_format is not None

    assert_linear(lambda times: tool_format.find_calls(start + repeated * times + end, 0, [SEARCH]))


def test_registered_formats_are_found_by_any_spelling() -> None:
    formats = ToolFormatRegistry()
    formats.register(HermesFormat(), "my-format", "other")
    replaced = MistralFormat()

    formats.register(replaced, "My_Format")

    assert formats.find("MYFORMAT") is replaced
    assert formats.names() == ["My_Format", "other"]
    assert formats.find("none") is None


def test_arguments_that_are_no_json_are_written_as_text() -> None:
    text = HermesFormat().render([FunctionCall(name="f", arguments="{")])

    assert text == '<tool_call>{"name": "f", "arguments": "{"}</tool_call>'

"""Tool calls out of completions and back into conversations."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling import tool_call_translator
from atroposlib.envs.server_handling.tool_call_translator import VLLM_AVAILABLE, ToolCallTranslator
from atroposlib.envs.server_handling.tool_formats import registry
from tests.fakes import CharTokenizer
from tests.server_handling.tool_call_samples import CALLS, HERMES_CALL, SEARCH, as_tool_calls

TOOLS = [SEARCH]


@pytest.fixture
def translator() -> ToolCallTranslator:
    return ToolCallTranslator(tokenizer=CharTokenizer(), parser_name="hermes")


def dumped(calls: Any) -> list[dict[str, Any]]:
    return [call.model_dump() for call in calls]


def test_parsing_is_always_available_without_vllm() -> None:
    assert VLLM_AVAILABLE is True
    for name in ("ChatCompletionRequest", "ExtractedToolCallInformation", "ToolParserManager"):
        assert getattr(tool_call_translator, name) is None
    assert isinstance(registry.find("hermes"), tool_call_translator.ToolParser)


def test_single_call_is_parsed(translator: ToolCallTranslator) -> None:
    content, calls, reason = translator.parse_model_output(HERMES_CALL, "auto", TOOLS)

    assert (content, reason) == (None, "tool_calls")
    assert calls is not None
    assert [call.function.name for call in calls] == ["search"]
    assert json.loads(calls[0].function.arguments) == {"query": "cats"}
    assert calls[0].model_dump() == {
        "id": calls[0].id,
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "cats"}'},
    }


def test_parallel_calls_have_ids_of_their_own(translator: ToolCallTranslator) -> None:
    raw = f"{HERMES_CALL}\n{HERMES_CALL.replace('search', 'get_time')}"

    _, calls, _ = translator.parse_model_output(raw, tools=TOOLS)

    assert calls is not None
    assert [call.function.name for call in calls] == ["search", "get_time"]
    assert translator.call_id_to_raw_text == {calls[0].id: raw, calls[1].id: raw}
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


@pytest.mark.parametrize(
    ("raw", "tool_choice", "tools"),
    [
        ("plain", "auto", TOOLS),
        ("", None, TOOLS),
        (HERMES_CALL, "none", TOOLS),
        (HERMES_CALL, "auto", None),
        (HERMES_CALL, "auto", []),
        ("<tool_call>{broken}</tool_call>", "auto", TOOLS),
        (f"{HERMES_CALL}<tool_call>{{", "auto", TOOLS),
        (f"<think>{HERMES_CALL}</think>no need", "auto", TOOLS),
        (f"I could {HERMES_CALL}, but</think>no need", "auto", TOOLS),
        (f"<think>{HERMES_CALL}</think>a</think>b</think>c", "auto", TOOLS),
    ],
)
def test_completion_without_calls_stays_as_it_is(
    raw: str, tool_choice: str | None, tools: Any, translator: ToolCallTranslator
) -> None:
    assert translator.parse_model_output(raw, tool_choice, tools) == (raw, None, "stop")
    assert translator.call_id_to_raw_text == {}


@pytest.mark.parametrize(
    "before",
    [
        "Let me look. ",
        "<think>I should search</think>\n",
        "I should search</think>\n",
        "<think>never closed ",
        "<think>the <tool_call> tag</think>",
        f"<think>{HERMES_CALL}</think>Now: ",
        "</think>",
    ],
)
def test_text_and_thinking_before_a_call_are_its_content(
    before: str, translator: ToolCallTranslator
) -> None:
    content, calls, reason = translator.parse_model_output(before + HERMES_CALL, None, TOOLS)

    assert (content, reason) == (before, "tool_calls")
    assert calls is not None
    assert len(calls) == 1


@pytest.mark.parametrize("before", ["", "<think>x</think>", f"<think>{HERMES_CALL}</think>"])
@pytest.mark.parametrize("words", [["</think>", "cats"], ["cats", "</think>"]])
def test_end_of_thinking_inside_an_argument_means_nothing(
    words: list[str], before: str, translator: ToolCallTranslator
) -> None:
    raw = before + "".join(HERMES_CALL.replace("cats", word) for word in words)

    _, calls, _ = translator.parse_model_output(raw, None, TOOLS)

    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"query": word} for word in words
    ]


def test_calls_of_several_completions_are_remembered(translator: ToolCallTranslator) -> None:
    for word in ("cats", "dogs", "cats"):
        translator.parse_model_output(HERMES_CALL.replace("cats", word), "auto", TOOLS)

    assert len(translator.call_id_to_raw_text) == 3


def test_only_the_calls_used_last_are_remembered(
    translator: ToolCallTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "max_remembered_calls", 2)
    calls: list[dict[str, Any]] = []
    for word in ("a", "b", "c"):
        raw = HERMES_CALL.replace("cats", word)
        calls += dumped(translator.parse_model_output(raw, None, TOOLS)[1])
        translator.reconstruct_raw_text_from_tool_calls(calls[:1])

    assert list(translator.call_id_to_raw_text) == [calls[2]["id"], calls[0]["id"]]


def test_id_a_model_wrote_is_kept_once() -> None:
    translator = ToolCallTranslator(CharTokenizer(), "mistral")
    call = '{"name": "f", "arguments": {}, "id": "a1B2c3D4e"}'  # pragma: allowlist secret
    raw = f"[TOOL_CALLS] [{call}]"

    first = translator.parse_model_output(raw, None, TOOLS)[1]
    second = translator.parse_model_output(raw + " ", None, TOOLS)[1]

    assert first is not None
    assert second is not None
    assert first[0].id == "a1B2c3D4e" != second[0].id
    assert translator.reconstruct_raw_text_from_tool_calls(dumped(second)) == raw + " "


@pytest.mark.parametrize(
    "raw", [HERMES_CALL, f"Well, {HERMES_CALL}  \n", HERMES_CALL.removesuffix("</tool_call>")]
)
def test_round_trip_gives_the_completion(raw: str, translator: ToolCallTranslator) -> None:
    calls = translator.parse_model_output(raw, "auto", TOOLS)[1]
    assert calls is not None
    messages = [{"role": "assistant", "content": "changed", "tool_calls": dumped(calls)}]

    assert translator.reconstruct_raw_text_from_tool_calls(dumped(calls)) == raw
    assert translator.reconstruct_raw_text_from_tool_calls(calls) == raw
    assert translator.convert_messages_for_template(messages) == [
        {"role": "assistant", "content": raw}
    ]


@settings(max_examples=40)
@given(calls=CALLS, name=st.sampled_from(["hermes", "qwen", "llama3_json", "mistral"]))
def test_unknown_calls_are_written_so_that_they_read_back(
    calls: list[tuple[str, dict[str, Any]]], name: str
) -> None:
    translator = ToolCallTranslator(CharTokenizer(), name)

    text = translator.reconstruct_raw_text_from_tool_calls(as_tool_calls(calls))

    parsed = translator.parse_model_output(text, None, TOOLS)[1]
    assert parsed is not None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in parsed] == calls


def test_unknown_calls_are_written_in_tags(translator: ToolCallTranslator) -> None:
    calls = as_tool_calls([("search", {"query": "cats"}), ("get_time", {})])

    text = translator.reconstruct_raw_text_from_tool_calls(calls)

    time_call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert text == f"{HERMES_CALL}\n{time_call}"
    assert translator.reconstruct_raw_text_from_tool_calls([]) == ""


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            {"function": {"name": "f", "arguments": {"a": 1}}},
            '{"name": "f", "arguments": {"a": 1}}',
        ),
        ({"function": {"name": "f", "arguments": "{"}}, '{"name": "f", "arguments": "{"}'),
        ({"function": {"name": "f", "arguments": ""}}, '{"name": "f", "arguments": {}}'),
        ({"id": [1], "function": {"name": "f"}}, '{"name": "f", "arguments": {}}'),
        ({}, '{"name": "", "arguments": {}}'),
        (3, '{"name": "", "arguments": {}}'),
    ],
)
def test_odd_calls_of_an_agent_are_written_as_well_as_possible(
    call: Any, written: str, translator: ToolCallTranslator
) -> None:
    text = translator.reconstruct_raw_text_from_tool_calls([call])

    assert text == f"<tool_call>{written}</tool_call>"


@pytest.mark.parametrize(
    "content", ["Let me look.", [{"type": "text", "text": "Let me look."}, {"type": "image"}]]
)
def test_content_is_put_before_unknown_calls(content: Any, translator: ToolCallTranslator) -> None:
    calls = as_tool_calls([("search", {"query": "cats"})])
    message = {"role": "assistant", "content": content, "tool_calls": calls}

    (converted,) = translator.convert_messages_for_template([message])

    assert converted == {"role": "assistant", "content": f"Let me look.\n{HERMES_CALL}"}


def test_all_other_messages_are_the_same_objects(translator: ToolCallTranslator) -> None:
    others: list[Any] = [
        {"role": "user", "content": "find cats"},
        {"role": "assistant", "content": "no", "tool_calls": []},
        {"role": "assistant", "content": "no", "tool_calls": None},
        {"role": "tool", "tool_call_id": "x", "content": "found"},
        SimpleNamespace(role="assistant"),
    ]
    calling = {"role": "assistant", "tool_calls": as_tool_calls([("search", {"query": "cats"})])}

    *same, converted = translator.convert_messages_for_template([*others, calling])

    assert all(after is before for after, before in zip(same, others, strict=True))
    assert converted == {"role": "assistant", "content": HERMES_CALL}


def test_special_tokens_stay_where_tools_are_in_use(translator: ToolCallTranslator) -> None:
    ids = [1, 72, 105, 2]

    assert translator.decode_with_tool_awareness(ids) == "Hi"
    assert translator.decode_with_tool_awareness(ids, has_tools=True) == "<s>Hi</s>"


def test_unknown_parser_is_said_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        translator = ToolCallTranslator(CharTokenizer(), "hermess")

    assert "did you mean hermes?" in caplog.text
    assert translator.parser is None
    assert translator.parse_model_output(HERMES_CALL, "auto", TOOLS) == (HERMES_CALL, None, "stop")
    calls = as_tool_calls([("search", {"query": "cats"})])
    assert translator.reconstruct_raw_text_from_tool_calls(calls) == HERMES_CALL

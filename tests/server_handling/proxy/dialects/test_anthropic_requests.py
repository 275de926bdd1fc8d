"""Messages requests as chat requests, and chat answers as Messages."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message

from atroposlib.envs.server_handling.proxy.anthropic import ANTHROPIC, error_body
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.errors import ContextOverflowError
from tests.server_handling.proxy.dialects.scripted_session import (
    ScriptedSession,
    chat_completion,
    tool_call,
)

GREETING = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Sum.", "input_schema": SCHEMA}
CALL = tool_call("c1", "add", '{"a":  1}')
BODY: dict[str, Any] = {"model": "any", "max_tokens": 9, "messages": [GREETING]}


async def chat_request_of(**fields: Any) -> dict[str, Any]:
    session = ScriptedSession(ANTHROPIC, [chat_completion("Yes.")])
    await session.post("/messages", {**BODY, **fields})
    return session.requests[0]


async def message_of(completion: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = await ScriptedSession(ANTHROPIC, [completion]).post("/messages", {**BODY, **fields})
    body: dict[str, Any] = reply.body
    return body


async def test_options_reach_the_chat_request_under_its_names() -> None:
    request = await chat_request_of(
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["END"],
        tools=[{**ADD, "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "somebody"},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )

    function = {"name": "add", "description": "Sum.", "parameters": SCHEMA}
    assert request == {
        "messages": [{"role": "system", "content": "A\nB"}, GREETING],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "tools": [{"type": "function", "function": function}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": SCHEMA},
        },
    }


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_tool_choice_of_every_kind(choice: dict[str, Any], chat_choice: Any) -> None:
    request = await chat_request_of(tools=[ADD], tool_choice=choice)

    assert request["tool_choice"] == chat_choice


async def test_blocks_of_every_kind_become_messages() -> None:
    request = await chat_request_of(
        messages=[
            {"role": "user", "content": [_text("Hi"), _text("there")]},
            {"role": "user", "content": "and you"},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "hm", "signature": "elsewhere"},
                    _text("Look."),
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [_text("2")]},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    _text("Go on."),
                ],
            },
            {"role": "assistant", "content": "It is 2."},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Sure?"},
        ]
    )

    calls = [tool_call("c1", "add", '{"a": 1}'), tool_call("c2", "add", "{}")]
    look = "<think>\nhm\n</think>\n\nLook."
    assert request["messages"] == [
        {"role": "user", "content": "Hi\nthere\nand you"},
        {"role": "assistant", "content": look, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "It is 2."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sure?"},
    ]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
            "the model reads text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c1",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
            "send 'text'",
        ),
        (
            {"messages": [GREETING, {"role": "assistant", "content": "I "}]},
            "messages",
            "whitespace",
        ),
        ({"system": 5}, "system", "expected a list"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "bash_20250124"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema", "an object"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "'all'"),
        ({"stop_sequences": "END"}, "stop_sequences", "list"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers", "not supported"),
        ({"thread": {"type": "fork"}}, "thread.type", "'create'"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id", "got nothing"),
    ],
)
async def test_bad_request_is_refused_with_its_place(
    fields: dict[str, Any], param: str, told: str
) -> None:
    session = ScriptedSession(ANTHROPIC, [chat_completion("Yes.")])

    with pytest.raises(ProxyRefusal) as caught:
        await session.post("/messages", {**BODY, **fields})

    assert (caught.value.status, caught.value.param) == (400, param)
    assert told in str(caught.value)


async def test_message_has_every_field_of_the_official_type() -> None:
    completion = chat_completion("<think>hm</think>Look.", calls=[CALL])

    body = await message_of(completion, thinking={"type": "enabled", "budget_tokens": 1024})

    message = Message.model_validate(body, strict=True)
    thinking, text, call = body["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Look.")
    assert call == {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    assert (message.model, message.stop_reason, message.stop_sequence) == ("tiny", "tool_use", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("content", "finish_reason", "text", "stop_reason", "stop_sequence"),
    [
        ("Yes.", "stop", "Yes.", "end_turn", None),
        ("Yes. END now END", "stop", "Yes. ", "stop_sequence", "END"),
        ("A;B END", "stop", "A", "stop_sequence", ";"),
        ("Yes.", "length", "Yes.", "max_tokens", None),
        ("Yes.", "content_filter", "Yes.", "refusal", None),
    ],
)
async def test_stop_reason_follows_from_what_ended_the_text(
    content: str, finish_reason: str, text: str, stop_reason: str, stop_sequence: str | None
) -> None:
    completion = chat_completion(content, finish_reason=finish_reason)

    message = await message_of(completion, stop_sequences=["END", ";"])

    assert message["content"][0]["text"] == text
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


async def test_limit_beyond_the_context_is_lifted_once() -> None:
    too_long = ContextOverflowError("8 of 7 tokens")
    cut = chat_completion("Ye", finish_reason="length")
    session = ScriptedSession(ANTHROPIC, [too_long, cut, too_long, too_long])

    fitting = (await session.post("/messages", BODY)).body
    with pytest.raises(ContextOverflowError):
        await session.post("/messages", BODY)

    assert [request["max_tokens"] for request in session.requests] == [9, None, 9, None]
    assert fitting["stop_reason"] == "model_context_window_exceeded"


async def test_empty_answer_has_no_blocks_and_odd_arguments_are_kept() -> None:
    assert (await message_of(chat_completion("")))["content"] == []

    broken = await message_of(chat_completion(None, calls=[tool_call("c1", "add", "{a")]))

    assert broken["content"][0]["input"] == {"arguments": "{a"}


async def test_thread_goes_on_behind_the_message_it_names() -> None:
    answers = [chat_completion("Look.", calls=[CALL]), chat_completion("It is 2.")]
    session = ScriptedSession(ANTHROPIC, answers)
    created = {"thread": {"type": "create"}, "system": "Be kind.", "tools": [ADD]}
    first = (await session.post("/messages", {**BODY, **created})).body
    thread = {"type": "continue", "previous_message_id": first["id"]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "2"}
    new = {"messages": [{"role": "user", "content": [result]}], "thread": thread}

    await session.post("/messages", {**BODY, **new})

    request = session.requests[1]
    assert request["tools"] == session.requests[0]["tools"]
    assert request["messages"] == [
        {"role": "system", "content": "Be kind."},
        GREETING,
        {"role": "assistant", "content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]


async def test_unknown_thread_is_refused_so_that_clients_send_everything() -> None:
    thread = {"type": "continue", "previous_message_id": "msg_unknown"}

    with pytest.raises(ProxyRefusal) as caught:
        await ScriptedSession(ANTHROPIC).post("/messages", {**BODY, "thread": thread})

    assert caught.value.status == 404
    error = error_body(caught.value)["error"]
    assert error["details"] == {"error_code": "thread_not_found"}


async def test_count_tokens_needs_no_limit_and_counts_the_prompt() -> None:
    session = ScriptedSession(ANTHROPIC)

    body = {"messages": [GREETING], "system": "Be kind.", "tools": [ADD]}
    reply = await session.post("/messages/count_tokens", body)

    assert reply.body == {"input_tokens": 3}
    assert [message["role"] for message in session.requests[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_body_names_the_kind_of_a_status(status: int, kind: str) -> None:
    body = error_body(ProxyRefusal("no", status=status, code="x"))

    assert body == {"type": "error", "error": {"type": kind, "message": "no"}}

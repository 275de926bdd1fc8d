"""Responses requests as chat requests, and chat answers as Response objects."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from atroposlib.envs.server_handling.proxy.exchange import RenderedPrompt
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.responses import (
    RESPONSES,
    ResponsesState,
    StoredResponse,
)
from tests.server_handling.proxy.dialects.scripted_session import (
    ScriptedSession,
    chat_completion,
    tool_call,
)

ADD = {"type": "function", "name": "add", "description": "Sum.", "parameters": {"type": "object"}}
CALL = tool_call("c1", "add", '{"a": 1}')
GREETING = {"role": "user", "content": "Hi"}


async def chat_request_of(body: dict[str, Any]) -> dict[str, Any]:
    session = ScriptedSession(RESPONSES, [chat_completion("Yes.")])
    await session.post("/responses", body)
    return session.requests[0]


async def refusal_of(body: dict[str, Any]) -> ProxyRefusal:
    with pytest.raises(ProxyRefusal) as caught:
        await ScriptedSession(RESPONSES, [chat_completion("Yes.")]).post("/responses", body)
    return caught.value


async def test_options_reach_the_chat_request_under_its_names() -> None:
    schema = {"type": "object"}

    request = await chat_request_of(
        {
            "model": "anything",
            "input": "Hi",
            "instructions": "Be kind.",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "tools": [{**ADD, "strict": True}],
            "tool_choice": {"type": "function", "name": "add"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "store": False,
            "user": "somebody",
        }
    )

    function = {"name": "add", "description": "Sum.", "parameters": schema, "strict": True}
    assert request == {
        "messages": [{"role": "system", "content": "Be kind."}, GREETING],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }


async def test_items_of_every_kind_become_messages() -> None:
    request = await chat_request_of(
        {
            "instructions": "A",
            "input": [
                {"role": "developer", "content": "B"},
                {"type": "message", "role": "user", "content": [_text("Hi"), _text("there")]},
                {"type": "reasoning", "id": "rs", "summary": [_text("hm", "summary_text")]},
                {"role": "assistant", "content": [_text("Look.", "output_text")]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": [_text("2")]},
                {"role": "assistant", "content": "It is 2."},
                {"role": "user", "content": "Sure?"},
            ],
        }
    )

    look = "<think>\nhm\n</think>\n\nLook."
    assert request["messages"] == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": look, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "Sure?"},
    ]


_SEARCH = {"type": "web_search"}


def _text(text: str, kind: str = "input_text") -> dict[str, str]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": 5}, "input", "expected a list, got a number"),
        ({"input": [7]}, "input[0]", "expected an object, got a number"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "'robot'"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content", "a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "the model reads text; send 'input_text'",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input[0].arguments", "nothing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "'x'"),
        ({"input": "Hi", "tools": [{"type": "custom", "name": "c"}]}, "tools[0]", "custom"),
        (
            {"input": "Hi", "tools": [{"type": "web_search"}], "tool_choice": _SEARCH},
            "tool_choice",
            "web_search",
        ),
        ({"input": "Hi", "tool_choice": "always"}, "tool_choice", "always"),
        ({"input": "Hi", "tool_choice": 1}, "tool_choice", "an object"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"input": "Hi", "background": True}, "background", "not supported"),
        ({"input": "Hi", "top_logprobs": 3}, "top_logprobs", "the session's nodes"),
        ({"input": "Hi", "include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "Hi", "text": {"format": {"type": "grammar"}}}, "text.format", "grammar"),
        ({"input": [{"role": "assistant", "content": "A"}]}, "input", "not continued"),
        ({"input": "Hi", "previous_response_id": "r"}, "previous_response_id", "'r'"),
    ],
)
async def test_bad_request_is_refused_with_its_place(
    body: dict[str, Any], param: str, told: str
) -> None:
    refusal = await refusal_of(body)

    assert (refusal.status, refusal.param) == (400, param)
    assert told in str(refusal)


async def test_response_object_has_every_field_of_the_official_type() -> None:
    completion = chat_completion("<think>hm</think>Look.", calls=[CALL])
    session = ScriptedSession(RESPONSES, [completion])

    reply = await session.post(
        "/responses",
        {
            "input": "Hi",
            "tools": [ADD],
            "reasoning": {"effort": "low"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"run": "7"},
        },
    )

    response = Response.model_validate(reply.body, strict=True)
    reasoning, message, call = reply.body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["encrypted_content"].startswith("enc_")
    assert response.output_text == "Look."
    assert message["status"] == response.status == "completed"
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", '{"a": 1}')
    assert (response.model, response.metadata) == ("tiny", {"run": "7"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 5)
    # 2 of the 22 + 3 + 8 characters of the text and the call
    assert response.usage.output_tokens_details.reasoning_tokens == round(5 * 2 / 33)


async def test_thinking_stays_in_the_text_unless_it_is_asked_for() -> None:
    session = ScriptedSession(RESPONSES, [chat_completion("<think>hm</think>Yes.")])

    reply = await session.post("/responses", {"input": "Hi"})

    [message] = reply.body["output"]
    assert message["content"][0]["text"] == "<think>hm</think>Yes."


async def test_cut_answer_is_incomplete_and_its_open_thinking_is_reasoning() -> None:
    session = ScriptedSession(RESPONSES, [chat_completion("hm", finish_reason="length")] * 2)
    body = {"input": "Hi", "reasoning": {"effort": "low"}, "stream": True}

    plain = await session.post("/responses", body)
    session.prompt = RenderedPrompt("[user]Hi[assistant]<think>\n", [1])
    opened = await session.post("/responses", body)

    assert plain.names[-1] == "response.incomplete"
    response = plain.events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in response["output"]] == ["message"]
    assert [item["type"] for item in opened.events[-1]["response"]["output"]] == ["reasoning"]


async def test_stored_response_can_be_fetched_referred_to_and_deleted() -> None:
    session = ScriptedSession(RESPONSES, [chat_completion("<think>hm</think>Yes.")] * 3)
    body = {"input": "Hi", "reasoning": {"effort": "low"}}
    kept = (await session.post("/responses", body)).body
    unkept = (await session.post("/responses", {**body, "store": False})).body

    fetched = await session.call("GET", "/responses/{response_id}", response_id=kept["id"])
    reference = {"type": "item_reference", "id": kept["output"][1]["id"]}
    await session.post("/responses", {"input": [GREETING, reference, GREETING]})
    deleted = await session.call("DELETE", "/responses/{response_id}", response_id=kept["id"])

    assert fetched.body == kept
    given = {"role": "assistant", "content": "<think>hm</think>Yes."}
    assert session.requests[2]["messages"] == [GREETING, given, GREETING]
    assert deleted.body == {"id": kept["id"], "object": "response", "deleted": True}
    for gone in (kept, unkept):
        with pytest.raises(ProxyRefusal, match=gone["id"]) as caught:
            await session.call("GET", "/responses/{response_id}", response_id=gone["id"])
        assert caught.value.status == 404


async def test_instructions_do_not_carry_over_to_the_next_response() -> None:
    session = ScriptedSession(RESPONSES, [chat_completion("Yes.")] * 2)
    first = await session.post("/responses", {"input": "Hi", "instructions": "Be kind."})

    body = {"input": "Sure?", "previous_response_id": first.body["id"]}
    await session.post("/responses", body)

    roles = [message["role"] for message in session.requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


async def test_input_tokens_are_those_of_the_prompt() -> None:
    session = ScriptedSession(RESPONSES)

    reply = await session.post("/responses/input_tokens", {"input": "Hi", "tools": [ADD]})

    assert reply.body == {"object": "response.input_tokens", "input_tokens": 3}
    assert session.requests[0]["tools"][0]["function"]["name"] == "add"


def test_store_forgets_the_oldest_response_and_its_items() -> None:
    state = ResponsesState(max_stored=2)

    for name in ("a", "b", "c"):
        response = {"id": name, "output": [{"id": f"item_{name}"}]}
        state.keep(StoredResponse(response, []))

    assert state.find_item("item_a") is None
    assert state.find_item("item_c") == {"id": "item_c"}
    with pytest.raises(ProxyRefusal):
        state.get("a")

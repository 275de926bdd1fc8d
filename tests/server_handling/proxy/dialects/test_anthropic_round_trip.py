"""Whatever an Anthropic client sends back, the model is shown what it wrote."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.proxy.anthropic import ANTHROPIC
from tests.server_handling.proxy.dialects.conversations import Turn, conversations
from tests.server_handling.proxy.dialects.scripted_session import Reply, ScriptedSession

pytestmark = pytest.mark.slow

THINKING = {"type": "enabled", "budget_tokens": 1024}


class Habits(NamedTuple):
    """What a client asks for, and does to a turn before it sends it back."""

    thinking: dict[str, Any] | None
    drops_thinking: bool
    sorts_arguments: bool
    stops: list[str]


habits = st.builds(
    Habits,
    st.sampled_from([None, THINKING, {"type": "adaptive", "display": "omitted"}]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([[], ["b"], ["x", "\n"]]),
)


def message_of(reply: Reply) -> Message:
    """What the official client holds, of an answer whole or streamed."""
    if reply.body is not None:
        return Message.model_validate(reply.body)
    message = reply.events[0]["message"]
    inputs: dict[int, str] = {}
    for event in reply.events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], dict(event["delta"])
            if delta.pop("type") == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                [(name, piece)] = delta.items()
                block[name] += piece
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return Message.model_validate(message)


def sent_back(message: Message, turn: Turn, habit: Habits) -> list[dict[str, Any]]:
    """The messages an agent appends to its history."""
    blocks = [block.model_dump() for block in message.content]
    if habit.drops_thinking:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    for block in blocks:
        if block["type"] == "tool_use" and habit.sorts_arguments:
            block["input"] = dict(sorted(block["input"].items()))
    results = [
        {"type": "tool_result", "tool_use_id": call_id, "content": result}
        for call_id, result in zip(turn.call_ids, turn.results, strict=True)
    ]
    if turn.follow_up is not None:
        results.append({"type": "text", "text": turn.follow_up})
    assistant = {"role": "assistant", "content": blocks}
    return [assistant, {"role": "user", "content": results}]


@settings(max_examples=60)
@given(conversations(), habits)
def test_history_sent_back_gives_the_messages_given_out(turns: list[Turn], habit: Habits) -> None:
    session = ScriptedSession(ANTHROPIC, [turn.completion for turn in turns])
    history: list[Any] = [{"role": "user", "content": "Go."}]
    expected: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]

    async def converse() -> None:
        for turn in turns:
            body = {"messages": history, "stream": turn.streams, "max_tokens": 9}
            options = {"thinking": habit.thinking, "stop_sequences": habit.stops}
            reply = await session.post("/messages", {**body, **options})
            assert session.requests[-1]["messages"] == expected
            history.extend(sent_back(message_of(reply), turn, habit))
            expected.extend(turn.chat)

    asyncio.run(converse())


@settings(max_examples=60)
@given(conversations(), habits)
def test_stream_carries_what_the_whole_answer_carries(turns: list[Turn], habit: Habits) -> None:
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 9}
    options = {"thinking": habit.thinking, "stop_sequences": habit.stops}
    for turn in turns:
        session = ScriptedSession(ANTHROPIC, [turn.completion, turn.completion])
        whole = asyncio.run(session.post("/messages", {**body, **options}))
        streamed = asyncio.run(session.post("/messages", {**body, **options, "stream": True}))

        assert [event["type"] for event in streamed.events] == streamed.names
        assert _without_random_ids(message_of(streamed)) == _without_random_ids(message_of(whole))


def _without_random_ids(message: Message) -> dict[str, Any]:
    content = [{**block.model_dump(), "signature": None} for block in message.content]
    return {**message.model_dump(exclude={"id", "usage"}), "content": content}

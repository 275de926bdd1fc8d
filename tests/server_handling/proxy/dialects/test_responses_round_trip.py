"""Whatever a Responses client sends back, the model is shown what it wrote."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from atroposlib.envs.server_handling.proxy.responses import RESPONSES
from tests.server_handling.proxy.dialects.conversations import Turn, conversations
from tests.server_handling.proxy.dialects.scripted_session import Reply, ScriptedSession

pytestmark = pytest.mark.slow

REASONING = {"effort": "medium"}


def response_of(reply: Reply) -> Response:
    """What the official client holds, of an answer whole or streamed."""
    value = reply.body or reply.events[-1]["response"]
    return Response.model_validate(value)


def reserialised(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "function_call":
        return item
    return {**item, "arguments": json.dumps(json.loads(item["arguments"]))}


class Habits(NamedTuple):
    """What a client does to a turn before it sends it back."""

    interleaves: bool = False
    """Lists each call with its result behind it."""
    drops_reasoning: bool = False
    drops_ids: bool = False
    """Keeps the ids of calls only."""


habits = st.builds(Habits, st.booleans(), st.booleans(), st.booleans())


def sent_back(response: Response, turn: Turn, habit: Habits) -> list[Any]:
    """The items an agent appends to its history."""
    items = [reserialised(item.model_dump(exclude_none=True)) for item in response.output]
    if habit.drops_reasoning:
        items = [item for item in items if item["type"] != "reasoning"] or items
    if habit.drops_ids:
        items = [{**item, "id": None} for item in items]
    results = [
        {"type": "function_call_output", "call_id": call_id, "output": result}
        for call_id, result in zip(turn.call_ids, turn.results, strict=True)
    ]
    calls = [item for item in items if item["type"] == "function_call"]
    if habit.interleaves:
        items = [item for item in items if item["type"] != "function_call"]
        items += [entry for pair in zip(calls, results, strict=True) for entry in pair]
    else:
        items += results
    if turn.follow_up is not None:
        items.append({"role": "user", "content": turn.follow_up})
    return items


@settings(max_examples=60)
@given(conversations(), st.booleans(), habits)
def test_history_sent_back_gives_the_messages_given_out(
    turns: list[Turn], asks_reasoning: bool, habit: Habits
) -> None:
    session = ScriptedSession(RESPONSES, [turn.completion for turn in turns])
    history: list[Any] = [{"role": "user", "content": "Go."}]
    expected: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    options = {"reasoning": REASONING} if asks_reasoning else {}

    async def converse() -> None:
        for turn in turns:
            body = {"input": history, "stream": turn.streams, **options}
            reply = await session.post("/responses", body)
            assert session.requests[-1]["messages"] == expected
            response = response_of(reply)
            history.extend(sent_back(response, turn, habit))
            expected.extend(turn.chat)

    asyncio.run(converse())


@settings(max_examples=60)
@given(conversations(), st.booleans())
def test_previous_response_id_continues_the_messages_given_out(
    turns: list[Turn], asks_reasoning: bool
) -> None:
    session = ScriptedSession(RESPONSES, [turn.completion for turn in turns])
    expected: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    options = {"reasoning": REASONING} if asks_reasoning else {}

    async def converse() -> None:
        previous_id, new_input = None, expected[:]
        for turn in turns:
            body = {"input": new_input, "previous_response_id": previous_id, **options}
            reply = await session.post("/responses", body)
            assert session.requests[-1]["messages"] == expected
            response = response_of(reply)
            previous_id = response.id
            new_input = sent_back(response, turn, Habits())[len(response.output) :]
            expected.extend(turn.chat)

    asyncio.run(converse())


@settings(max_examples=60)
@given(conversations())
def test_stream_carries_what_the_whole_answer_carries(turns: list[Turn]) -> None:
    for turn in turns:
        session = ScriptedSession(RESPONSES, [turn.completion])
        body = {"input": "Go.", "stream": True, "reasoning": REASONING}
        reply = asyncio.run(session.post("/responses", body))

        assert [event["type"] for event in reply.events] == reply.names
        assert [event["sequence_number"] for event in reply.events] == list(range(len(reply.names)))
        output = reply.events[-1]["response"]["output"]
        for index, item in enumerate(output):
            deltas = [
                event["delta"]
                for event in reply.events
                if event["type"].endswith(".delta") and event["output_index"] == index
            ]
            texts = [part["text"] for part in item.get("content") or ()]
            assert "".join(deltas) == item.get("arguments", "".join(texts))

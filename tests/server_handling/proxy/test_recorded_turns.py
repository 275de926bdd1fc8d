"""The turns that a session records, and sampling that its agent does not choose."""

from __future__ import annotations

from typing import Any

import openai

from atroposlib.envs.server_handling.proxy import AgentProxy
from atroposlib.envs.server_handling.proxy.app import AgentSession
from atroposlib.envs.server_handling.proxy.sessions import FixedSampling
from tests.server_handling.proxy.engine import RecordingEngine, manager_of
from tests.server_handling.proxy.test_agent_loop import TURNS, client_of, run_agent

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def ask(agent: AgentSession, messages: list[Any], **options: Any) -> str:
    answer = await client_of(agent).chat.completions.create(
        model="any", messages=messages, **options
    )
    return str(answer.choices[0].message.content)


async def test_turns_have_what_each_request_added_and_where_its_tokens_are() -> None:
    engine = RecordingEngine(TURNS)

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session(records_turns=True) as agent,
    ):
        await run_agent(client_of(agent), "Which city is warmest?", stream=False)
        (node,), turns = agent.nodes(), agent.turns()

    assert [turn.row for turn in turns] == [0, 0, 0]
    assert [turn.is_continuation for turn in turns] == [False, True, True]
    roles = [[message["role"] for message in turn.added] for turn in turns]
    assert roles == [["system", "user"], ["tool", "tool"], ["tool"]]
    for turn, call in zip(turns, engine.calls, strict=True):
        assert node.tokens[: turn.end] == call.sequences[0]
        assert turn.num_tokens == len(call.completion_ids[0])
        assert turn.asked_at <= turn.answered_at
    assert [bool(turn.messages) for turn in turns] == [False, False, True]
    assert turns[0].reply["tool_calls"][1]["function"]["name"] == "weather"


async def test_turns_of_branches_and_choices_have_the_rows_that_hold_them() -> None:
    engine = RecordingEngine()

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session(records_turns=True) as agent,
    ):
        first = await ask(agent, HELLO)
        history = [*HELLO, {"role": "assistant", "content": first}]
        await ask(agent, [*history, {"role": "user", "content": "left"}])
        await ask(agent, [*history, {"role": "user", "content": "right"}])
        await ask(agent, [{"role": "user", "content": "apart"}], n=2)
        nodes, turns = agent.nodes(), agent.turns()

    assert all(
        turn.row is not None and nodes[turn.row].masked_tokens[turn.end - 1] != -100
        for turn in turns
    )
    assert len({turn.row for turn in turns[1:]}) == 4
    assert len(nodes) == 4


async def test_turns_of_named_parts_are_recorded_too() -> None:
    engine = RecordingEngine()

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session(records_turns=True) as agent,
    ):
        await ask(agent, HELLO)
        await ask(agent, HELLO, extra_headers={"X-Session-ID": "sub-agent"})
        turns = agent.turns()

    assert [turn.row for turn in turns] == [0, 1]


async def test_turns_are_not_recorded_by_default(agent: AgentSession) -> None:
    await ask(agent, HELLO)

    assert agent.turns() == []


async def test_text_completions_are_turns_without_messages() -> None:
    engine = RecordingEngine()

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session(records_turns=True) as agent,
    ):
        client = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
        await client.completions.create(model="any", prompt="once", max_tokens=8)
        (turn,) = agent.turns()

    assert (turn.row, turn.reply, list(turn.messages)) == (0, {"content": "one"}, [])


async def test_fixed_sampling_replaces_what_the_agent_asks_for() -> None:
    engine = RecordingEngine()

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session(temperature=0.7, max_tokens=5) as agent,
    ):
        await ask(agent, HELLO, temperature=0, top_p=0.1, presence_penalty=1, max_tokens=50, seed=3)
        await ask(agent, HELLO, max_tokens=2, extra_body={"top_k": 1})

    first, second = (call.options for call in engine.calls)
    assert (first["temperature"], first["max_tokens"], first["seed"]) == (0.7, 5, 3)
    assert (second["temperature"], second["max_tokens"]) == (0.7, 2)
    for options in (first, second):
        assert not options.keys() & {"top_p", "top_k", "presence_penalty"}


def test_fixed_sampling_without_values_leaves_the_request_alone() -> None:
    request = {"temperature": 0.0, "top_p": 0.5, "max_tokens": None}

    FixedSampling().apply(request)

    assert request == {"temperature": 0.0, "top_p": 0.5, "max_tokens": None}


def test_fixed_temperature_leaves_out_filters_and_penalties_of_a_request() -> None:
    shared = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    kwargs = {"temperature": 0.2, "top_p": 0.5, "presence_penalty": 1.0, "extra_body": shared}

    FixedSampling(temperature=1.0).apply(kwargs)

    assert kwargs == {"temperature": 1.0, "extra_body": {"ignore_eos": True}}
    assert len(shared) == 4  # the other prompts of the request read it, too

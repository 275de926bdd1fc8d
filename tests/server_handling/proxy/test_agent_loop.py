"""A tool-using agent that knows nothing but the OpenAI client, and the tokens it leaves behind."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from atroposlib.envs.server_handling.server_baseline import sampled_versions
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.fakes import CharTokenizer, logprob_of
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

pytestmark = pytest.mark.slow

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call_of(city: str) -> str:
    # Spaces that no JSON writer puts there: text rendered anew would show.
    return f'<tool_call>{{"name":  "weather", "arguments": {{"city" : "{city}"}}}}</tool_call>'


TURNS = [
    f"<think>I need both.</think>Let me look.\n{call_of('Rome')}\n{call_of('Oslo')}",
    f"One more.\n{call_of('Riga')}",
    "Rome is warmest.",
]


async def run_agent(client: openai.AsyncOpenAI, question: str, *, stream: bool) -> str:
    """Answer a question with a tool; the code of somebody who never heard of the proxy."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": question},
    ]
    while True:
        if stream:
            async with client.chat.completions.stream(
                model="gpt-4o", messages=messages, tools=[WEATHER]
            ) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=[WEATHER], temperature=1.0
            )
            message = answer.choices[0].message
        messages.append(message if not stream else message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            result = {"city": city, "celsius": len(city)}
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )


def client_of(agent: AgentSession) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strips_thinking", [False, True])
async def test_three_turns_are_one_sequence_of_the_engines_own_tokens(
    stream: bool, strips_thinking: bool
) -> None:
    engine = RecordingEngine(TURNS, tokenizer=CharTokenizer(strips_thinking=strips_thinking))

    async with (
        AgentProxy(manager_of(engine), engine.tokenizer) as proxy,
        proxy.session() as agent,
    ):
        answer = await run_agent(client_of(agent), "Which city is warmest?", stream=stream)
        nodes = agent.nodes()

    assert answer == "Rome is warmest."
    (node,) = nodes
    first, second, third = engine.calls
    assert second.prompt_ids[: len(first.sequences[0])] == first.sequences[0]
    assert third.prompt_ids[: len(second.sequences[0])] == second.sequences[0]
    assert [node.tokens] == third.sequences
    expected_masks: list[int] = []
    expected_logprobs: list[float] = []
    for call in engine.calls:
        num_new = len(call.prompt_ids) - len(expected_masks)
        expected_masks += [IGNORE_INDEX] * num_new + call.completion_ids[0]
        expected_logprobs += [MASKED_LOGPROB] * num_new
        expected_logprobs += [logprob_of(t, j) for j, t in enumerate(call.completion_ids[0])]
    assert node.masked_tokens == expected_masks
    assert node.logprobs == expected_logprobs


async def test_sessions_of_one_proxy_record_apart() -> None:
    engine = RecordingEngine(lambda prompt: "Rome." if "tool]" in prompt else call_of("Rome"))

    async with AgentProxy(manager_of(engine), engine.tokenizer) as proxy:
        async with proxy.session() as one, proxy.session() as other:
            await run_agent(client_of(one), "first", stream=False)
            await run_agent(client_of(other), "second", stream=False)
            (first,), (second,) = one.nodes(), other.nodes()
        assert one.nodes() == other.nodes() == []

    assert ("first" in first.full_text, "second" in first.full_text) == (True, False)
    assert ("first" in second.full_text, "second" in second.full_text) == (False, True)


async def test_policy_version_of_agents_reaches_the_rollout_that_asks() -> None:
    engine = RecordingEngine(["Rome."])
    manager = manager_of(engine)
    manager.policy_version = 7
    async with AgentProxy(manager, engine.tokenizer) as proxy, proxy.session() as agent:
        await run_agent(client_of(agent), "first", stream=False)
        manager.policy_version = 8
        await run_agent(client_of(agent), "second", stream=False)
        with sampled_versions() as versions:
            nodes = agent.nodes()

    assert [(node.metadata or {})["policy_version"] for node in nodes] == [7, 8]
    assert versions.oldest == 7

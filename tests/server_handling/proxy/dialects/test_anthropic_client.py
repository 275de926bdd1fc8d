"""The official Anthropic client speaks Messages to a proxy on a port."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from tests.fakes import CharTokenizer
from tests.server_handling.proxy.dialects.agent_loop import (
    PARAMETERS,
    QUESTION,
    TURNS,
    assert_engines_own_tokens,
    weather_in,
)
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

pytestmark = pytest.mark.slow

WEATHER: Any = {"name": "weather", "description": "Weather.", "input_schema": PARAMETERS}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(agent: AgentSession) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=agent.anthropic_base_url, api_key=agent.api_key, max_retries=0
    )


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool, **request: Any) -> Any:
    if not stream:
        return await client.messages.create(model="claude", max_tokens=500, **request)
    async with client.messages.stream(model="claude", max_tokens=500, **request) as events:
        return await events.get_final_message()


async def run_agent(client: anthropic.AsyncAnthropic, *, stream: bool, **options: Any) -> str:
    """Answer the question with a tool; the code of somebody who never heard of the proxy."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        reply = await ask(client, stream=stream, messages=messages, tools=[WEATHER], **options)
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": weather_in(block.input["city"]),
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine(TURNS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strips_thinking", [False, True])
@pytest.mark.parametrize("options", [{}, {"thinking": THINKING, "system": "Hurry."}])
async def test_unmodified_agent_leaves_one_sequence_of_the_engines_own_tokens(
    stream: bool, strips_thinking: bool, options: dict[str, Any]
) -> None:
    engine = RecordingEngine(TURNS, tokenizer=CharTokenizer(strips_thinking=strips_thinking))

    async with AgentProxy(manager_of(engine), engine.tokenizer) as proxy, proxy.session() as agent:
        answer = await run_agent(client_of(agent), stream=stream, **options)
        nodes = agent.nodes()

    assert answer == ("Rome is warmest." if "thinking" in options else TURNS[-1])
    assert len(engine.calls) == 3
    assert_engines_own_tokens(nodes, engine.calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_own_agent_loop_leaves_one_sequence(
    stream: bool, engine: RecordingEngine, agent: AgentSession
) -> None:
    if not hasattr(anthropic, "beta_async_tool"):
        pytest.skip("this version of the client has no agent loop")

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Weather of a city."""
        return weather_in(city)

    runner: Any = client_of(agent).beta.messages.tool_runner(
        model="claude",
        max_tokens=500,
        tools=[weather],
        messages=[{"role": "user", "content": QUESTION}],
        thinking={"type": "adaptive", "display": "omitted"},
        stream=stream,
    )
    message = await runner.until_done()

    assert message.content[-1].text == "Rome is warmest."
    assert len(engine.calls) == 3
    assert_engines_own_tokens(agent.nodes(), engine.calls)


async def test_turns_cut_at_a_stop_sequence_are_continued_by_tokens(agent: AgentSession) -> None:
    client = client_of(agent)
    first = await ask(client, stream=False, messages=HI, stop_sequences=["need"])

    history = [*HI, {"role": "assistant", "content": first.content}, *HI]
    await ask(client, stream=True, messages=history, thinking=THINKING)

    assert (first.stop_reason, first.stop_sequence) == ("stop_sequence", "need")
    assert first.content[0].text == "<think>\nI "
    [node] = agent.nodes()
    assert TURNS[0] in node.full_text


async def test_stream_helper_sees_every_kind_of_event(agent: AgentSession) -> None:
    kinds: list[str] = []
    async with client_of(agent).messages.stream(
        model="claude",
        max_tokens=500,
        tools=[WEATHER],
        thinking=THINKING,
        messages=[{"role": "user", "content": QUESTION}],
    ) as events:
        async for event in events:
            kinds.append(event.type)
        message: Any = await events.get_final_message()

    assert {
        "message_start",
        "content_block_start",
        "thinking",
        "signature",
        "text",
        "input_json",
        "content_block_stop",
        "message_delta",
        "message_stop",
    } <= set(kinds)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "I need both."
    assert [block.input for block in message.content[2:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert message.stop_reason == "tool_use"


async def test_usage_counts_the_tokens_the_engine_saw(
    engine: RecordingEngine, agent: AgentSession
) -> None:
    client = client_of(agent)

    message = await client.messages.create(model="claude", max_tokens=9, messages=HI)
    async with client.messages.stream(model="claude", max_tokens=9, messages=HI) as events:
        streamed = await events.get_final_message()
    counted = await client.messages.count_tokens(model="claude", messages=HI)

    call = engine.calls[0]
    assert message.usage.input_tokens == streamed.usage.input_tokens == len(call.prompt_ids)
    assert message.usage.output_tokens == streamed.usage.output_tokens == 9
    assert message.stop_reason == streamed.stop_reason == "max_tokens"
    assert counted.input_tokens == len(call.prompt_ids)


async def test_key_may_be_a_bearer_token_too(agent: AgentSession) -> None:
    client = anthropic.AsyncAnthropic(
        base_url=agent.anthropic_base_url, auth_token=agent.api_key, max_retries=0
    )

    message: Any = await client.messages.create(model="claude", max_tokens=500, messages=HI)

    assert message.content[0].text == TURNS[0]


async def test_errors_are_those_of_the_official_client(
    engine: RecordingEngine, agent: AgentSession
) -> None:
    client = client_of(agent)
    source: Any = {"type": "url", "url": "http://example.org/a.png"}
    image: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    wrong_key = anthropic.AsyncAnthropic(
        base_url=agent.anthropic_base_url,
        api_key="wrong",  # pragma: allowlist secret
        max_retries=0,
    )

    with pytest.raises(anthropic.BadRequestError, match="the model reads text") as caught:
        await client.messages.create(model="claude", max_tokens=9, messages=image)
    with pytest.raises(anthropic.AuthenticationError):
        await wrong_key.messages.create(model="claude", max_tokens=9, messages=HI)
    engine.error = RuntimeError("boom")
    with pytest.raises(anthropic.InternalServerError):
        await ask(client, stream=True, messages=HI)

    assert caught.value.type == "invalid_request_error"
    assert agent.nodes() == []

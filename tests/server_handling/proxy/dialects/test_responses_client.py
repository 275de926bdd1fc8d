"""The official OpenAI client speaks Responses to a proxy on a port."""

from __future__ import annotations

import json
from typing import Any

import openai
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

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}


def client_of(agent: AgentSession) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **request: Any) -> Any:
    if not stream:
        return await client.responses.create(model="gpt-5", **request)
    async with client.responses.stream(model="gpt-5", **request) as events:
        return await events.get_final_response()


async def run_agent(client: openai.AsyncOpenAI, *, stream: bool, **options: Any) -> str:
    """Answer the question with a tool, sending the history with every turn."""
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        response = await ask(client, stream=stream, input=history, tools=[WEATHER], **options)
        history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            output = weather_in(json.loads(call.arguments)["city"])
            result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            history.append(result)


async def run_stateful_agent(client: openai.AsyncOpenAI, **options: Any) -> str:
    """Answer the question with a tool, sending only what is new."""
    new: Any = QUESTION
    previous = openai.omit
    while True:
        response = await client.responses.create(
            model="gpt-5", input=new, tools=[WEATHER], previous_response_id=previous, **options
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        previous = response.id
        new = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": weather_in(json.loads(call.arguments)["city"]),
            }
            for call in calls
        ]


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine(TURNS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strips_thinking", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"reasoning": {"effort": "medium"}, "store": False, "instructions": "Hurry."}]
)
async def test_unmodified_agent_leaves_one_sequence_of_the_engines_own_tokens(
    stream: bool, strips_thinking: bool, options: dict[str, Any]
) -> None:
    engine = RecordingEngine(TURNS, tokenizer=CharTokenizer(strips_thinking=strips_thinking))

    async with AgentProxy(manager_of(engine), engine.tokenizer) as proxy, proxy.session() as agent:
        answer = await run_agent(client_of(agent), stream=stream, **options)
        nodes = agent.nodes()

    assert answer == ("Rome is warmest." if "reasoning" in options else TURNS[-1])
    assert len(engine.calls) == 3
    assert_engines_own_tokens(nodes, engine.calls)


async def test_agent_that_sends_only_what_is_new_leaves_one_sequence(
    engine: RecordingEngine, agent: AgentSession
) -> None:
    answer = await run_stateful_agent(client_of(agent), reasoning={"effort": "low"})

    assert answer == "Rome is warmest."
    assert_engines_own_tokens(agent.nodes(), engine.calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_own_agent_loop_leaves_one_sequence(
    stream: bool, engine: RecordingEngine, agent: AgentSession
) -> None:
    loops = pytest.importorskip("openai.lib.responses_tool_runner")

    async def weather(arguments: dict[str, Any]) -> str:
        return weather_in(arguments["city"])

    runner = loops.AsyncResponsesToolRunner(
        functions=[loops.AsyncRegisteredFunction(WEATHER, weather, independent=True)]
    )
    question = {"role": "user", "content": QUESTION}
    params: Any = {"model": "gpt-5", "input": [question], "reasoning": {"effort": "low"}}

    response = await runner.run(client_of(agent), params, stream=stream, max_steps=9)

    assert response.output_text == "Rome is warmest."
    assert len(engine.calls) == 3
    assert_engines_own_tokens(agent.nodes(), engine.calls)


async def test_stream_helper_sees_every_kind_of_event(agent: AgentSession) -> None:
    kinds: list[str] = []
    arguments = ""
    async with client_of(agent).responses.stream(
        model="gpt-5", input=QUESTION, tools=[WEATHER], reasoning={"effort": "medium"}
    ) as events:
        async for event in events:
            kinds.append(event.type)
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        response = await events.get_final_response()

    assert {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    } <= set(kinds)
    calls = [item for item in response.output if item.type == "function_call"]
    assert arguments == "".join(call.arguments for call in calls)
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]


async def test_usage_counts_the_tokens_the_engine_saw(
    engine: RecordingEngine, agent: AgentSession
) -> None:
    client = client_of(agent)

    response = await client.responses.create(model="gpt-5", input=QUESTION, max_output_tokens=9)
    counted = await client.responses.input_tokens.count(model="gpt-5", input=QUESTION)

    [call] = engine.calls
    assert response.usage is not None
    assert response.usage.input_tokens == len(call.prompt_ids)
    assert response.usage.output_tokens == len(call.completion_ids[0]) == 9
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert counted.input_tokens == len(call.prompt_ids)


async def test_stored_response_belongs_to_its_session(
    proxy: AgentProxy, agent: AgentSession
) -> None:
    client = client_of(agent)
    response = await client.responses.create(model="gpt-5", input="Hi")

    fetched = await client.responses.retrieve(response.id)
    async with proxy.session() as other:
        with pytest.raises(openai.NotFoundError):
            await client_of(other).responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="no stored response"):
            await client_of(other).responses.create(
                model="gpt-5", input="Hi", previous_response_id=response.id
            )
    await client.responses.delete(response.id)

    assert fetched.output_text == response.output_text == TURNS[0]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_errors_are_those_of_the_official_client(
    engine: RecordingEngine, agent: AgentSession
) -> None:
    client = client_of(agent)
    image = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
    wrong_key = openai.AsyncOpenAI(base_url=agent.base_url, api_key="wrong", max_retries=0)

    with pytest.raises(openai.BadRequestError, match="the model reads text") as caught:
        await client.responses.create(
            model="gpt-5",
            input=[{"role": "user", "content": [image]}],  # type: ignore[list-item]
        )
    with pytest.raises(openai.AuthenticationError):
        await wrong_key.responses.create(model="gpt-5", input="Hi")
    engine.error = RuntimeError("boom")
    with pytest.raises(openai.InternalServerError):
        await ask(client, stream=True, input="Hi")

    assert caught.value.param == "input[0].content[0]"
    assert agent.nodes() == []

"""The official OpenAI client against the proxy, on a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from tests.fakes import logprob_of
from tests.server_handling.proxy.engine import RecordingEngine
from tests.server_handling.tool_call_samples import HERMES_CALL, SEARCH

pytestmark = pytest.mark.slow

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [SEARCH]


@pytest.fixture
def openai_client(agent: AgentSession) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)


@pytest.fixture
def sync_client(agent: AgentSession) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0) as client:
        yield client


async def test_chat_has_text_usage_and_model(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(model="any", messages=MESSAGES)

    assert answer.choices[0].message.content == "one"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "test_model"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one") + 1


async def test_sync_client_in_a_thread_is_served(
    sync_client: openai.OpenAI, agent: AgentSession
) -> None:
    answer = await asyncio.to_thread(
        sync_client.chat.completions.create, model="any", messages=MESSAGES, n=2
    )

    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    assert len(agent.nodes()) == 2


async def test_options_reach_the_engine(
    openai_client: openai.AsyncOpenAI, engine: RecordingEngine
) -> None:
    await openai_client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="\n",
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1},
        extra_body={"top_k": 4, "min_p": 0.1},
    )

    options = engine.calls[0].options
    assert {name: value for name, value in options.items() if name not in ("model", "prompt")} == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "seed": 7,
        "stop": "\n",
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": 1},
        "extra_body": {"top_k": 4, "min_p": 0.1},
    }


async def test_length_cut_is_told(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=2
    )

    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "on")


async def test_logprobs_are_those_of_the_sampled_tokens(
    openai_client: openai.AsyncOpenAI, engine: RecordingEngine
) -> None:
    answer = await openai_client.chat.completions.create(
        model="any", messages=MESSAGES, logprobs=True, n=2
    )

    ids = engine.calls[0].completion_ids
    for choice, row in zip(answer.choices, ids, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.logprob for entry in choice.logprobs.content] == [
            logprob_of(t, j) for j, t in enumerate(row)
        ]
        tokens = [entry.token for entry in choice.logprobs.content]
        assert "".join(tokens) == f"{choice.message.content}</s>"
        assert choice.logprobs.content[0].bytes == list(tokens[0].encode())


async def test_text_completion_continues_its_own_output(
    openai_client: openai.AsyncOpenAI, agent: AgentSession, engine: RecordingEngine
) -> None:
    first = await openai_client.completions.create(model="any", prompt="Say ", logprobs=1)
    second = await openai_client.completions.create(
        model="any", prompt="Say " + first.choices[0].text + " and "
    )

    assert (first.choices[0].text, second.choices[0].text) == ("one", "two")
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.tokens == ["o", "n", "e", "</s>"]
    assert first.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert first.usage is not None
    assert first.usage.total_tokens == len(engine.calls[0].sequences[0])
    (node,) = agent.nodes()
    assert [node.tokens] == engine.calls[1].sequences
    assert node.tokens[: len(engine.calls[0].sequences[0])] == engine.calls[0].sequences[0]


async def test_several_prompts_are_answered_in_order(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.completions.create(model="any", prompt=["a", "b"], n=1)

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert sorted(choice.text for choice in answer.choices) == ["one", "two"]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream_adds_up_to_the_answer(
    openai_client: openai.AsyncOpenAI, engine: RecordingEngine, include_usage: bool
) -> None:
    engine.replies = ["word " * 40, "short"]
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}

    stream = await openai_client.chat.completions.create(
        model="any", messages=MESSAGES, n=2, stream=True, logprobs=True, **options
    )
    chunks = [chunk async for chunk in stream]

    texts = {0: "", 1: ""}
    ends: dict[int, str] = {}
    num_logprobs = {0: 0, 1: 0}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                num_logprobs[choice.index] += len(choice.logprobs.content or ())
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {0: "word " * 40, 1: "short"}
    assert ends == {0: "stop", 1: "stop"}
    assert num_logprobs == {0: 201, 1: 6}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == ([207] if include_usage else [])


async def test_streamed_tool_calls_are_put_together_by_the_client(
    openai_client: openai.AsyncOpenAI, engine: RecordingEngine
) -> None:
    second = HERMES_CALL.replace("cats", "dogs" * 40)
    engine.replies = [f"Both.{HERMES_CALL}{second}"]

    async with openai_client.chat.completions.stream(
        model="any", messages=MESSAGES, tools=TOOLS
    ) as stream:
        final = await stream.get_final_completion()

    (choice,) = final.choices
    calls: Any = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Both.")
    assert [call.function.name for call in calls] == ["search", "search"]
    assert json.loads(calls[1].function.arguments) == {"query": "dogs" * 40}
    assert len({call.id for call in calls}) == 2


async def test_text_stream_adds_up(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(
        model="any", prompt="x", stream=True, stream_options={"include_usage": True}, logprobs=1
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].text for c in chunks if c.choices) == "one"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_stream_is_well_formed_events(agent: AgentSession) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.post(
            f"{agent.base_url}/chat/completions",
            json={"messages": MESSAGES, "stream": True},
            headers={"Authorization": f"Bearer {agent.api_key}"},
        )

    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["choices"][0] == {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "delta": {},
    }


async def test_models_are_listed(openai_client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in openai_client.models.list()] == ["test_model"]


async def test_text_parts_are_joined(
    openai_client: openai.AsyncOpenAI, engine: RecordingEngine
) -> None:
    parts: Any = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]

    await openai_client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": parts}]
    )

    assert engine.calls[0].options["prompt"] == "[user]Hello, you</s>\n[assistant]"


async def test_concurrent_requests_of_a_session_are_all_recorded(
    openai_client: openai.AsyncOpenAI, agent: AgentSession, engine: RecordingEngine
) -> None:
    engine.replies = lambda prompt: f"re: {prompt}"

    answers = await asyncio.gather(
        *(
            openai_client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": f"question {i}"}]
            )
            for i in range(20)
        )
    )

    for i, answer in enumerate(answers):
        assert f"question {i}[assistant]" in (answer.choices[0].message.content or "").replace(
            "\n", ""
        )
    recorded = sorted(node.tokens for node in agent.nodes())
    assert recorded == sorted(call.sequences[0] for call in engine.calls)


async def test_wrong_key_raises_the_clients_authentication_error(proxy: AgentProxy) -> None:
    stranger = openai.AsyncOpenAI(base_url=f"{proxy.root_url}/v1", api_key="nobody", max_retries=0)

    with pytest.raises(openai.AuthenticationError) as raised:
        await stranger.chat.completions.create(model="any", messages=MESSAGES)

    assert raised.value.code == "invalid_api_key"

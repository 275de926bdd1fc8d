"""The official clients get what their providers would answer, on every route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from atroposlib.errors import ConfigError, EngineSetupError, MissingExtraError
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

pytestmark = pytest.mark.slow

HI: Any = [{"role": "user", "content": "Hi"}]
THOUGHT = "<think>\nI greet.\n</think>\n\nHello!"


@pytest.fixture
async def client(agent: AgentSession) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
        yield client


@pytest.fixture
async def claude(agent: AgentSession) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=agent.anthropic_base_url, api_key=agent.api_key
    ) as claude:
        yield claude


async def test_models_are_retrieved_by_name(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    card = await client.models.retrieve("test_model")
    model = await claude.models.retrieve("test_model")

    assert (card.id, card.object) == ("test_model", "model")
    assert (model.id, model.type, model.display_name) == ("test_model", "model", "test_model")
    assert [m.id async for m in client.models.list()] == ["test_model"]
    assert [m.id async for m in claude.models.list()] == ["test_model"]
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError) as refused:
        await claude.models.retrieve("other")
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_model_with_a_slash_in_its_name_is_retrieved(engine: RecordingEngine) -> None:
    async with (
        AgentProxy(manager_of(engine), engine.tokenizer, model_name="Org/Model") as proxy,
        proxy.session() as agent,
        openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client,
    ):
        assert (await client.models.retrieve("Org/Model")).id == "Org/Model"


async def test_unknown_routes_answer_in_the_shape_of_the_dialect(agent: AgentSession) -> None:
    root = agent.anthropic_base_url
    headers = {"x-api-key": agent.api_key}
    async with httpx.AsyncClient(base_url=root, headers=headers) as http:
        openai_shape = [
            await http.post("/v1/embeddings", json={}),
            await http.get("/v1/chat/completions"),
            await http.get("/some-session/v1/files"),
        ]
        anthropic_shape = [
            await http.post("/v1/messages/batches", json={}),
            await http.post("/v1/complete", json={}, headers={"anthropic-version": "2023-06-01"}),
        ]
        other = await http.get("/elsewhere/at/all")

    assert [answer.status_code for answer in openai_shape] == [404, 405, 404]
    for answer in openai_shape:
        assert answer.json()["error"].keys() == {"message", "type", "code", "param"}
        assert answer.json()["error"]["code"] == "unknown_url"
    for answer in anthropic_shape:
        assert answer.status_code == 404
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "not_found_error"
    assert other.json() == {"detail": "Not Found"}


async def test_base_url_with_v1_missing_or_doubled_is_told(agent: AgentSession) -> None:
    root = agent.anthropic_base_url
    async with (
        openai.AsyncOpenAI(base_url=root, api_key=agent.api_key) as client,
        anthropic.AsyncAnthropic(base_url=f"{root}/v1", api_key=agent.api_key) as claude,
    ):
        with pytest.raises(openai.NotFoundError, match="base URL must end with /v1"):
            await client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(anthropic.NotFoundError, match="/v1 twice"):
            await claude.messages.create(model="m", max_tokens=9, messages=HI)


CALL_WITHOUT_FUNCTION: Any = {"role": "assistant", "tool_calls": [{"id": "a"}]}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [*HI, {"role": "tool"}]}, "messages[1].content"),
        (
            "chat/completions",
            {"messages": [*HI, CALL_WITHOUT_FUNCTION, *HI]},
            "messages[1].tool_calls[0].function.name",
        ),
        ("chat/completions", {"temperature": 2.5}, "temperature"),
        ("chat/completions", {"presence_penalty": 3}, "presence_penalty"),
        ("chat/completions", {"frequency_penalty": -3}, "frequency_penalty"),
        ("chat/completions", {"logit_bias": {"1": 200}}, "logit_bias.1"),
        ("chat/completions", {"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ("chat/completions", {"seed": 2**70}, "seed"),
        ("chat/completions", {"stop": ["x"] * 200}, "stop"),
        ("chat/completions", {"stop": ""}, "stop"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"tools": [{"type": "custom"}]}, "tools[0]"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ("chat/completions", {"web_search_options": {}}, "web_search_options"),
        ("chat/completions", {"response_format": "json"}, "response_format"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
        ),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user"}]}, "input[0].content"),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "c"}]},
            "input[0].output",
        ),
        ("responses", {"max_output_tokens": 2**40}, "max_output_tokens"),
        ("responses", {"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
    ],
)
async def test_what_openai_refuses_is_a_bad_request_that_names_the_place(
    client: openai.AsyncOpenAI, engine: RecordingEngine, path: str, asked: Any, param: str
) -> None:
    whole = {"model": "m", **({"input": "Hi"} if path == "responses" else {"messages": HI})}

    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(f"/{path}", cast_to=object, body={**whole, **asked})

    assert caught.value.param == param
    assert engine.calls == []


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"messages": [{"role": "user", "content": ""}]}, "non-empty content"),
        ({"messages": [{"role": "user", "content": []}, *HI]}, "non-empty content"),
    ],
)
async def test_what_anthropic_refuses_is_a_bad_request_that_names_the_place(
    claude: anthropic.AsyncAnthropic, engine: RecordingEngine, asked: Any, word: str
) -> None:
    whole: Any = {"model": "m", "max_tokens": 9, "messages": HI}

    with pytest.raises(anthropic.BadRequestError, match=word):
        await claude.post("/v1/messages", cast_to=object, body={**whole, **asked})

    assert engine.calls == []


async def test_finished_response_is_not_streamed_again(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="m", input="Hi")

    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.retrieve(response.id, stream=True)


async def test_malformed_request_is_a_bad_request(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages="Hi")  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="m", input=7)  # type: ignore[call-overload]
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.create(model="m", max_tokens=0, messages=HI)


@pytest.mark.parametrize(
    "error",
    [
        EngineSetupError("inference server serves no model 'a'; it serves: b"),
        ConfigError("server does not tell the context length; give max_tokens"),
        MissingExtraError("torch", extra="trainer"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_wrong_setup_is_told_once_with_its_text(
    client: openai.AsyncOpenAI,
    claude: anthropic.AsyncAnthropic,
    engine: RecordingEngine,
    error: Exception,
) -> None:
    attempts = 0

    async def refuse(**_: Any) -> Any:
        nonlocal attempts
        attempts += 1
        raise error

    engine.tokens_and_logprobs_completion = refuse  # type: ignore[method-assign]
    requests = [
        lambda: client.chat.completions.create(model="m", messages=HI),
        lambda: client.responses.create(model="m", input="Hi"),
        lambda: claude.messages.create(model="m", max_tokens=9, messages=HI),
    ]
    for request in requests:
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            await request()
        assert caught.value.status_code == 424
        assert str(error) in str(caught.value)

    assert attempts == len(requests)


async def test_text_blocks_have_no_null_citations(agent: AgentSession) -> None:
    headers = {"x-api-key": agent.api_key}
    body = {"model": "m", "max_tokens": 9, "messages": HI}
    async with httpx.AsyncClient(base_url=agent.anthropic_base_url, headers=headers) as http:
        whole = await http.post("/v1/messages", json=body)
        streamed = await http.post("/v1/messages", json={**body, "stream": True})

    assert whole.json()["content"] == [{"type": "text", "text": "one"}]
    assert "citations" not in streamed.text


@pytest.mark.parametrize("option", ["include_reasoning", "separate_reasoning"])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_content_is_shown_on_request_and_taken_back(
    client: openai.AsyncOpenAI,
    agent: AgentSession,
    engine: RecordingEngine,
    option: str,
    stream: bool,
) -> None:
    engine.replies = [THOUGHT]
    messages = list(HI)

    for _ in range(2):
        shown = {"reasoning_content": "", "content": ""}
        asked: Any = {"model": "m", "messages": messages, "extra_body": {option: True}}
        if stream:
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                for name in shown:
                    shown[name] += getattr(chunk.choices[0].delta, name, None) or ""
        else:
            message: Any = (await client.chat.completions.create(**asked)).choices[0].message
            shown = {name: getattr(message, name) for name in shown}
        assert shown == {"reasoning_content": "I greet.", "content": "Hello!"}
        messages += [{"role": "assistant", **shown}, {"role": "user", "content": "Again"}]
    plain = await client.chat.completions.create(model="m", messages=messages)

    assert plain.choices[0].message.content == THOUGHT
    assert not hasattr(plain.choices[0].message, "reasoning_content")
    (node,) = agent.nodes()
    assert [node.tokens] == engine.calls[-1].sequences


async def test_reasoning_of_another_model_is_in_the_prompt(
    client: openai.AsyncOpenAI, engine: RecordingEngine
) -> None:
    foreign: Any = {"role": "assistant", "content": "Hi.", "reasoning_content": "Be short."}

    await client.chat.completions.create(model="m", messages=[*HI, foreign, *HI])

    assert "<think>\nBe short.\n</think>\n\nHi." in engine.calls[0].options["prompt"]


async def test_input_items_are_listed(client: openai.AsyncOpenAI) -> None:
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "4"}
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    first = await client.responses.create(model="m", input="Hi")
    second = await client.responses.create(model="m", input=[*HI, call, output])

    (item,) = (await client.responses.input_items.list(first.id)).data
    listed = [i.type async for i in client.responses.input_items.list(second.id, limit=1)]
    ordered = await client.responses.input_items.list(second.id, order="asc", limit=2)

    assert (item.type, item.role) == ("message", "user")  # type: ignore[union-attr]
    assert item.content[0].text == "Hi"  # type: ignore[union-attr,index]
    assert listed == ["function_call_output", "function_call", "message"]
    assert [i.type for i in ordered.data] == ["message", "function_call"]
    assert ordered.has_more
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_absent")
    with pytest.raises(openai.BadRequestError):
        await client.responses.input_items.list(second.id, limit=1000)


async def test_finished_response_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="m", input="Hi")

    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_absent")


async def test_tools_of_a_namespace_are_flattened_and_come_back_in_it(
    client: openai.AsyncOpenAI, agent: AgentSession, engine: RecordingEngine
) -> None:
    function = {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {}}
    space: Any = {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [function],
    }
    engine.replies = [
        '<tool_call>{"name": "agents__spawn", "arguments": {"n": 1}}</tool_call>',
        "Done.",
    ]
    history: list[Any] = list(HI)

    response = await client.responses.create(model="m", input=history, tools=[space])
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, call.arguments) == ("agents", "spawn", '{"n": 1}')
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}]
    await client.responses.create(model="m", input=history, tools=[space])

    (node,) = agent.nodes()
    assert [node.tokens] == engine.calls[-1].sequences


async def test_rollouts_behind_one_key_are_told_apart_by_their_session_id(
    agent: AgentSession, engine: RecordingEngine
) -> None:
    async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
        for name in ("a", "b", "a"):
            await client.chat.completions.create(
                model="m", messages=HI, extra_headers={"X-Session-ID": name}
            )
        await client.chat.completions.create(model="m", messages=HI)
        root, headers = agent.anthropic_base_url, {"x-api-key": agent.api_key}
        uuid = agent._session.uuid
        async with httpx.AsyncClient(base_url=root, headers=headers) as http:
            of_b = await http.get(f"/{uuid}/nodes", headers={"X-Session-ID": "b"})
            of_none = await http.get(f"/{uuid}/nodes", headers={"X-Session-ID": "c"})
            dropped = await http.delete(f"/{uuid}", headers={"X-Session-ID": "b"})

    sequences = [sequence for call in engine.calls for sequence in call.sequences]
    assert [node["tokens"] for node in of_b.json()["nodes"]] == sequences[1:2]
    assert (of_none.status_code, dropped.status_code) == (404, 200)
    assert agent.session_ids == ["a"]
    assert [node.tokens for node in agent.nodes("a")] == [sequences[0], sequences[2]]
    assert [node.tokens for node in agent.nodes()] == [sequences[3], sequences[0], sequences[2]]
    assert agent.trajectory(1.0, "a").nodes == agent.nodes("a")
    assert agent.nodes("unknown") == []


async def test_session_ids_count_as_sessions_and_end_with_theirs(engine: RecordingEngine) -> None:
    settings = ProxySettings(max_sessions=2)
    async with AgentProxy(manager_of(engine), engine.tokenizer, settings=settings) as proxy:
        async with (
            proxy.session() as agent,
            openai.AsyncOpenAI(
                base_url=agent.base_url, api_key=agent.api_key, max_retries=0
            ) as client,
        ):
            first: Any = {"extra_headers": {"X-Session-ID": "1"}, "messages": HI, "model": "m"}
            await client.chat.completions.create(**first)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(
                    **{**first, "extra_headers": {"X-Session-ID": "2"}}
                )
            assert agent.session_ids == ["1"]

        assert agent.nodes() == []
        async with proxy.session():
            pass

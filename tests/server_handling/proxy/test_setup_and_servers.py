"""The proxy in front of real server classes, and servers that are replaced while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy.app import (
    AgentProxy,
    create_app,
    group_of_agents,
    serving,
)
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from tests.byte_tokenizer import save_byte_tokenizer
from tests.fakes import CharTokenizer, ScriptedEngine
from tests.server_handling.conftest import MakeServer
from tests.server_handling.tool_call_samples import SEARCH

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(["one", "two", "three"]) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A proxy that knows no server yet."""
    app = create_app(SimpleNamespace(servers=[]), CharTokenizer(), "unknown")
    async with (
        serving(app, host="127.0.0.1", port=0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http,
    ):
        yield http


async def session_url(http: httpx.AsyncClient, **body: Any) -> str:
    return f"/{(await http.post('/sessions/create', json=body)).json()['uuid']}"


async def test_setup_brings_servers_and_open_sessions_keep_theirs(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    server = {"base_url": engine.base_url, "api_key": "s3cret"}  # pragma: allowlist secret
    empty = await http.post("/sessions/create", json={})
    setup = await http.post("/setup", json={"servers": [server]})
    listed = await http.get("/servers")
    url = await session_url(http)
    replaced = await http.post("/setup", json={"servers": [{"base_url": "http://127.0.0.1:9/v1"}]})
    answer = await http.post(f"{url}/v1/chat/completions", json=CHAT)

    assert empty.status_code == 503
    assert setup.json() == {"status": "ok", "servers": 1, "model_name": "unknown"}
    assert listed.json()["servers"] == [
        {
            "index": 0,
            "base_url": engine.base_url,
            "healthy": True,
            "model_name": "unknown",
            "server_type": "vllm",
        }
    ]
    assert "s3cret" not in setup.text + listed.text
    assert (replaced.status_code, answer.status_code) == (200, 200)
    assert engine.requests[-1].path == "/v1/completions"
    assert engine.requests[-1].headers["Authorization"] == "Bearer s3cret"


async def test_setup_with_a_model_names_it_in_answers(
    http: httpx.AsyncClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    save_byte_tokenizer(tmp_path)
    server = {"base_url": engine.base_url}
    names = {"model_name": "scripted", "tokenizer_name": str(tmp_path)}

    setup = await http.post("/setup", json={"servers": [server], **names})
    url = await session_url(http)
    rendered = await http.post(f"{url}/v1/chat/completions/render", json=CHAT)

    assert setup.json()["model_name"] == "scripted"
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "scripted"
    assert rendered.json()["prompt_text"] == "[user]Hello</s>[assistant]"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"servers": [{}]}', 422),
        (b'{"servers": [{"base_url": "http://x", "server_type": "abacus"}]}', 422),
        (b'{"model_name": "/no/such/folder", "servers": [{"base_url": "http://x"}]}', 400),
    ],
)
async def test_setup_that_makes_no_sense_changes_nothing(
    http: httpx.AsyncClient, body: bytes, status: int
) -> None:
    response = await http.post("/setup", content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == status
    assert response.json()["error"]["message"]
    health = (await http.get("/health")).json()
    assert (health["servers"], health["model"]) == (0, "unknown")


async def test_vllm_server_gives_exact_tokens_through_the_proxy(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    app = create_app(SimpleNamespace(servers=[server]), CharTokenizer(), "scripted")
    messages = [*CHAT["messages"]]
    async with (
        serving(app, host="127.0.0.1", port=0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        url = await session_url(http)
        for _ in range(3):
            body = {**CHAT, "messages": messages, "top_k": 5, "seed": 3}
            answer = (await http.post(f"{url}/v1/chat/completions", json=body)).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        (node,) = (await http.get(f"{url}/nodes")).json()["nodes"]

    last = engine.requests[-1].body
    assert (last["top_k"], last["seed"], last["return_token_ids"]) == (5, 3, True)
    assert last["prompt"] == node["tokens"][: len(last["prompt"])]
    assert CharTokenizer().decode(node["tokens"][len(last["prompt"]) :]) == "one</s>"
    assert [m["content"] for m in messages[1::2]] == ["two", "three", "one"]


async def test_context_overflow_of_an_engine_is_typed(make_server: MakeServer) -> None:
    async with ScriptedEngine(max_model_len=64) as engine:
        server = make_server(engine, VLLMServer)
        app = create_app(SimpleNamespace(servers=[server]), CharTokenizer(), "scripted")
        async with (
            serving(app, host="127.0.0.1", port=0) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
        ):
            url = await session_url(http)
            response = await http.post(f"{url}/v1/chat/completions", json=CHAT)
            num_tries = engine.count("/v1/completions")

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "64" in response.json()["error"]["message"]
    assert num_tries == 2  # one finds the route


@pytest.fixture
async def provider(
    engine: ScriptedEngine, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy in front of a provider that reports no token ids."""
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    server = make_server(engine, OpenAIServer)
    app = create_app(SimpleNamespace(servers=[server]), CharTokenizer(), "scripted")
    async with (
        serving(app, host="127.0.0.1", port=0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        yield http


async def test_texts_of_a_server_without_ids_are_tokenized(
    provider: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {**CHAT, "tools": [SEARCH], "top_k": 2, "n": 2}
    url = await session_url(provider)
    answer = (await provider.post(f"{url}/v1/chat/completions", json=body)).json()
    rendered = (await provider.post(f"{url}/v1/chat/completions/render", json=body)).json()
    reply = answer["choices"][0]["message"]
    body["messages"] = [*CHAT["messages"], reply, {"role": "user", "content": "and?"}]
    await provider.post(f"{url}/v1/chat/completions", json={**body, "n": 1})
    nodes = (await provider.get(f"{url}/nodes")).json()["nodes"]

    assert [c["message"]["content"] for c in answer["choices"]] == ["one", "two"]
    assert answer["usage"]["completion_tokens"] == 2
    assert engine.requests[-1].body["top_k"] == 2
    assert len(nodes) == 2
    for node, texts in zip(nodes, (["one", "three"], ["two"]), strict=True):
        sampled = [token_id for token_id in node["masked_tokens"] if token_id != -100]
        assert CharTokenizer().decode(sampled) == "".join(f"{text}</s>" for text in texts)
        assert node["metadata"] == {"finish_reason": "stop", "tokenized_from_text": True}
        assert node["logprobs"] == [1.0] * len(node["tokens"])
    assert rendered["prompt_text"].endswith("[assistant]")


async def test_placeholder_tokens_come_only_when_asked_for(
    provider: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    url = await session_url(provider)
    await provider.post(f"{url}/v1/chat/completions", json=CHAT)
    rendered = await provider.post(f"{url}/v1/chat/completions/render", json=CHAT)
    [node] = (await provider.get(f"{url}/nodes")).json()["nodes"]

    assert node["metadata"]["dummy_tokens"]
    assert rendered.status_code == 400


async def test_group_of_agents_says_that_its_tokens_were_made_from_text(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    manager = SimpleNamespace(servers=[make_server(engine, OpenAIServer)])
    async with AgentProxy(manager, CharTokenizer()) as proxy, proxy.session() as agent:
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:
            await http.post(f"{agent.base_url}/chat/completions", json=CHAT)
        group = group_of_agents([agent.trajectory(1.0)])

    assert group is not None
    assert group["tokenized_from_text"]
    assert group["inference_logprobs"] is None
    assert CharTokenizer().decode(group["tokens"][0]).endswith("one</s>")


async def test_engine_that_dies_leaves_503_and_a_session_that_goes_on(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    settings = ProxySettings(upstream_wait_s=0.05)
    manager = SimpleNamespace(servers=[server])
    app = create_app(manager, CharTokenizer(), "scripted", settings=settings)
    async with (
        serving(app, host="127.0.0.1", port=0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        url = await session_url(http)
        first = await http.post(f"{url}/v1/chat/completions", json=CHAT)
        port_before = engine.port
        await engine.stop()
        dead = await http.post(f"{url}/v1/chat/completions", json=CHAT)
        health = (await http.get("/health")).json()
        await engine.start(port_before)
        settings.upstream_wait_s = 5.0
        again = await http.post(f"{await session_url(http)}/v1/chat/completions", json=CHAT)
        nodes = (await http.get(f"{url}/nodes")).json()["nodes"]

    assert (first.status_code, dead.status_code, again.status_code) == (200, 503, 200)
    assert health["healthy_servers"] == 0
    assert len(nodes) == 1

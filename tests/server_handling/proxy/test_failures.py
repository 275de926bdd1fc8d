"""Engines that fail, agents that hang up, sessions deleted while they work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from atroposlib.envs.server_handling.retry import (
    EngineStatusError,
    RetriesExhaustedError,
    ServerDownError,
)
from atroposlib.errors import ContextOverflowError
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PATIENCE_S = 5.0


def http_of(agent: AgentSession) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {agent.api_key}"}
    return httpx.AsyncClient(base_url=agent.base_url, headers=headers)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextOverflowError("prompt 300, limit 256"), 400, "context_length_exceeded"),
        (EngineStatusError("bad stop", status=400), 400, "refused"),
        (EngineStatusError("Bearer s3cret was refused", status=401), 503, "upstream_unavailable"),
        (
            RetriesExhaustedError("3 attempts", OSError("reset"), num_attempts=3),
            503,
            "upstream_unavailable",
        ),
        (NotImplementedError("no token ids"), 501, "not_implemented"),
        (KeyError("boom"), 500, "internal_error"),
    ],
)
async def test_engine_failures_have_their_status_and_code(
    agent: AgentSession, engine: RecordingEngine, error: Exception, status: int, code: str
) -> None:
    engine.error = error
    async with http_of(agent) as http:
        response = await http.post("/chat/completions", json={**CHAT, "stream": True})
        engine.error = None
        second = await http.post("/chat/completions", json=CHAT)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "s3cret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)
    assert second.status_code == 200
    assert len(agent.nodes()) == 1


async def test_session_moves_to_another_server_when_its_own_is_down() -> None:
    first = RecordingEngine(base_url="http://first/v1")
    second = RecordingEngine(base_url="http://second/v1")
    async with (
        AgentProxy(manager_of(first, second), first.tokenizer) as proxy,
        proxy.session() as agent,
        proxy.session(base_url="http://first/v1") as bound,
        http_of(agent) as http,
        http_of(bound) as bound_http,
    ):
        opened = await http.post("/chat/completions", json=CHAT)
        first.server_healthy, first.error = False, ServerDownError("down")
        message = opened.json()["choices"][0]["message"]
        more = [*CHAT["messages"], message, {"role": "user", "content": "And?"}]

        moved = await http.post("/chat/completions", json={"messages": more})
        waiting = asyncio.create_task(bound_http.post("/chat/completions", json=CHAT))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.server_healthy, first.error = True, None
        waited = await waiting

        assert (moved.status_code, waited.status_code) == (200, 200)
        (node,) = agent.nodes()
        (before, _), (after,) = first.calls, second.calls
        assert after.prompt_ids[: len(before.sequences[0])] == before.sequences[0]
        assert [node.tokens] == after.sequences


async def test_server_that_stays_down_is_503_after_the_wait(engine: RecordingEngine) -> None:
    engine.server_healthy, engine.error = False, ServerDownError("server one is down")
    settings = ProxySettings(upstream_wait_s=0)
    async with (
        AgentProxy(manager_of(engine), engine.tokenizer, settings=settings) as proxy,
        proxy.session() as agent,
        http_of(agent) as http,
    ):
        response = await http.post("/chat/completions", json=CHAT)

    assert response.status_code == 503
    assert "down" in response.json()["error"]["message"]


async def test_agent_that_hangs_up_frees_the_engine(
    agent: AgentSession, engine: RecordingEngine
) -> None:
    engine.gate = asyncio.Event()
    async with http_of(agent) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/chat/completions", json=CHAT, timeout=0.1)
    await until(lambda: engine.num_cancelled == 1)
    engine.gate.set()

    async with http_of(agent) as http:
        later = await http.post("/chat/completions", json=CHAT)

    assert later.status_code == 200
    assert [node.tokens for node in agent.nodes()] == engine.calls[0].sequences


async def test_agent_that_hangs_up_within_its_body_is_nobodys_problem(
    proxy: AgentProxy, agent: AgentSession
) -> None:
    host, _, port = proxy.root_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {agent.api_key}\r\n"
    writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    async with http_of(agent) as http:
        later = await http.post("/chat/completions", json=CHAT)

    assert later.status_code == 200
    assert reader.at_eof() or not reader._buffer  # type: ignore[attr-defined]
    assert len(agent.nodes()) == 1


async def test_deletion_ends_requests_in_flight_with_404(
    agent: AgentSession, proxy: AgentProxy, engine: RecordingEngine
) -> None:
    engine.gate = asyncio.Event()
    async with proxy.session() as other, http_of(agent) as http, http_of(other) as other_http:
        mine = [asyncio.create_task(http.post("/chat/completions", json=CHAT)) for _ in range(2)]
        theirs = asyncio.create_task(other_http.post("/chat/completions", json=CHAT))
        await until(lambda: engine.num_waiting == 3)

        uuid = agent._session.uuid
        deleted = await http.delete(f"{proxy.root_url}/{uuid}")
        answers = await asyncio.gather(*mine)
        engine.gate.set()

        assert deleted.status_code == 200
        assert [answer.status_code for answer in answers] == [404, 404]
        assert {a.json()["error"]["code"] for a in answers} == {"session_not_found"}
        assert (await theirs).status_code == 200
        assert agent.nodes() == []
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 401


async def test_failed_prompt_ends_its_siblings(
    agent: AgentSession, engine: RecordingEngine
) -> None:
    engine.gate = asyncio.Event()
    async with http_of(agent) as http:
        answer = asyncio.create_task(http.post("/completions", json={"prompt": ["a", "b"]}))
        await until(lambda: engine.num_waiting == 2)
        engine.error = KeyError("boom")
        engine.gate.set()

        assert (await answer).status_code == 500
    assert agent.nodes() == []

"""Requests of agents at the proxy continue their trace, and reach the engine with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy.app import AgentProxy
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.utils.tracing import Tracer, open_tracer, root_span
from tests.fakes import CharTokenizer, ScriptedEngine
from tests.server_handling.conftest import MakeServer, make_server
from tests.telemetry.spans import spans_in

__all__ = ["make_server"]

pytestmark = pytest.mark.slow

FOREIGN = f"00-{'c' * 32}-{'d' * 16}-01"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(["one", "two", "three"]) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spans.jsonl"


def tracer_of(path: Path) -> Tracer:
    tracer = open_tracer("atropos-environment", environ={"ATROPOS_TRACING": f"file:{path}"})
    assert tracer is not None
    return tracer


async def chat(agent: Any, headers: dict[str, str]) -> None:
    key = {"Authorization": f"Bearer {agent.api_key}"}
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{agent.base_url}/chat/completions"
        (await http.post(url, json=CHAT, headers={**key, **headers})).raise_for_status()


def header_of_last_request(engine: ScriptedEngine) -> str | None:
    names = {name.lower(): value for name, value in engine.requests[-1].headers.items()}
    return names.get("traceparent")


async def test_turns_of_an_agent_belong_to_its_rollout(
    engine: ScriptedEngine, make_server: MakeServer, path: Path
) -> None:
    tracer = tracer_of(path)
    server = make_server(engine, VLLMServer)
    proxy = AgentProxy(SimpleNamespace(servers=[server]), CharTokenizer(), model_name="m")
    async with proxy:
        with root_span(tracer, "rl.rollout") as rollout:
            async with proxy.session() as agent:
                own = f"00-{rollout.trace_id}-{'e' * 16}-01"
                for header in ({}, {"traceparent": own}, {"traceparent": FOREIGN}):
                    await chat(agent, header)
                await chat(agent, {"traceparent": "malformed"})
                variables = agent.environment
    tracer.close()

    spans = spans_in(path)
    turns = [span for span in spans if span.name == "rl.turn"]
    assert {span.trace_id for span in spans} == {rollout.trace_id}
    assert [turn.attributes["rl.turn.index"] for turn in turns] == [0, 1, 2, 3]
    root = rollout.span_id
    assert [turn.parent_id for turn in turns] == [root, "e" * 16, root, root]
    assert [turn.links for turn in turns] == [[], [], [("c" * 32, "d" * 16)], []]
    requests = [span for span in spans if span.name == "text_completion scripted"]
    assert {span.parent_id for span in requests} == {turn.span_id for turn in turns}
    assert header_of_last_request(engine) == (f"00-{rollout.trace_id}-{requests[-1].span_id}-01")
    assert variables["TRACEPARENT"] == f"00-{rollout.trace_id}-{root}-01"


@pytest.mark.parametrize("kind", [VLLMServer, OpenAIServer])
async def test_without_tracing_the_header_of_an_agent_reaches_the_engine(
    engine: ScriptedEngine, make_server: MakeServer, kind: Any
) -> None:
    server = make_server(engine, kind)
    proxy = AgentProxy(SimpleNamespace(servers=[server]), CharTokenizer(), model_name="m")
    async with proxy, proxy.session() as agent:
        await chat(agent, {"traceparent": FOREIGN})
        sent_on = header_of_last_request(engine)
        await chat(agent, {"traceparent": "malformed"})
        malformed = header_of_last_request(engine)
        await chat(agent, {})
        without = header_of_last_request(engine)

    assert (sent_on, malformed, without) == (FOREIGN, None, None)
    assert "TRACEPARENT" not in agent.environment


async def test_a_failed_request_is_an_error_without_its_text(
    engine: ScriptedEngine, make_server: MakeServer, path: Path
) -> None:
    from tests.fakes import Fault

    tracer = tracer_of(path)
    server = make_server(engine, VLLMServer)
    with root_span(tracer, "rl.rollout"):
        await server.completion(prompt="Hello", max_tokens=5)
        engine.fail_next(Fault(message="secret text"))
        await server.completion(prompt="Hello", max_tokens=5)
    tracer.close()

    requests = [span for span in spans_in(path) if span.name == "text_completion scripted"]
    assert [span.is_error for span in requests] == [False, True, False]
    assert all("secret text" not in str(span.attributes) for span in requests)
    assert all(span.attributes["gen_ai.request.model"] == "scripted" for span in requests)
    assert requests[0].attributes["gen_ai.usage.output_tokens"] > 0

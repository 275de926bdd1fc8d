"""An environment whose tracked sessions live at a proxy of another process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.proxy.app import create_app, serving
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer, create_proxy_session
from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.server_handling.proxy.engine import RecordingEngine, manager_of
from tests.server_handling.tool_call_samples import HERMES_CALL, SEARCH

ADMIN = "the administrator's"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def proxy_url(engine: RecordingEngine) -> AsyncIterator[str]:
    """A proxy with keys, as a program would serve it."""
    settings = ProxySettings(require_keys=True, admin_key=ADMIN)
    app = create_app(manager_of(engine), engine.tokenizer, "test_model", settings=settings)
    async with serving(app, host="127.0.0.1", port=0) as port:
        yield f"http://127.0.0.1:{port}"


async def test_session_keeps_state_and_ends_with_its_block(
    proxy_url: str, engine: RecordingEngine
) -> None:
    async with await create_proxy_session(f"{proxy_url}/", admin_key=ADMIN) as session:
        assert session.get_url() == f"{proxy_url}/{session.session_uuid}/v1"
        assert (session.model_name, session.base_url) == ("test_model", "http://engine/v1")
        answer = await session.chat_completion(messages=MESSAGES, max_tokens=50)
        nodes = session.get_state()["nodes"]

    assert answer.choices[0].message.content == "one"
    assert [node.tokens for node in nodes] == engine.calls[0].sequences
    assert engine.calls[0].options["max_tokens"] == 50
    with pytest.raises(RuntimeError, match="no such session"):
        await session.fetch_state()


async def test_tool_calls_are_dictionaries_and_go_back(
    proxy_url: str, engine: RecordingEngine
) -> None:
    engine.replies = [HERMES_CALL, "A cat."]
    async with await create_proxy_session(proxy_url, admin_key=ADMIN) as session:
        first = await session.chat_completion(messages=MESSAGES, tools=[SEARCH], split="train")
        calls: Any = first.choices[0].message.tool_calls
        more = [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "found"},
        ]
        second = await session.chat_completion(messages=more, tools=[SEARCH])
        (node,) = session.get_state()["nodes"]

    assert first.choices[0].finish_reason == "tool_calls"
    assert calls[0]["function"]["name"] == "search"
    assert second.choices[0].message.content == "A cat."
    assert [node.tokens] == engine.calls[1].sequences
    session.reset()
    assert session.get_state() == {"nodes": []}


async def test_refusals_carry_the_proxys_message(proxy_url: str) -> None:
    with pytest.raises(RuntimeError, match="key is missing"):
        await create_proxy_session(proxy_url)
    async with await create_proxy_session(proxy_url, admin_key=ADMIN) as session:
        with pytest.raises(RuntimeError, match="messages is empty"):
            await session.chat_completion(messages=[])
        with pytest.raises(NotImplementedError):
            await session.completion(prompt="x")


async def test_cleanup_of_a_lost_proxy_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    await ProxyManagedServer("http://127.0.0.1:9", "gone").cleanup()

    assert "was not deleted" in caplog.text


async def test_manager_opens_its_sessions_at_the_proxy(
    proxy_url: str, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_PROXY_URL", proxy_url)
    monkeypatch.setenv("ATROPOS_PROXY_KEY", ADMIN)
    config = APIServerConfig(base_url="http://unused/v1", server_type="vllm")
    manager = ServerManager([config], tool_parser="qwen")

    async with manager.managed_server() as session:
        await session.chat_completion(messages=MESSAGES)
        nodes = session.get_state()["nodes"]

    assert isinstance(session, ProxyManagedServer)
    assert [node.tokens for node in nodes] == engine.calls[0].sequences
    await manager.close()

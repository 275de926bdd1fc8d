"""What a base URL says besides the place, user, password and key, is sent and never shown."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from aiohttp import web

from atroposlib.api.client import TrainerClient
from atroposlib.api.client_transport import RetryRule
from atroposlib.envs.server_handling import text_sampling
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.openai_compatible import TokenServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.text import HTTP_CLIENT_LOGGERS
from example_trainer.engine import EngineConnection
from example_trainer.launch import preflight
from tests.fakes import CharTokenizer, Fault, ScriptedEngine

SECRET = "hunter2"  # pragma: allowlist secret
QUESTION = [{"role": "user", "content": "hi"}]


def with_password(url: str) -> str:
    return url.replace("http://", f"http://someone:{SECRET}@")


def server_at(url: str, kind: Any, **settings: Any) -> Any:
    settings = {"model_name": "scripted", "startup_timeout": 0.1, **settings}
    server = kind(APIServerConfig(base_url=with_password(url), **settings))
    server.health_poll_s = server.max_backoff_s = 0.01
    if isinstance(server, TokenServer):
        server.tokenizer = CharTokenizer()
    return server


async def said_by(server: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Return what a request says when it fails, and all that is logged meanwhile."""
    session = ManagedServer(server, CharTokenizer())
    try:
        await session.chat_completion(messages=QUESTION, max_tokens=9)
        said = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not tell
        said = f"{error} {error!r} {error.__cause__!r}"
    finally:
        await server.close()
    return said + caplog.text


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer, SGLangServer, TrlVllmServer])
@pytest.mark.parametrize("status", [None, 401, 404, 400, 500])
async def test_failures_show_the_place_alone(
    kind: Any, status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for client in HTTP_CLIENT_LOGGERS:  # commands that other tests run have quietened them
        caplog.set_level(logging.DEBUG, logger=client)
    async with ScriptedEngine(["one"], offers_completions=False) as engine:
        server = server_at(engine.base_url, kind)
        if status is not None:
            engine.fail_next(*[Fault(status=status, message="no such model") for _ in range(40)])
        said = await said_by(server, caplog)

    assert SECRET not in said
    assert f"***@127.0.0.1:{engine.port}" in said


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer])
async def test_server_that_is_not_there_is_named_by_its_place(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    said = await said_by(server_at("http://127.0.0.1:9/v1", kind), caplog)

    assert SECRET not in said
    assert "***@127.0.0.1:9" in said


async def test_unknown_model_is_told_with_harmless_names_and_without_the_password() -> None:
    async with ScriptedEngine(["one"], model="\x1b[2J" + "x" * 5000, aliases=()) as engine:
        server = server_at(engine.base_url, VLLMServer)
        with pytest.raises(Exception, match="serves no model 'scripted'") as caught:
            await ManagedServer(server, CharTokenizer()).chat_completion(messages=QUESTION)
        await server.close()

    assert SECRET not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_announcement_of_text_tokens_shows_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text_sampling.announce_text_tokens.cache_clear()
    async with ScriptedEngine(["one"]) as engine:
        said = await said_by(server_at(engine.base_url, OpenAIServer, api_key="k"), caplog)

    assert "reports no token ids" in said
    assert SECRET not in said


async def test_user_and_password_are_sent() -> None:
    seen: list[str | None] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    for kind in (OpenAIServer, VLLMServer):
        server = server_at(f"http://127.0.0.1:{port}/v1", kind, api_key="k")
        with pytest.raises(Exception, match="404"):
            await ManagedServer(server, CharTokenizer()).chat_completion(messages=QUESTION)
        await server.close()
    await runner.cleanup()

    assert set(seen) == {httpx.BasicAuth("someone", SECRET)._auth_header}


async def test_manager_names_addresses_without_passwords() -> None:
    configs = [
        APIServerConfig(base_url=with_password(f"http://127.0.0.1:{port}/v1"), model_name="m")
        for port in (9, 10)
    ]
    manager = ServerManager(configs)
    with pytest.raises(ConfigError, match="no server at") as caught:
        manager._server_at(with_password("http://127.0.0.1:11/v1"))
    await manager.close()

    assert SECRET not in str(caught.value)


def test_trainer_and_service_clients_show_the_place() -> None:
    url = with_password("http://127.0.0.1:9")
    with (
        TrainerClient(url, retry=RetryRule(attempts=1)) as client,
        pytest.raises(TrajectoryApiError) as away,
    ):
        client.status()
    with pytest.raises(ConfigError) as no_engine:
        preflight.served_model(url, "m")
    connection = EngineConnection(url)
    with pytest.raises(Exception, match="failed") as failed:
        connection.post("/pause")
    connection.close()

    for caught in (away, no_engine, failed):
        assert SECRET not in str(caught.value)
        assert "***@127.0.0.1:9" in str(caught.value)

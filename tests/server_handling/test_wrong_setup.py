"""A missing key, a wrong address: the first request says what was tried and what to set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import ServerHealth
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from tests.fakes import Fault, ScriptedEngine

MakeServer = Callable[..., OpenAIServer]
MESSAGES = [{"role": "user", "content": "hi"}]
KEY = "sk-made-up-0123456789"  # pragma: allowlist secret


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_key_names_what_to_set_and_never_the_key(
    status: int,
    engine: ScriptedEngine,
    make_server: MakeServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(engine, api_key=KEY)
    engine.fail_next(Fault(status=status, message=f"Incorrect API key provided: {KEY}"))

    with pytest.raises(EngineSetupError, match=rf"{status}.*set api_key") as caught:
        await server.chat_completion(messages=MESSAGES)

    assert engine.base_url in str(caught.value)
    assert KEY not in str(caught.value) + repr(server.config) + caplog.text
    assert caught.value.__suppress_context__
    assert len(engine.requests) == 1


async def test_key_masked_by_the_provider_is_left_out_too(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    engine.fail_next(Fault(status=401, message="Incorrect API key provided: sk-ma********6789."))

    with pytest.raises(EngineSetupError) as caught:
        await make_server(engine).chat_completion(messages=MESSAGES)

    assert "6789" not in str(caught.value)


async def test_missing_route_or_model_names_address_and_model(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    engine.fail_next(Fault(status=404, message="The model `scripted` does not exist."))

    with pytest.raises(
        EngineSetupError, match=r"http://127.*404 for model 'scripted': .*; check model_name.*/v1"
    ):
        await make_server(engine).chat_completion(messages=MESSAGES)


def test_missing_key_of_the_official_endpoint_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ConfigError, match=r"no usable API key .* set api_key, or OPENAI_API_KEY"):
        OpenAIServer(APIServerConfig(model_name="gpt"))


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer, SGLangServer, TrlVllmServer])
def test_address_without_its_scheme_is_told_at_once(kind: type[OpenAIServer]) -> None:
    with pytest.raises(ConfigError, match=r"'localhost:9001/v1'; expected .* http://localhost"):
        kind(APIServerConfig(base_url="localhost:9001/v1"))


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer, SGLangServer, TrlVllmServer])
async def test_address_where_nobody_listens_fails_with_what_was_tried(
    kind: type[OpenAIServer], free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port}/v1"
    server = kind(APIServerConfig(base_url=url, model_name="m", startup_timeout=0.05))
    server.health_poll_s = 0.01

    expected = rf"{url} has not answered .* --port {free_port}\), or set base_url"
    with pytest.raises(EngineSetupError, match=expected) as caught:
        await asyncio.wait_for(server.chat_completion(messages=MESSAGES), timeout=60)

    await server.close()
    assert "--openai.base_url" in str(caught.value)
    assert "--openai.startup_timeout" in str(caught.value)
    assert "requests wait for it for up to 0.05 s (startup_timeout)" in caplog.text


async def test_silent_server_s_first_line_says_how_long_it_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([False, True, False])

    async def probe() -> bool:
        return next(answers)

    health = ServerHealth("http://h/v1", startup_timeout_s=60.0, remedy="start it")
    for _ in range(3):
        await health.confirm(probe)

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "inference server http://h/v1 does not answer; "
        "requests wait for it for up to 60 s (startup_timeout); start it",
        # One that has answered is waited for without limit.
        "inference server http://h/v1 does not answer; requests wait until it does",
    ]


async def test_silent_server_is_named_again_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe() -> bool:
        return False

    health = ServerHealth("http://h/v1")
    await health.confirm(probe)
    await health.confirm(probe)
    monkeypatch.setattr(health, "_next_line", 0.0)
    await health.confirm(probe)
    await health.confirm(probe)

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == 2 * ["inference server http://h/v1 does not answer; requests wait until it does"]


async def test_manager_without_one_server_that_ever_answered_names_them_all(
    free_port: int,
) -> None:
    urls = [f"http://127.0.0.1:{free_port}/v1", "http://name.invalid/v1"]
    manager = ServerManager([APIServerConfig(base_url=u, startup_timeout=0.05) for u in urls])
    manager.slot_poll_s = 0.01

    with pytest.raises(
        InferenceError, match=rf"none of .* {urls[0]}, {urls[1]}; start them.*--openai"
    ):
        await asyncio.wait_for(manager.chat_completion(messages=MESSAGES), timeout=60)

    await manager.close()


async def test_server_still_starting_is_waited_for(free_port: int) -> None:
    engine = ScriptedEngine(["late"])
    server = OpenAIServer(APIServerConfig(base_url=f"http://127.0.0.1:{free_port}/v1"))
    server.health_poll_s = 0.01

    request = asyncio.create_task(server.completion(prompt="hi"))
    await asyncio.sleep(0.1)
    await engine.start(free_port)
    answer = await asyncio.wait_for(request, timeout=60)
    await engine.stop()
    await server.close()

    assert answer.choices[0].text == "late"


async def test_server_that_answered_once_is_waited_for_without_limit(
    make_server: MakeServer,
) -> None:
    engine = ScriptedEngine(["back"])
    await engine.start()
    server = make_server(engine, startup_timeout=0.0)
    await server.completion(prompt="hi")
    await engine.stop()

    request = asyncio.create_task(server.completion(prompt="hi"))
    await asyncio.sleep(0.15)
    assert not request.done()
    await engine.start(engine.port)
    answer = await asyncio.wait_for(request, timeout=60)
    await engine.stop()

    assert answer.choices[0].text == "back"

"""The engine's model list and tokenizer are compared with the settings at the first request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from atroposlib.envs.server_handling.openai_compatible import TEST_TEXT, unknown_model_text
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import EngineSetupError
from tests.fakes import CharTokenizer, Fault, ScriptedEngine

MakeServer = Callable[..., Any]
MESSAGES = [{"role": "user", "content": "hi"}]


class ShiftedTokenizer(CharTokenizer):
    """Every character one id further: another model's tokenizer."""

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return [token_id + 1 for token_id in super().encode(text, *args, **kwargs)]


class TokenizingEngine(ScriptedEngine):
    """A scripted engine with vLLM's `/tokenize`."""

    def _add_routes(self, app: web.Application) -> None:
        super()._add_routes(app)
        app.router.add_post("/tokenize", self._guarded(self._tokenize))

    def _tokenize(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        ids = self.tokenizer.encode(
            body["prompt"], add_special_tokens=body.get("add_special_tokens", True)
        )
        return {"tokens": ids, "count": len(ids)}

    def _model_card(self) -> dict[str, Any]:
        return {**super()._model_card(), "root": "models/tiny"}


def server_for(engine: ScriptedEngine, kind: type[Any], **settings: Any) -> Any:
    settings = {"model_name": "X", **settings}
    server = kind(APIServerConfig(base_url=engine.base_url, **settings))
    server.health_poll_s = server.max_backoff_s = 0.01
    if isinstance(server, VLLMServer):
        server.tokenizer = CharTokenizer()
    return server


async def test_model_that_vllm_does_not_serve_is_refused_with_the_one_to_use() -> None:
    async with ScriptedEngine(["ok"], model="tiny", aliases=()) as engine:
        server = server_for(engine, VLLMServer)
        with pytest.raises(EngineSetupError) as caught:
            await server.tokens_and_logprobs_completion(prompt="hi")
        await server.close()

    assert str(caught.value) == (
        f"inference server {engine.root_url} serves no model 'X'; it serves: tiny. "
        "Use --openai.model_name tiny"
    )
    assert engine.requests == []


async def test_adapter_in_the_model_list_is_taken() -> None:
    async with ScriptedEngine(["ok"], model="base", aliases=("X",)) as engine:
        server = server_for(engine, VLLMServer)
        await server.tokens_and_logprobs_completion(prompt="hi")
        await server.chat_completion(messages=MESSAGES)
        await server.close()

    assert engine.num_listings == 1


async def test_provider_that_answers_to_an_unlisted_name_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedEngine(["ok"], model="tiny", aliases=()) as engine:
        server = server_for(engine, OpenAIServer)
        for _ in range(3):
            await server.chat_completion(messages=MESSAGES)
        await server.close()

    assert caplog.text.count("serves no model 'X'; it serves: tiny") == 1


@pytest.mark.parametrize("status", [404, 400])
async def test_provider_that_refuses_an_unlisted_name_is_quoted_with_its_list(status: int) -> None:
    async with ScriptedEngine(["ok"], model="tiny", aliases=()) as engine:
        engine.fail_next(Fault(status=status, message="The model `X` does not exist."))
        server = server_for(engine, OpenAIServer)
        with pytest.raises(
            EngineSetupError, match=r"it serves: tiny\. Use --openai.model_name tiny"
        ):
            await server.chat_completion(messages=MESSAGES)
        await server.close()


@pytest.mark.parametrize(
    "listing",
    [
        web.Response(status=403),
        web.Response(status=404),
        web.Response(text="<html>"),
        web.json_response({"data": "none"}),
        web.json_response({"data": [{"id": "x" * 100}] * 30_000}),
    ],
)
async def test_list_that_cannot_be_used_stops_nothing(listing: web.Response) -> None:
    class OddEngine(ScriptedEngine):
        async def _models(self, _: web.Request) -> web.Response:
            self.num_listings += 1
            return web.Response(body=listing.body, status=listing.status)

    async with OddEngine(["ok"]) as engine:
        for kind in (VLLMServer, OpenAIServer):
            server = server_for(engine, kind)
            for _ in range(2):
                await server.chat_completion(messages=MESSAGES)
            await server.close()

    assert engine.num_listings == 2


@pytest.mark.parametrize("kind", [TokenizingEngine, ScriptedEngine])
async def test_tokenizer_that_is_not_the_engines_is_refused(
    kind: type[ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async with kind(["ok"], model="tiny") as engine:
        server = server_for(engine, VLLMServer, model_name="tiny")
        server.expect_tokenizer(ShiftedTokenizer(), name="./othertok")
        with pytest.raises(EngineSetupError) as caught:
            await server.tokens_and_logprobs_completion(prompt="hi")
        await server.close()

    remedy = "models/tiny" if kind is TokenizingEngine else "tiny"
    assert str(caught.value).startswith("the tokenizer ./othertok is not the engine's: ")
    assert str(caught.value).endswith(f"Use --env.tokenizer_name {remedy}")


@pytest.mark.parametrize("kind", [TokenizingEngine, ScriptedEngine])
async def test_tokenizer_of_the_engine_is_compared_once(kind: type[ScriptedEngine]) -> None:
    async with kind(["ok"]) as engine:
        server = server_for(engine, VLLMServer, model_name="m")
        server.expect_tokenizer(CharTokenizer(), name="characters", is_for_all=True)
        await asyncio.gather(*(server.chat_completion(messages=MESSAGES) for _ in range(5)))
        await server.tokens_and_logprobs_completion(prompt="hi")
        await server.close()

    compared = [request for request in engine.requests if request.body.get("prompt") == TEST_TEXT]
    assert len(compared) == 1


async def test_chat_with_a_judge_of_another_tokenizer_is_not_compared() -> None:
    async with TokenizingEngine(["ok"]) as engine:
        settings = {"base_url": engine.base_url, "server_type": "vllm"}
        configs = [APIServerConfig(model_name=name, **settings) for name in ("m", "scripted")]
        manager = ServerManager(configs)
        manager.expect_tokenizer(ShiftedTokenizer(), name="./othertok", is_for_all=True)
        await manager.chat_completion(messages=MESSAGES)
        await manager.close()

    assert manager.num_answered == 1
    assert manager.setup_error is None


async def test_tokenizer_that_cannot_be_asked_for_is_not_compared() -> None:
    async with ScriptedEngine(["ok"], returns_token_ids=False, offers_generate=True) as engine:
        server = server_for(engine, VLLMServer, model_name="m")
        server.expect_tokenizer(ShiftedTokenizer(), name="./othertok")
        await server.tokens_and_logprobs_completion(prompt="hi")
        await server.close()


async def test_server_that_comes_up_later_is_compared_then(
    caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine(["ok"], model="tiny", aliases=())
    engine.port = free_port
    server = server_for(engine, VLLMServer)
    request = asyncio.create_task(server.tokens_and_logprobs_completion(prompt="hi"))
    while "requests wait for it" not in caplog.text:  # noqa: ASYNC110 - the log has no event
        await asyncio.sleep(0.005)
    await engine.start(free_port)
    with pytest.raises(EngineSetupError, match="it serves: tiny"):
        await request
    await server.close()
    await engine.stop()


def test_long_list_is_shortened_and_the_nearest_name_is_first() -> None:
    served = [f"model-{n}" for n in range(20)] + ["qwen-small"]

    text = unknown_model_text("http://u", "qwen-smal", served)

    assert "it serves: qwen-small, model-0," in text
    assert text.endswith("and 13 more. Use --openai.model_name qwen-small")


async def test_engine_that_is_slow_to_list_its_models_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowListing(ScriptedEngine):
        num_listings = 0

        async def _models(self, _: web.Request) -> web.Response:
            self.num_listings += 1
            await self._stopping.wait()
            return web.Response()

    monkeypatch.setattr("atroposlib.envs.server_handling.openai_compatible.CHECK_TIMEOUT_S", 0.1)
    async with SlowListing(["ok"], model="X") as engine:
        server = server_for(engine, VLLMServer, health_check=False)

        for _ in range(3):
            await server.completion(prompt="hi", max_tokens=4)

    assert engine.num_listings == 1

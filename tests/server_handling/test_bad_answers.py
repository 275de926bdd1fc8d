"""Engines whose answers never end, cannot be read, or repeat the key of the request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from atroposlib.envs.server_handling import engine_http, retry
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.openai_compatible import OpenAICompatibleServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.retry import RetriesExhaustedError
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hi"}]
KEY = "a-secret-of-24-characters"
PIECE = b" " * 2**16
LIMIT = 2**20


class BadEngine:
    """An engine that is healthy; the first part of the path chooses its other answers.

    Attributes:
        body: the answers at paths that begin with `/malformed`.
    """

    def __init__(self) -> None:
        self.url = ""
        self.body = b""
        self.is_over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if request.match_info["route"] in ("health", "v1/models"):
            return web.json_response({"data": [{"id": "m"}]})
        if kind == "repeats":
            text = f"headers: {request.headers['Authorization']}"
            return web.json_response({"error": {"message": text}}, status=500)
        if kind == "malformed":
            return web.Response(body=self.body, content_type="application/json")
        response = web.StreamResponse(status=500 if kind == "error" else 200)
        pack = zlib.compressobj(wbits=31) if kind == "gzip" else None
        if pack is not None:
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        while not self.is_over.is_set():
            piece = b" " if kind == "trickle" else PIECE
            if pack is not None:
                piece = pack.compress(piece) + pack.flush(zlib.Z_SYNC_FLUSH)
            await response.write(piece)
            await asyncio.sleep(0.05 if kind == "trickle" else 0)
        return response


@pytest.fixture
async def engine() -> AsyncIterator[BadEngine]:
    engine = BadEngine()
    app = web.Application()
    app.router.add_route("*", "/{kind}/{route:.*}", engine.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    engine.is_over.set()
    await runner.cleanup()


@pytest.fixture
async def make_server(engine: BadEngine) -> AsyncIterator[Callable[..., OpenAICompatibleServer]]:
    made: list[OpenAICompatibleServer] = []

    def make(of_kind: type[OpenAICompatibleServer], behavior: str) -> OpenAICompatibleServer:
        url = f"{engine.url}/{behavior}/v1"
        timeout = 1 if behavior == "trickle" else 60
        config = APIServerConfig(base_url=url, model_name="m", api_key=KEY, timeout=timeout)
        server = of_kind(config)
        server.max_backoff_s = 0.01
        made.append(server)
        return server

    yield make
    for server in made:
        await server.close()


async def chat(server: OpenAICompatibleServer) -> None:
    await server.chat_completion(messages=MESSAGES)


async def tokens(server: OpenAICompatibleServer) -> None:
    await server.tokens_and_logprobs_completion(input_ids=[1], max_tokens=4)


EVERY_ROUTE = [
    (OpenAIServer, chat),
    (VLLMServer, tokens),
    (SGLangServer, tokens),
    (TrlVllmServer, chat),
]


@pytest.mark.parametrize("behavior", ["plain", "gzip"])
@pytest.mark.parametrize(("kind", "ask"), EVERY_ROUTE)
async def test_answer_without_end_is_given_up_at_the_limit(
    engine, make_server, monkeypatch, kind, ask, behavior
) -> None:
    monkeypatch.setattr(engine_http, "MAX_ANSWER_BYTES", LIMIT)
    server = make_server(kind, behavior)

    with pytest.raises(RetriesExhaustedError, match=f"longer than {LIMIT} bytes") as caught:
        await ask(server)

    assert f"{engine.url}/{behavior}" in str(caught.value)


@pytest.mark.parametrize(("kind", "ask"), EVERY_ROUTE)
async def test_error_response_without_end_keeps_its_status(make_server, kind, ask) -> None:
    with pytest.raises(RetriesExhaustedError, match="500"):
        await ask(make_server(kind, "error"))


@pytest.mark.parametrize(("kind", "ask"), EVERY_ROUTE)
async def test_answer_that_trickles_ends_with_the_timeout(
    make_server, monkeypatch, kind, ask
) -> None:
    monkeypatch.setattr(retry, "_COMPLETION_MARGIN_S", 0.1)
    with pytest.raises(RetriesExhaustedError, match="Timeout"):
        await asyncio.wait_for(ask(make_server(kind, "trickle")), timeout=60)


@pytest.mark.parametrize(("kind", "ask"), EVERY_ROUTE)
async def test_key_that_an_engine_repeats_is_not_in_the_error(make_server, kind, ask) -> None:
    with pytest.raises(RetriesExhaustedError) as caught:
        await ask(make_server(kind, "repeats"))

    assert "headers: Bearer ***" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert KEY not in str(caught.value.__cause__)


LONG_NUMBER = b"9" * 5000
OF_SGLANG = b'[{"output_ids": %b, "meta_info": {"output_token_logprobs": [[%b, 1]], %b}}]'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (VLLMServer, b"[" * 100_000 + b"]" * 100_000),
        (VLLMServer, b'{"choices": ' + LONG_NUMBER + b"}"),
        (VLLMServer, b'{"choices": "\xff"}'),
        (SGLangServer, OF_SGLANG % (b"7", b"-0.1", b'"finish_reason": null')),
        (SGLangServer, OF_SGLANG % (b"[1]", b"-0.1", b'"finish_reason": []')),
        (SGLangServer, OF_SGLANG % (b"[1]", b"9" * 400, b'"finish_reason": null')),
    ],
    ids=["nested", "long number", "not Unicode", "ids", "reason", "logprob"],
)
async def test_malformed_answer_is_retried_and_named_with_the_address(
    engine, make_server, kind, body
) -> None:
    engine.body = body

    with pytest.raises(RetriesExhaustedError, match="the engine's answer") as caught:
        await tokens(make_server(kind, "malformed"))

    assert f"{engine.url}/malformed" in str(caught.value)


CUT_CHARACTER = b"""{"choices": [{"index": 0, "finish_reason": "length", "text": "a\\ud83d",
    "message": {"role": "assistant", "content": "\\ud83d\\ude00\\ud83d",
    "reasoning_content": "\\ude00", "tool_calls": [{"id": "1", "type": "function", "function":
        {"name": "f\\ud83d", "arguments": "{\\ud83d}"}}]}}]}"""


async def test_text_that_is_cut_within_a_character_can_be_encoded(engine, make_server) -> None:
    engine.body = CUT_CHARACTER
    server = make_server(OpenAIServer, "malformed")

    [choice] = (await server.chat_completion(messages=MESSAGES)).choices
    [text] = (await server.completion(prompt="a")).choices

    assert text.text == "a\ufffd"
    assert choice.message.content == "\U0001f600\ufffd"
    assert choice.message.reasoning_content == "\ufffd"
    function = choice.message.tool_calls[0].function
    assert (function.name, function.arguments) == ("f\ufffd", "{\ufffd}")


def test_placeholder_key_leaves_other_texts_unchanged() -> None:
    assert retry.without_key("expected an index", "x") == "expected an index"
    assert retry.without_key(f"the key {KEY}", KEY) == "the key ***"

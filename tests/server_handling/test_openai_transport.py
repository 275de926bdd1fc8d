"""The OpenAI client over our transport: what it does with its own, it does here."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping

import openai
import pytest
from aiohttp import web

from atroposlib.envs.server_handling.engine_http import EngineHttp, make_http_client

pytestmark = pytest.mark.slow

CHAT = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "réponse " * 200},
        }
    ],
}
MESSAGES = [{"role": "user", "content": "hi"}]


class Provider:
    """A small chat server that compresses, streams, refuses or hangs."""

    def __init__(self) -> None:
        self.headers: list[Mapping[str, str]] = []
        self.may_end = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        body = await request.json()
        if body["model"] == "slow":
            await self.may_end.wait()
        if body["model"] == "refused":
            return web.json_response({"error": {"message": "no such thing"}}, status=422)
        if body.get("stream"):
            return await self._stream(request)
        response = web.json_response(CHAT)
        response.enable_compression()
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(2):
            choice = {"index": 0, "delta": {"content": str(number)}, "finish_reason": None}
            chunk = {**CHAT, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if number == 0:
                await self.may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def provider() -> AsyncIterator[tuple[Provider, openai.AsyncClient]]:
    provider = Provider()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", provider.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = openai.AsyncClient(
        api_key="x", base_url=url, max_retries=0, http_client=make_http_client(url)
    )
    yield provider, client
    provider.may_end.set()
    await client.close()
    await runner.cleanup()


async def test_compressed_answer_and_headers_are_as_ever(
    provider: tuple[Provider, openai.AsyncClient],
) -> None:
    server, client = provider

    chat = await client.chat.completions.create(
        model="m", messages=MESSAGES, extra_headers={"X-Mine": "1"}
    )

    assert chat.choices[0].message.content == "réponse " * 200
    assert server.headers[0]["Authorization"] == "Bearer x"
    assert server.headers[0]["X-Mine"] == "1"


async def test_stream_arrives_piece_by_piece(
    provider: tuple[Provider, openai.AsyncClient],
) -> None:
    server, client = provider

    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    first = await asyncio.wait_for(anext(stream), timeout=60)
    server.may_end.set()
    rest = [chunk.choices[0].delta.content async for chunk in stream]

    assert (first.choices[0].delta.content, rest) == ("0", ["1"])


async def test_refusal_keeps_its_type_and_text(
    provider: tuple[Provider, openai.AsyncClient],
) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="no such thing"):
        await provider[1].chat.completions.create(model="refused", messages=MESSAGES)


async def test_hang_is_a_timeout_and_nobody_there_a_connection_error(
    provider: tuple[Provider, openai.AsyncClient], free_port: int
) -> None:
    _, client = provider

    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="slow", messages=MESSAGES, timeout=0.05)
    elsewhere = client.with_options(base_url=f"http://127.0.0.1:{free_port}/v1")
    with pytest.raises(openai.APIConnectionError):
        await elsewhere.chat.completions.create(model="m", messages=MESSAGES)


async def test_hundreds_of_requests_share_the_client(
    provider: tuple[Provider, openai.AsyncClient],
) -> None:
    create = provider[1].chat.completions.create

    chats = await asyncio.gather(*(create(model="m", messages=MESSAGES) for _ in range(200)))

    assert all(chat.choices for chat in chats)


def test_providers_on_the_internet_keep_the_clients_own_transport() -> None:
    assert make_http_client("https://api.example/v1") is None
    assert make_http_client("") is None


def test_connections_that_nobody_closes_end_with_their_loop() -> None:
    complaints: list[str] = []

    async def main() -> EngineHttp:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
        runner = web.AppRunner(web.Application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        http = EngineHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", api_key=None, timeout_s=60)
        assert await http.answers()
        await runner.cleanup()
        return http

    http = asyncio.run(main())
    del http
    gc.collect()

    assert complaints == []

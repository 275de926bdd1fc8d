"""Requests to servers: answers that lead elsewhere, or have another form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atroposlib.adapters.nemo_gym import NemoGymAdapter, NemoGymArgs, NemoSession
from atroposlib.adapters.remote import HttpAnswer, HttpSession, numbers_of, split_names
from atroposlib.adapters.tool_episode import MAX_DEPTH, why_not_sent
from atroposlib.envs.conversation import Turn
from atroposlib.envs.tools import ToolCall
from atroposlib.errors import ConfigError, EpisodeFailedError


@contextlib.asynccontextmanager
async def asking(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[HttpSession]:
    """Open a session with a server that answers every request in the same way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    session = HttpSession(f"http://{host}:{port}", headers={}, timeout_s=10)
    try:
        yield session
    finally:
        await session.close()
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirection_is_not_followed(status: int) -> None:
    paths = []

    async def redirect(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=status, headers={"Location": "/internal"})

    async with asking(redirect) as session:
        answer = await session.post("/verify", {})
        with pytest.raises(EpisodeFailedError, match="redirects to /internal, which is not"):
            answer.json()

    assert paths == ["/verify"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_answer_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(EpisodeFailedError, match="expected JSON"):
        HttpAnswer(200, text, "GET /x").json()


def test_numbers_that_are_not_finite_are_left_out() -> None:
    values = {"a": 1, "b": 10**400, "c": float("nan"), "d": -float("inf"), "e": "1", "f": True}

    assert numbers_of(values) == {"a": 1.0, "f": 1.0}


@pytest.mark.parametrize(
    "text", ["null", "{}", '["train"]', '[{"title": "train"}]', '[{"name": 1}]']
)
def test_splits_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GET /splits: expected a list of objects"):
        split_names(HttpAnswer(200, text, "GET /splits"))

    assert split_names(HttpAnswer(200, '[{"name": "train"}]', "GET /splits")) == ["train"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (r'{"a": "\ud83d\ude00", "b": [1, null, {"c": 2.5}]}', None),
        (r'{"a": [{"b": "\ud83d"}]}', "half of a surrogate pair"),
        (r'{"a": {"\ude00": 1}}', "half of a surrogate pair"),
        ('{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}", None),
        ('{"a": ' + "[" * 400 + "]" * 400 + "}", f"up to {MAX_DEPTH} lists and objects"),
    ],
)
def test_arguments_that_clients_cannot_send_are_named(text: str, problem: str | None) -> None:
    found = why_not_sent(json.loads(text))

    assert found is None if problem is None else problem in str(found)


def test_nemo_call_with_half_of_a_surrogate_pair_can_be_verified() -> None:
    adapter: Any = None  # not asked
    session = NemoSession(adapter, {"responses_create_params": {}})
    arguments = {"text": "\ud800", "city": "Z\u00fcrich"}

    session.note_call(ToolCall(name="look\ud800", arguments=arguments))

    [item] = session.output
    assert json.loads(item["arguments"]) == arguments
    assert "Z\u00fcrich" in item["arguments"]
    assert (item["arguments"] + item["name"]).encode()


async def test_nemo_arguments_that_an_mcp_server_refuses_are_a_result(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/openapi.json":
            return web.json_response({"paths": {"/seed_session": {}, "/verify": {}}})
        if request.path == "/seed_session":
            return web.json_response({"mcp": {"url_path": "/mcp"}})
        if (await request.json())["method"] == "tools/list":
            return web.json_response({"result": {"tools": [{"name": "look"}]}})
        return web.json_response({"error": {"code": -32602, "message": "city is missing"}})

    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"responses_create_params": {"input": "go"}}))
    async with asking(answer) as session:
        adapter = NemoGymAdapter(session._url, NemoGymArgs(tasks=tasks), seed=1)
        await adapter.open()
        episode = adapter.start(await adapter.item(0))
        await episode.begin()

        text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        reply = await episode.reply(Turn(text, 0, []))

        await episode.close()
        await adapter.close()

    assert '"error": "city is missing"' in reply.chat_messages()[0]["content"]
    assert not reply.is_done

"""Requests to servers: answers that lead elsewhere, or have another form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atroposlib.adapters.nemo_gym import (
    NemoGymAdapter,
    NemoGymArgs,
    NemoSession,
    opening_messages,
)
from atroposlib.adapters.remote import (
    HttpAnswer,
    HttpSession,
    is_refusing,
    numbers_of,
    split_names,
)
from atroposlib.adapters.tool_episode import MAX_DEPTH, tool_of, why_not_sent
from atroposlib.envs.conversation import Reply, Turn
from atroposlib.envs.tools import ToolCall
from atroposlib.errors import ConfigError, EpisodeFailedError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def asking(
    answer: Answer,
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


@pytest.mark.parametrize(("num_busy", "status"), [(2, 200), (9, 429)])
async def test_request_to_a_busy_server_is_repeated(
    num_busy: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.remote.BUSY_WAITS_S", (0.0, 0.0, 0.0))
    bodies = []

    async def busy(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=429 if len(bodies) <= num_busy else 200)

    async with asking(busy) as session:
        answer = await session.post("/verify", {"reward": 1})

    assert answer.status == status
    assert bodies == [{"reward": 1}] * min(num_busy + 1, 4)


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


def test_nemo_calls_and_results_of_one_turn_are_one_message() -> None:
    calls = [
        {"type": "function_call", "name": name, "arguments": "{}", "call_id": name}
        for name in ("look", "count")
    ]
    results = [
        {"type": "function_call_output", "output": output, "call_id": "x"} for output in ("a", "b")
    ]
    entries = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I look."}]

    messages = opening_messages({"input": [*entries, *calls, *results, entries[0]]}, "row 1")

    assert [(m["role"], m["content"].count("<tool_")) for m in messages] == [
        ("user", 0), ("assistant", 2), ("user", 2), ("user", 0)
    ]  # fmt: skip
    assert messages[1]["content"].startswith("I look.\n<tool_call>\n")


def test_nemo_call_with_half_of_a_surrogate_pair_can_be_verified() -> None:
    adapter: Any = None  # not asked
    session = NemoSession(adapter, {"responses_create_params": {}})
    arguments = {"text": "\ud800", "city": "Z\u00fcrich"}

    session.note_call(ToolCall(name="look\ud800", arguments=arguments))

    [item] = session.output
    assert json.loads(item["arguments"]) == arguments
    assert "Z\u00fcrich" in item["arguments"]
    assert (item["arguments"] + item["name"]).encode()


NEMO_ROUTES = {"paths": {"/seed_session": {}, "/verify": {}}}
NEMO_ROW = json.dumps({"responses_create_params": {"input": "go"}})


async def described(request: web.Request) -> web.Response:
    return web.json_response(NEMO_ROUTES)


async def test_nemo_row_that_is_no_task_is_named_before_training(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(f'{NEMO_ROW}\n{{"prompt": "go"}}\n')
    async with asking(described) as session:
        adapter = NemoGymAdapter(session._url, NemoGymArgs(tasks=tasks), seed=1)

        with pytest.raises(ConfigError, match="row 2: expected a JSON object with"):
            await adapter.open()
        await adapter.close()


async def test_nemo_row_that_is_no_task_after_those_checked_fails_its_item_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.nemo_gym.ROWS_CHECKED", 1)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(f"{NEMO_ROW}\nnot JSON\n")
    async with asking(described) as session:
        adapter = NemoGymAdapter(session._url, NemoGymArgs(tasks=tasks), seed=1)
        await adapter.open()
        results = await asyncio.gather(adapter.item(0), adapter.item(1), return_exceptions=True)
        await adapter.close()

    assert json.loads(NEMO_ROW) in results
    assert [str(each) for each in results if isinstance(each, EpisodeFailedError)] == [
        f"tasks {tasks}, row 2: not JSON: Expecting value: line 1 column 1 (char 0)"
    ]


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a name with two addresses, as localhost has where IPv6 is on."""
    known = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = ["127.0.0.1", "127.0.0.2"] if host == "two.test" else [host]
        return [info for each in hosts for info in known(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return "two.test"


async def test_nemo_outage_of_a_server_with_two_addresses_is_noticed(
    two_addresses: str, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.nemo_gym.WATCH_S", 0.01)
    url = f"http://{two_addresses}:{free_port}"
    adapter = NemoGymAdapter(url, NemoGymArgs(tasks=tmp_path / "tasks.jsonl"), seed=1)
    watching = asyncio.create_task(adapter._watch_server())

    for _ in range(1000):
        if adapter.num_outages:
            break
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait({watching})

    assert adapter.num_outages == 1


async def test_port_is_refused_if_no_address_of_the_host_listens(
    two_addresses: str, free_port: int
) -> None:
    before = await is_refusing(two_addresses, free_port, timeout_s=10)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.2", free_port)
    async with server:
        during = await is_refusing(two_addresses, free_port, timeout_s=10)

    assert (before, during) == (True, False)
    assert await is_refusing("no-such-host.invalid", free_port, timeout_s=10) is None


async def reply_to_look(answer: Answer, folder: Path) -> Reply:
    """Return the reply of a NeMo Gym server to a call of its tool `look`."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text(NEMO_ROW)
    async with asking(answer) as session:
        adapter = NemoGymAdapter(session._url, NemoGymArgs(tasks=tasks), seed=1)
        await adapter.open()
        episode = adapter.start(await adapter.item(0))
        await episode.begin()

        call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        reply = await episode.reply(Turn(call, 0, []))

        await episode.close()
        await adapter.close()
    return reply


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "image", "data": "AA"}]}, "[image]"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "audio"}]}, "a\\n[audio]"),
        ({"content": [], "structuredContent": {"x": 1}}, '{\\"x\\": 1}'),
        ({"content": None}, ""),
    ],
)
async def test_nemo_result_that_is_not_text_is_named(
    tmp_path: Path, result: dict[str, Any], text: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/openapi.json":
            return await described(request)
        if request.path == "/seed_session":
            return web.json_response({"mcp": {"url_path": "/mcp"}})
        is_list = (await request.json())["method"] == "tools/list"
        return web.json_response({"result": {"tools": [{"name": "look"}]} if is_list else result})

    reply = await reply_to_look(answer, tmp_path)

    assert f'"content": "{text}"' in reply.chat_messages()[0]["content"]


@pytest.mark.parametrize("tool", [{"description": "x"}, "look", {"name": "a", "parameters": [1]}])
def test_tool_of_another_form_is_named(tool: Any) -> None:
    with pytest.raises(EpisodeFailedError, match=r"tools/list of x: a tool is .*; expected a name"):
        tool_of(tool, "parameters", "tools/list of x")


async def test_nemo_arguments_that_an_mcp_server_refuses_are_a_result(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/openapi.json":
            return web.json_response({"paths": {"/seed_session": {}, "/verify": {}}})
        if request.path == "/seed_session":
            return web.json_response({"mcp": {"url_path": "/mcp"}})
        if (await request.json())["method"] == "tools/list":
            return web.json_response({"result": {"tools": [{"name": "look"}]}})
        return web.json_response({"error": {"code": -32602, "message": "city is missing"}})

    reply = await reply_to_look(answer, tmp_path)

    assert '"error": "city is missing"' in reply.chat_messages()[0]["content"]
    assert not reply.is_done

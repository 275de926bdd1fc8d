"""The adapter of MCP servers, against the installed SDK and its servers."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from aiohttp import web

pytest.importorskip("mcp.client.client", reason="needs mcp 2")

from atroposlib.adapters.mcp import (
    McpAdapter,
    McpArgs,
    McpSession,
    calls_reward,
    expand,
    is_lost,
)
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeConnectionError
from tests.adapters.playing import adapter_env, roll_out
from tests.adapters.remote_servers import spawn_process
from tests.fakes import ScriptedEngine
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_servers.py")
REPOSITORY = Path(__file__).parents[2]
ROWS = [
    {
        "question": f"What is {n} and {n}?",
        "answer": str(2 * n),
        "expected_calls": [{"name": "add", "arguments": {"a": n, "b": n}}],
    }
    for n in (20, 21, 22)
]
QUESTION = re.compile(r"What is (\d+) and")

NESTED = json.loads("[" * 400 + "]" * 400)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solve(prompt: str) -> str:
    """Call `add` with the numbers of the question, then give its result."""
    found = QUESTION.findall(prompt)
    if not found:
        return "ok"
    if "<tool_response>" not in prompt:
        return call("add", a=int(found[0]), b=int(found[0]))
    result = json.loads(prompt.split("<tool_response>")[1].split("<")[0])
    return f"<answer>{result['content']}</answer>"


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """The folder of the process ids of servers."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


@pytest.fixture
def tasks(tmp_path: Path, make_env: Callable[..., Any]) -> str:
    make_env()  # puts the character tokenizer in place
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


@pytest.fixture
def http_server(pids: Path, free_port: int) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the server on a port that stays the same."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SERVER), str(pids), "--http", str(free_port)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        wait_until(lambda: is_listening(free_port) or started[-1].poll() is not None)
        assert started[-1].poll() is None, "the server ended while it started"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/sessions").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        time.sleep(0.02)


def command(pids: Path, *flags: str) -> str:
    return " ".join([sys.executable, str(SERVER), str(pids), *flags])


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def started(pids: Path) -> list[int]:
    """Return the ids of all servers so far."""
    return [int(file.name) for file in pids.iterdir()]


def running(pids: Path) -> list[int]:
    return [pid for pid in started(pids) if is_running(pid)]


def open_sessions(port: int) -> int:
    """Return the number of sessions on the side of the HTTP server."""
    return int(httpx.get(f"http://127.0.0.1:{port}/sessions").json())


ARGS = {"shuffle_buffer": 0, "eval_every": 0, "score_workers": 0}


async def test_stdio_server_is_called_and_both_parts_are_rewarded(tasks: str, pids: Path) -> None:
    args = {**ARGS, "servers": {"calc": command(pids)}}

    async with adapter_env(f"mcp:{tasks}", args, solve) as env:
        rollouts, group = await roll_out(env)
        assert env.adapter.metrics()["sessions_open"] == 0

    assert [rollout.reward_parts[-1] for rollout in rollouts] == [
        {"answer_text": 1, "calls": 1}
    ] * 2
    assert group["scores"] == [2.0, 2.0]
    assert len(started(pids)) == 3  # one to list the tools, one for each rollout
    assert running(pids) == []


async def test_two_servers_with_equal_names_are_prefixed(
    tasks: str, pids: Path, free_port: int, http_server: Callable[[], Any]
) -> None:
    http_server()
    servers = {"near": command(pids), "far": f"http://127.0.0.1:{free_port}/mcp"}
    replies = iter(["ok", call("near_remember", text="a") + call("far_remember", text="b"), "4"])

    async with adapter_env(
        f"mcp:{tasks}", {**ARGS, "servers": servers}, lambda _: next(replies), group_size=1
    ) as env:
        [rollout], _ = await roll_out(env)

    assert "near_add" in rollout.messages[0]["content"]
    assert rollout.messages[-2]["content"].count('"content"') == 2
    assert open_sessions(free_port) == 0


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_rollouts_have_sessions_of_their_own(
    tasks: str, pids: Path, free_port: int, http_server: Callable[[], Any], kind: str
) -> None:
    http_server()
    server = command(pids) if kind == "stdio" else f"http://127.0.0.1:{free_port}/mcp"
    adapter = make_adapter(f"mcp:{tasks}", {**ARGS, "servers": [server]}, seed=0)
    await adapter.open()
    episodes = [adapter.start(await adapter.item(0)) for _ in range(2)]
    await asyncio.gather(*(episode.begin() for episode in episodes))

    seen = [
        (await episode.call_tool("remember", {"text": text})).text
        for text in "ab"
        for episode in episodes
    ]

    assert seen == ["a", "a", "a b", "a b"]
    await asyncio.gather(*(episode.close() for episode in episodes))
    await adapter.close()


@pytest.mark.long
async def test_programs_start_in_turn_and_the_wait_is_not_a_step_that_takes_too_long(
    tasks: str, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.mcp.NUM_STARTERS", 1)
    slow = {"command": "sh", "args": ["-c", f"sleep 1.5; exec {command(pids)}"]}
    args = {**ARGS, "servers": {"one": slow}, "connect_timeout_s": 60}

    async with adapter_env(
        f"mcp:{tasks}",
        args,
        lambda _: "<answer>40</answer>",
        group_size=4,
        step_timeout_s=4,
        episode_retries=0,
    ) as env:
        opening = most = 0
        open_session = McpSession.open

        async def counted(session: McpSession) -> None:
            nonlocal opening, most
            opening += 1
            most = max(most, opening)
            try:
                await open_session(session)
            finally:
                opening -= 1

        monkeypatch.setattr(McpSession, "open", counted)
        await roll_out(env)

    assert most == 1
    assert len(started(pids)) == 1 + 4  # one to list the tools, one for each rollout


async def test_shared_session_is_opened_once(tasks: str, pids: Path) -> None:
    args = {**ARGS, "servers": [command(pids)], "sessions": "shared"}

    async with adapter_env(f"mcp:{tasks}", args, solve, group_size=3) as env:
        await roll_out(env)
        await roll_out(env)
        assert env.adapter.metrics()["sessions_open"] == 1

    assert len(started(pids)) == 2
    assert running(pids) == []


@pytest.mark.parametrize(
    ("written", "shown", "limit_s"),
    [
        (call("fail"), "Error executing tool fail", 30),
        (call("add", a="x"), "validation error", 30),
        (call("sub", a=1), "there is no tool 'sub'", 30),
        (call("hang"), "gave no answer within 0.5 s", 0.5),
        (call("long_text", length=500), "[400 more characters]", 30),
        (call("remember", text="\ud800"), "half of a surrogate pair", 30),
        (call("remember", text=NESTED), "up to 64 lists and objects", 30),
    ],
)
async def test_error_of_a_tool_is_a_result(
    tasks: str, pids: Path, written: str, shown: str, limit_s: float
) -> None:
    args = {
        **ARGS, "servers": [command(pids)], "tool_timeout_s": limit_s, "max_result_characters": 100,
    }  # fmt: skip
    replies = iter(["ok", written, "<answer>40</answer>"])

    async with adapter_env(f"mcp:{tasks}", args, lambda _: next(replies), group_size=1) as env:
        [rollout], _ = await roll_out(env)

    assert shown in rollout.messages[-2]["content"]
    assert rollout.reward_parts[-1] == {"answer_text": 1.0, "calls": 0.0}


SCRIPTED_SERVER = """
import json, sys
pages, calls = json.loads(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    params = request.get("params") or {}
    if "id" not in request:
        continue
    if request["method"] == "initialize":
        answer = {"result": {"protocolVersion": params["protocolVersion"],
                             "capabilities": {"tools": {}},
                             "serverInfo": {"name": "scripted", "version": "0"}}}
    elif request["method"] == "tools/list":
        answer = pages[params.get("cursor") or ""]
    elif request["method"] == "tools/call":
        answer = calls[params["name"]]
    else:
        answer = {"error": {"code": -32601, "message": "Method not found"}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
"""


def scripted(pages: dict[str, Any], calls: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server that answers with pages of tools by cursor, and to calls by name."""
    script = json.dumps([pages, calls or {}])
    return {"scripted": {"command": sys.executable, "args": ["-c", SCRIPTED_SERVER, script]}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


def page(*tools: dict[str, Any], following: str | None = None) -> dict[str, Any]:
    rest = {} if following is None else {"nextCursor": following}
    return {"result": {"tools": list(tools), **rest}}


NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WRONG_RESULT = {"content": [{"type": "text", "text": "3"}], "structuredContent": {"x": "three"}}


@pytest.mark.parametrize("sessions", ["per_rollout", "shared"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"code": -32002, "message": "no such record"}}, "no such record"),
        ({"error": {"code": -32601, "message": "unknown tool"}}, "unknown tool"),
        ({"error": {"code": -32000, "message": "quota used up"}}, "quota used up"),
        ({"result": WRONG_RESULT}, "'three' is not of type 'integer'"),
        ({"result": {"content": [{"type": "hologram"}]}}, "validation errors for CallToolResult"),
    ],
)
async def test_answer_that_is_an_error_or_does_not_fit_is_a_result(
    tasks: str, answer: dict[str, Any], message: str, sessions: str
) -> None:
    servers = scripted({"": page(tool("odd", outputSchema=NUMBER))}, {"odd": answer})
    args = {**ARGS, "servers": servers, "sessions": sessions, "connect_attempts": 1}
    adapter = make_adapter(f"mcp:{tasks}", args, seed=0)
    await adapter.open()
    episode = cast(Any, adapter.start(await adapter.item(0)))

    await episode.begin()
    replies = [await episode.reply(Turn(call("odd"), index, ())) for index in range(2)]
    await episode.close()
    await adapter.close()

    for reply in replies:
        assert message in reply.messages
        assert not reply.is_done
    assert episode.num_failed_calls == 2
    assert adapter.metrics()["failed_connections"] == 0


def test_error_of_an_unknown_session_is_a_loss_over_http_only() -> None:
    codes = [-32000, -32001, -32600, -32700]

    assert [is_lost(code, "unknown session", is_program=False) for code in codes] == [True] * 4
    assert [is_lost(code, "unknown session", is_program=True) for code in codes] == [False] * 4
    assert is_lost(-32000, "Connection closed", is_program=True)
    assert not is_lost(-32002, "no such record", is_program=False)


async def test_tools_of_late_pages_can_be_selected(tasks: str) -> None:
    pages = {
        "": page(*(tool(f"a{i}") for i in range(600)), following="2"),
        "2": page(tool("late")),
    }
    args = {**ARGS, "servers": scripted(pages), "tools": ["late"]}
    adapter = cast(McpAdapter, make_adapter(f"mcp:{tasks}", args, seed=0))

    await adapter.open()
    await adapter.close()

    assert [each.name for each in adapter.tools] == ["late"]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (
            {"": page(tool("a"), following="x"), "x": page(tool("b"), following="x")},
            "scripted: its list of tools has no end: after 2 tools it continues at 'x'",
        ),
        ({"": page(tool("a"), tool("a"))}, "scripted lists the tool 'a' twice"),
        ({"": page({"name": "a"})}, "scripted: its tools cannot be listed: .*inputSchema"),
        (
            {"": {"error": {"code": -32603, "message": "no database"}}},
            "scripted: its tools cannot be listed: no database",
        ),
        (
            {"": {"error": {"code": -32601, "message": "Method not found"}}},
            "scripted: its tools cannot be listed: Method not found",
        ),
    ],
)
async def test_tools_that_cannot_be_listed_are_named_with_their_server(
    tasks: str, pages: dict[str, Any], message: str
) -> None:
    args = {**ARGS, "servers": scripted(pages), "connect_attempts": 1}
    adapter = make_adapter(f"mcp:{tasks}", args, seed=0)

    with pytest.raises(ConfigError, match=f"(?s){message}"):
        await adapter.open()
    await adapter.close()


async def test_late_calls_of_one_turn_may_take_longer_than_a_step(tasks: str, pids: Path) -> None:
    args = {**ARGS, "servers": [command(pids)], "tool_timeout_s": 1}
    replies = iter(["ok", 3 * call("hang"), "<answer>40</answer>"])

    async with adapter_env(
        f"mcp:{tasks}",
        args,
        lambda _: next(replies),
        group_size=1,
        step_timeout_s=2,
        episode_retries=0,
    ) as env:
        [rollout], _ = await roll_out(env)

    assert rollout.messages[-2]["content"].count("gave no answer within 1 s") == 3


@pytest.mark.parametrize("sessions", ["per_rollout", "shared"])
async def test_crash_of_a_server_fails_its_rollout_which_is_repeated(
    tasks: str, pids: Path, sessions: str
) -> None:
    replies = iter(["ok", call("crash"), "<answer>40</answer>"])
    args = {**ARGS, "servers": [command(pids)], "sessions": sessions}

    async with adapter_env(f"mcp:{tasks}", args, lambda _: next(replies), group_size=1) as env:
        [rollout], _ = await roll_out(env)

    assert rollout.reward_parts[-1]["answer_text"] == 1.0
    assert running(pids) == []


async def test_http_server_that_disappears_and_returns_is_reached_again(
    tasks: str, free_port: int, http_server: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first = http_server()
    args = {**ARGS, "servers": [f"http://127.0.0.1:{free_port}/mcp"], "connect_attempts": 2}
    adapter = make_adapter(f"mcp:{tasks}", args, seed=0)
    await adapter.open()
    episode = adapter.start(await adapter.item(0))
    await episode.begin()
    first.kill()
    first.wait()

    with pytest.raises(EpisodeConnectionError, match="server_1 is lost"):
        await episode.call_tool("add", {"a": 1, "b": 2})
    await episode.close()
    lost = adapter.start(await adapter.item(1))
    with pytest.raises(EpisodeConnectionError, match="2 attempts"):
        await lost.begin()
    await lost.close()
    http_server()
    again = adapter.start(await adapter.item(2))
    await again.begin()
    assert (await again.call_tool("add", {"a": 1, "b": 2})).text == "3"
    await again.close()
    assert adapter.metrics()["sessions_open"] == 0
    await adapter.close()


async def test_cancelled_rollout_ends_its_sessions(tasks: str, pids: Path) -> None:
    def policy(prompt: str) -> str:
        return call("hang") if QUESTION.search(prompt) else "ok"

    async with adapter_env(f"mcp:{tasks}", {**ARGS, "servers": [command(pids)]}, policy) as env:
        item = await env.get_next_item()
        rolling = asyncio.create_task(env.collect_trajectories(item))
        await asyncio.to_thread(wait_until, lambda: len(running(pids)) == 2)
        rolling.cancel()
        await asyncio.wait({rolling})
        await asyncio.to_thread(wait_until, lambda: running(pids) == [])
        assert env.adapter.metrics()["sessions_open"] == 0


async def test_server_that_ignores_the_end_of_stdin_is_terminated(tasks: str, pids: Path) -> None:
    async with adapter_env(
        f"mcp:{tasks}", {**ARGS, "servers": [command(pids, "--deaf")]}, solve, group_size=1
    ) as env:
        await roll_out(env)

    assert running(pids) == []


KILLED = """
import asyncio, sys
from atroposlib.adapters.registry import make_adapter

async def main():
    args = {"servers": [sys.argv[2]], "score_workers": 0, "eval_every": 0}
    adapter = make_adapter(f"mcp:{sys.argv[1]}", args, seed=0)
    await adapter.open()
    for index in range(3):
        await adapter.start(await adapter.item(index)).begin()
    print("begun", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl of Linux")
def test_killed_process_leaves_no_server(tasks: str, pids: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tasks, command(pids, "--deaf")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    assert len(running(pids)) == 3

    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    wait_until(lambda: running(pids) == [])


def test_killed_process_leaves_no_session(
    tasks: str, free_port: int, http_server: Callable[[], Any]
) -> None:
    http_server()
    url = f"http://127.0.0.1:{free_port}/mcp"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tasks, url],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    assert open_sessions(free_port) == 3

    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    wait_until(lambda: open_sessions(free_port) == 0)


@pytest.mark.long
async def test_kill_of_the_command_leaves_no_session(
    tasks: str, tmp_path: Path, free_port: int, http_server: Callable[[], Any]
) -> None:
    http_server()
    servers = [f"http://127.0.0.1:{free_port}/mcp"]
    args = {"servers": servers, "eval_every": 0, "max_sessions": 2}
    model = FOLDER / "qwen2_5"
    second_turns: list[str] = []

    def policy(prompt: str) -> str:
        if prompt.count("<tool_response>") == 1:
            second_turns.append(prompt)
        return call("add", a=1, b=2)

    tokenizer = load_tokenizer("qwen2_5")
    async with ScriptedEngine(policy, tokenizer=tokenizer, model=str(model), delay_s=1.0) as engine:
        process = spawn_process(f"mcp:{tasks}", args, engine, model, tmp_path)
        try:
            # The id of a session is known once its first request has been answered.
            await asyncio.to_thread(wait_until, lambda: len(second_turns) >= 2)
            assert open_sessions(free_port) == 2
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)

        await asyncio.to_thread(wait_until, lambda: open_sessions(free_port) == 0)


async def test_session_is_ended_with_the_headers_of_its_requests(
    monkeypatch: pytest.MonkeyPatch, tasks: str, free_port: int, http_server: Callable[[], Any]
) -> None:
    http_server()
    monkeypatch.setenv("KEY", "k")
    url = f"http://127.0.0.1:{free_port}/mcp"
    spec = {"url": url, "headers": {"X-Key": "${KEY}"}}
    adapter: Any = make_adapter(f"mcp:{tasks}", {**ARGS, "servers": [spec]}, seed=0)
    noted: list[Any] = []
    ended: list[str] = []
    monkeypatch.setattr(adapter._guard, "opened", lambda *of: noted.append(of))
    monkeypatch.setattr(adapter._guard, "ended", ended.append)
    await adapter.open()
    await adapter.close()

    key, [request] = noted[-1]
    assert ended == [key]
    assert request[:2] == ("DELETE", url)
    assert request.headers.pop("mcp-session-id")
    assert request.headers == {"x-key": "k", "mcp-protocol-version": "2025-11-25"}


async def test_stderr_of_a_server_is_not_kept(
    tasks: str, pids: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(f"mcp:{tasks}", {**ARGS, "servers": [command(pids, "--noisy")]}, seed=0)
    await adapter.open()
    episode = adapter.start(await adapter.item(0))
    await episode.begin()

    with pytest.raises(EpisodeConnectionError, match="its stderr ends: the last line"):
        await episode.call_tool("crash", {})

    await episode.close()
    await adapter.close()
    assert "xxx" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({}, "expected at least one MCP server"),
        ({"a": "no-such-program-here"}, "no program 'no-such-program-here'"),
        ({"a": {"command": "x", "url": "http://x"}}, "a command or a url"),
        ({"a": {"command": sys.executable, "env": {"KEY": "${NO_SUCH_VARIABLE}"}}}, "NO_SUCH_VAR"),
    ],
)
async def test_wrong_servers_are_named_before_the_first_rollout(
    tasks: str, servers: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await make_adapter(f"mcp:{tasks}", {**ARGS, "servers": servers}, seed=0).open()


OLD_SERVER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request and request["method"] == "initialize":
        result = {"protocolVersion": "1999-01-01", "capabilities": {},
                  "serverInfo": {"name": "old", "version": "0"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
    elif "id" in request:
        error = {"code": -32601, "message": "unknown"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
"""


async def test_protocol_version_that_does_not_fit_is_said_first(tasks: str) -> None:
    servers = {"old": {"command": sys.executable, "args": ["-c", OLD_SERVER]}}
    adapter = make_adapter(f"mcp:{tasks}", {**ARGS, "servers": servers}, seed=0)

    with pytest.raises(ConfigError, match=r"old: the protocol does not fit.*1999-01-01"):
        await adapter.open()
    await adapter.close()


async def test_server_that_ends_at_once_is_named_with_its_stderr(tasks: str) -> None:
    servers = {"broken": {"command": sys.executable, "args": ["-c", "import no_such_module"]}}
    adapter = make_adapter(
        f"mcp:{tasks}", {**ARGS, "servers": servers, "connect_attempts": 1}, seed=0
    )

    with pytest.raises(EpisodeConnectionError, match="no_such_module"):
        await adapter.open()
    await adapter.close()


async def test_calls_of_a_parquet_file_have_no_arguments_of_other_rows(
    tmp_path: Path, pids: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    calls = [
        [{"name": "add", "arguments": {"a": 1, "b": {"c": [{"d": 2}, {"e": 3}]}}}],
        [{"name": "long_text", "arguments": {"length": 3, "b": {"f": 1}}}],
    ]
    rows = [{"question": f"q{i}", "expected_calls": each} for i, each in enumerate(calls)]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)
    await adapter.open()

    items = [await adapter.item(index) for index in range(2)]
    await adapter.close()

    assert [item["row"]["expected_calls"] for item in items] == calls


async def test_expected_calls_that_are_nested_too_deeply_are_rejected(
    tmp_path: Path, pids: Path
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "q", "expected_calls": "[" * 100_000}]))
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)

    with pytest.raises(ConfigError, match="expected a list of"):
        await adapter.open()
    await adapter.close()


async def test_row_without_a_reward_is_rejected_before_training(tmp_path: Path, pids: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*ROWS, {"question": "q"}]))
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)

    with pytest.raises(ConfigError, match=r"none of 'answer', 'expected_calls'.*\(row 4\)"):
        await adapter.open()
    await adapter.close()


async def test_row_without_a_reward_after_those_checked_is_skipped(
    tmp_path: Path, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.dataset.ROWS_CHECKED", 1)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROWS[0], {"question": "q"}, ROWS[1]]))
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)
    await adapter.open()

    items = [await adapter.item(index) for index in range(3)]
    await adapter.close()

    assert [item["answer"] for item in items] == ["40", "42", "40"]
    assert adapter.metrics()["rows_skipped"] == 2


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
async def test_reward_functions_of_single_rows_are_read_from_every_format(
    tmp_path: Path, pids: Path, suffix: str
) -> None:
    listed: list[Any] = [
        [{"type": "format", "weight": 2.0, "params": {"preferred_tags": ["think"]}}],
        [{"type": "answer_text"}],
    ]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        rows = [{"question": "q", "answer": "1", "reward_functions": each} for each in listed]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["question", "answer", "reward_functions"])
            writer.writerows(["q", "1", json.dumps(each)] for each in listed)
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)
    await adapter.open()

    items = [await adapter.item(index) for index in range(2)]
    reply = await cast(Any, adapter.start(items[1])).reply(Turn("<answer>1</answer>", 0, ()))
    await adapter.close()

    assert [item["reward_functions"] for item in items] == listed
    assert reply.reward == {"answer_text": 1.0}


async def test_empty_cells_of_a_table_are_values_that_a_row_lacks(
    tmp_path: Path, pids: Path
) -> None:
    path = tmp_path / "rows.csv"
    expected = json.dumps(ROWS[0]["expected_calls"])
    with path.open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["question", "answer", "expected_calls", "reward_functions"])
        writer.writerows([["q", "1", "", ""], ["q", "", expected, ""]])
    adapter = make_adapter(f"mcp:{path}", {**ARGS, "servers": [command(pids)]}, seed=0)
    await adapter.open()

    answered, called = [await adapter.item(index) for index in range(2)]
    replies = [
        await cast(Any, adapter.start(item)).reply(Turn("<answer>1</answer>", 0, ()))
        for item in (answered, called)
    ]
    await adapter.close()

    assert [reply.reward for reply in replies] == [{"answer_text": 1.0}, {"calls": 0.0}]


async def test_status_of_a_server_that_refuses_a_connection_is_shown(tasks: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    app = web.Application()
    app.router.add_route("*", "/mcp", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    servers = {"search": f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"}
    args = {**ARGS, "servers": servers, "connect_attempts": 1}
    adapter = make_adapter(f"mcp:{tasks}", args, seed=0)

    with pytest.raises(EpisodeConnectionError, match=r"search is lost: .* the HTTP status 401"):
        await adapter.open()
    await adapter.close()
    await runner.cleanup()


async def test_unknown_tool_of_many_is_answered_with_some_names(tasks: str) -> None:
    servers = scripted({"": page(*(tool(f"tool_{i}") for i in range(400)))})
    adapter = make_adapter(f"mcp:{tasks}", {**ARGS, "servers": servers}, seed=0)
    await adapter.open()
    episode = cast(Any, adapter.start(await adapter.item(0)))

    await episode.begin()
    reply = await episode.reply(Turn(call("tool_31x"), 0, ()))
    await episode.close()
    await adapter.close()

    assert "no tool 'tool_31x'; did you mean tool_31" in reply.messages
    assert len(reply.messages) < 1000


@pytest.mark.parametrize(
    ("made", "num_calls", "penalizes_extra", "expected"),
    [
        ([("add", {"a": 1, "b": 2})], 1, True, 0.5),
        (
            [("add", {"a": 1}), ("add", {"a": 3, "b": 9})],
            2,
            True,
            1.0,
        ),  # further arguments are fine
        ([("add", {"a": 3}), ("add", {"a": 1}), ("add", {"a": 5})], 4, True, 0.5),  # one failed
        ([("add", {"a": 3}), ("add", {"a": 1}), ("add", {"a": 5})], 4, False, 1.0),
        ([("add", {"a": 1}), ("add", {"a": 1})], 2, True, 0.5),  # a call counts once
        ([], 0, True, 0.0),
    ],
)
def test_calls_reward(
    made: list[Any], num_calls: int, penalizes_extra: bool, expected: float
) -> None:
    wanted = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 3}}]
    written = [{"name": name, "arguments": arguments} for name, arguments in made]

    reward = calls_reward(wanted, written, num_calls=num_calls, penalizes_extra=penalizes_extra)

    assert reward == expected


def test_headers_are_not_shown() -> None:
    args = McpArgs(servers={"a": {"url": "http://x", "headers": {"Authorization": "secret"}}})

    assert "secret" not in repr(args)
    assert expand("Bearer ${KEY}", {"KEY": "k"}, "a") == "Bearer k"


def test_check_command_is_green(
    tasks: str, pids: Path, free_port: int, http_server: Callable[[], Any]
) -> None:
    http_server()
    program = [sys.executable, "-m", "atroposlib.cli.env", f"mcp:{tasks}", "check"]
    url = f"http://127.0.0.1:{free_port}/mcp"

    done = subprocess.run(
        [*program, "--args", f"servers=[{url}]", "eval_every=0", "score_workers=1"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert open_sessions(free_port) == 0

"""The server and the package for verifiers, and verifiers' own evaluation command on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from atroposlib.errors import ConfigError
from atroposlib.serving.verifiers import write_package
from tests.serving.own_environments import Echo
from tests.serving.served import OWN, WORD_SUMS, Served, opened, serving, until_closed

pytestmark = pytest.mark.slow

GUESSING = "environments/number_guessing.py"


async def test_episode_lives_as_long_as_the_response_that_started_it() -> None:
    async with (
        serving("verifiers", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        async with client.stream("POST", "/v1/episodes", json={"index": 4}) as held:
            lines = held.aiter_lines()
            opening = json.loads(await anext(lines))
            answer = await client.post(f"/v1/episodes/{opening['id']}/turns", json={"text": "a"})
            assert served.host.num_open == 1
        await until_closed(served.host)
        late = await client.post(f"/v1/episodes/{opening['id']}/turns", json={"text": "a"})

        assert opening["messages"] == [{"role": "user", "content": "item 4"}]
        assert answer.json()["messages"] == [{"role": "user", "content": "you said a"}]
        assert (answer.json()["reward"], answer.json()["is_done"]) == (0.25, False)
        assert (late.status_code, late.json()["detail"]) == (
            404,
            "there is no such episode, or it is over",
        )


async def test_response_ends_with_its_episode() -> None:
    async with (
        serving("verifiers", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url, timeout=10) as client,
        client.stream("POST", "/v1/episodes", json={"seed": 1}) as held,
    ):
        lines = held.aiter_lines()
        opening = json.loads(await anext(lines))
        turns = f"/v1/episodes/{opening['id']}/turns"
        end = (await client.post(turns, json={"text": "end"})).json()
        rest = [line async for line in lines]

        assert (end["reward"], end["outcome"], rest) == (2.0, "done", [])
        assert end["reward_parts"] == {"won": 1.0, "neat": 0.5}


KILLED = """
import httpx, sys
with httpx.stream("POST", sys.argv[1] + "/v1/episodes", json={}, timeout=None) as held:
    for line in held.iter_lines():
        print("ready", flush=True)
"""


async def test_killed_client_leaves_no_episode() -> None:
    async with serving("verifiers", f"{OWN}:EchoEnv") as served:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, served.url, stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        closed = Echo.closed

        client.send_signal(signal.SIGKILL)
        await client.wait()
        await until_closed(served.host)

        assert Echo.closed == closed + 1


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"index": 10**6}, 400, "out of range"),
        ({"split": "dev"}, 400, "no split"),
        ({"split": "test"}, 400, "no split"),  # this environment has no test items
        ({"split": "test", "seed": 1}, 400, "no split"),
        ({"index": "one"}, 422, "index"),
        ({"task": 1}, 422, "task"),
        ({"index": 13}, 500, "ValueError"),
    ],
)
async def test_wrong_episode_is_refused(body: dict[str, Any], status: int, reason: str) -> None:
    async with (
        serving("verifiers", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        answer = await client.post("/v1/episodes", json=body)

        assert answer.status_code == status
        assert reason in answer.text
        assert "secret" not in answer.text
        assert served.host.num_open == 0


async def test_body_of_unknown_size_over_the_limit_is_refused() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 65_536

    async with (
        serving("verifiers", f"{OWN}:EchoEnv", max_text_chars=10) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/v1/episodes", content=chunks(), headers=headers)

        assert answer.status_code == 413
        assert "at most" in answer.json()["detail"]


@pytest.mark.parametrize("body", ['{"index": NaN}', '{"split": 1, "task": "\\ud800"}'])
async def test_request_that_is_not_valid_json_in_an_answer_is_refused(body: str) -> None:
    async with (
        serving("verifiers", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        answer = await client.post(
            "/v1/episodes", content=body, headers={"Content-Type": "application/json"}
        )

    assert answer.status_code == 422
    assert all("input" not in reason for reason in answer.json()["detail"])


async def test_package_folder_with_other_modules_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("")

    async with opened(f"{OWN}:EchoEnv", offers_tools=False) as host:
        with pytest.raises(ConfigError, match=r"it has mine\.py; choose an empty folder"):
            write_package(tmp_path, host, "http://127.0.0.1:1")

    assert not (tmp_path / "pyproject.toml").exists()


def bisecting(prompt: dict[str, Any]) -> dict[str, str]:
    """Return the best guess of a chat, or the answer of a sum."""
    chat = [str(message["content"]) for message in prompt["messages"]]
    low, high, last = 1, 100, 0
    for text in chat:
        guess = re.search(r"<guess>(\d+)", text)
        last = int(guess[1]) if guess else last
        low = last + 1 if text == "higher" else low
        high = last - 1 if text == "lower" else high
    return {"role": "assistant", "content": f"<guess>{(low + high) // 2}</guess>"}


def calculating(prompt: dict[str, Any]) -> dict[str, str]:
    """Call the calculator once, then give the right answer."""
    chat = [str(message["content"]) for message in prompt["messages"]]
    question = next(text for text in chat if text.startswith("A depot"))
    boxes, parts, loose = map(int, re.findall(r"\d+", question))
    if "<tool_response>" not in chat[-1]:
        call = {"name": "multiply", "arguments": {"a": boxes, "b": parts}}
        return {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"}
    product = int(json.loads(chat[-1].split("\n")[1])["content"])
    return {"role": "assistant", "content": f"<answer>{product + loose}</answer>"}


@contextlib.asynccontextmanager
async def model(reply: Callable[[dict[str, Any]], dict[str, str]]) -> AsyncIterator[str]:
    """Serve a model that answers chats in a stream, as the chat program of verifiers asks."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        base = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for delta, reason in ((reply(body), None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            event = json.dumps({**base, "choices": [choice]})
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def evaluate(served: Served, model_url: str, folder: Path) -> list[dict[str, Any]]:
    """Run `vf-eval` on the package of a server and return the traces of its rollouts."""
    pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
    if shutil.which("uv") is None:
        pytest.skip("verifiers needs uv for the program of its chat harness")
    name = write_package(folder / "package", served.host, served.url)
    words = [name, "-n", "2", "-m", "m", "-o", str(folder / "out")]
    words += ["--client.base-url", model_url, "--client.api-key-var", "NO_KEY"]
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "vf-eval",
        *words,
        "--no-push",
        "--no-rich",
        cwd=folder,
        env={**os.environ, "NO_KEY": "none", "PYTHONPATH": str(folder / "package")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    return traces_in(folder / "out")


def traces_in(folder: Path) -> list[dict[str, Any]]:
    """Return the traces of an evaluation without failures."""
    [file] = folder.glob("**/traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    traces = [trace for episode in episodes for trace in episode["traces"]]
    failures = [error["message"] for part in (*episodes, *traces) for error in part["errors"]]
    assert not failures, failures[0]
    return traces


async def test_evaluation_command_of_verifiers_plays_our_game(tmp_path: Path) -> None:
    async with (
        model(bisecting) as model_url,
        serving("verifiers", GUESSING) as served,
    ):
        traces = await evaluate(served, model_url, tmp_path)

        assert len(traces) == 2
        for trace in traces:
            num_turns = sum(1 for node in trace["nodes"] if node["sampled"])
            score = trace["rewards"]["atropos_return"]["score"]
            assert score == pytest.approx(2.0 - 0.05 * num_turns)
            assert trace["info"]["outcome"] == "done"
        assert served.host.num_open == 0


async def test_evaluation_command_of_verifiers_runs_our_tools(tmp_path: Path) -> None:
    async with (
        model(calculating) as model_url,
        serving("verifiers", WORD_SUMS) as served,
    ):
        traces = await evaluate(served, model_url, tmp_path)

        assert [trace["rewards"]["atropos_return"]["score"] for trace in traces] == [1.0, 1.0]
        assert all(trace["nodes"][0]["message"]["role"] == "system" for trace in traces)

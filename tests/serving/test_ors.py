"""Our environments as servers of the Open Reward Standard, played by its own client."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

pytest.importorskip("openreward", reason="the extra ors is not installed")

from openreward import AsyncEnvironmentsAPI
from openreward.api.errors import ToolCallError

from tests.serving.own_environments import Echo
from tests.serving.served import OWN, WORD_SUMS, Served, serving, until_closed

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[Any]:
    """Yield the client's environment."""
    no_key = "none"
    async with AsyncEnvironmentsAPI(base_url=served.url, api_key=no_key) as api:
        yield api.get(served.host.name, base_url=served.url)


async def test_client_plays_an_episode_with_tools_to_its_end() -> None:
    async with serving("ors", WORD_SUMS) as served, client_of(served) as env:
        names = [tool.name for tool in await env.list_tools()]
        task = await env.get_task("test", 2)
        async with env.session(task=task) as session:
            [message] = await session.get_messages()
            boxes, parts, loose = map(int, re.findall(r"\d+", message.blocks[0].text))
            product = await session.call_tool("multiply", {"a": boxes, "b": parts})
            faulty = await session.call_tool("multiply", {"a": "x", "b": 1})
            total = int(product.blocks[0].text) + loose
            end = await session.call_tool("submit", {"text": f"<answer>{total}</answer>"})
            with pytest.raises(ToolCallError, match="episode_finished"):
                await session.call_tool("add", {"a": 1, "b": 1})

        assert names == ["add", "multiply", "submit"]
        assert (message.role, product.reward, product.finished) == ("user", 0.0, False)
        assert (faulty.reward, faulty.metadata) == (-0.1, {"is_error": True})
        assert (end.reward, end.finished, end.metadata) == (1.0, True, {"outcome": "done"})
        assert served.host.num_open == 0


async def test_environment_of_several_turns_has_messages() -> None:
    async with serving("ors", f"{OWN}:EchoEnv", num_tasks=5) as served, client_of(served) as env:
        tools = await env.list_tools()
        num_tasks = await env.num_tasks("train")
        async with env.session(task=await env.get_task("train", 4)) as session:
            prompt = await session.get_prompt()
            first = await session.call_tool("message", {"text": "a"})
            last = await session.call_tool("message", {"text": "end"})

        assert ([tool.name for tool in tools], num_tasks) == (["message"], 5)
        assert [block.text for block in prompt] == ["item 4"]
        assert ([block.text for block in first.blocks], first.reward) == (["you said a"], 0.25)
        assert (last.reward, last.finished) == (2.0, True)
        assert last.metadata["reward_parts"] == {"won": 1.0, "neat": 0.5}


async def test_environment_of_one_turn_has_an_answer() -> None:
    async with serving("ors", f"{OWN}:QuestionEnv") as served, client_of(served) as env:
        splits = await env.list_splits()
        tasks = await env.list_tasks("test")
        async with env.session(task=tasks[1]) as session:
            roles = [message.role for message in await session.get_messages()]
            [tool] = await session.list_tools()
            end = await session.call_tool("submit", {"text": "2"})

        assert (splits, len(tasks), roles) == (["train", "test"], 2, ["system", "user"])
        assert tool.input_schema["required"] == ["text"]
        assert (end.reward, end.finished) == (2.0, True)


async def test_task_is_found_also_when_all_items_are_known() -> None:
    async with (
        serving("ors", f"{OWN}:QuestionEnv", num_tasks=9) as served,
        client_of(served) as env,
    ):
        tasks = [await env.get_task("train", 7)]
        async with env.session(task=tasks[0]) as session:
            await session.get_messages()
        tasks.append(await env.get_task("train", 7))

        assert served.host.num_tasks("train") == 3
        assert tasks[0].task_spec == tasks[1].task_spec == {"split": "train", "index": 7}
        with pytest.raises(Exception, match="Invalid index"):
            await env.get_task("train", 9)


async def test_failed_turn_names_its_kind_and_spares_others() -> None:
    async with serving("ors", f"{OWN}:EchoEnv") as served, client_of(served) as env:
        async with (
            env.session(task=await env.get_task("train", 0)) as failing,
            env.session(task=await env.get_task("train", 1)) as other,
        ):
            with pytest.raises(Exception, match=r"failed \(ValueError\)") as error:
                await failing.call_tool("message", {"text": "raise"})
            answer = await other.call_tool("message", {"text": "a"})

        assert "secret" not in str(error.value)
        assert answer.reward == 0.25


async def test_failed_start_is_reported_without_its_traceback() -> None:
    async with (
        serving("ors", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url, headers={"X-Session-ID": "s"}) as client,
    ):
        await client.post("/create", json={"split": "train", "index": 13})
        answer = await client.get("/echo/prompt")

        assert answer.status_code == 500
        assert "ValueError" in answer.text
        assert "secret" not in answer.text
        assert served.host.num_open == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"split": "train", "index": 10**9}, 400),
        ({"split": "dev", "index": 0}, 400),
        ({"split": "train"}, 422),
        ({"split": "train", "index": 0, "toolset_name": "codex"}, 400),
        ({"split": "train", "index": 0, "toolset_name": "backsearch"}, 400),
        (["train", 0], 422),
    ],
)
async def test_wrong_session_is_refused_and_takes_no_place(body: Any, status: int) -> None:
    async with (
        serving("ors", f"{OWN}:EchoEnv", max_sessions=1) as served,
        httpx.AsyncClient(base_url=served.url, headers={"X-Session-ID": "s"}) as client,
    ):
        refused = await client.post("/create", json=body)
        accepted = await client.post("/create", json={"split": "train", "index": 0})

        assert (refused.status_code, accepted.status_code) == (status, 200)


@pytest.mark.parametrize("sessions", [["a", "b"], ["b", "a"], [""]])
async def test_session_cannot_evade_the_limit(sessions: list[str]) -> None:
    headers = [("X-Session-ID", session) for session in sessions]
    async with (
        serving("ors", f"{OWN}:EchoEnv", max_sessions=1) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        task = {"split": "train", "index": 0}
        await client.post("/create", json=task, headers={"X-Session-ID": "a"})

        answer = await client.post("/create", json=task, headers=headers)
        tools = await client.post("/create", json={**task, "toolset_name": "web"}, headers=headers)

        assert answer.status_code in (400, 503)
        assert tools.status_code in (400, 503)


@pytest.mark.parametrize("task", [{"split": "train"}, {"split": 1, "index": 0}, {"index": True}])
async def test_task_that_is_not_ours_is_refused(task: dict[str, Any]) -> None:
    async with (
        serving("ors", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url, headers={"X-Session-ID": "s"}) as client,
    ):
        await client.post("/create", json={"task_spec": task})
        answer = await client.get("/echo/prompt")

        assert answer.status_code == 422
        assert "the task must be" in answer.json()["detail"]


async def test_sessions_are_limited_until_one_is_deleted() -> None:
    async with (
        serving("ors", f"{OWN}:EchoEnv", max_sessions=2) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):

        async def create(session: str) -> int:
            task = {"split": "train", "index": 0}
            answer = await client.post("/create", json=task, headers={"X-Session-ID": session})
            return answer.status_code

        statuses = [await create(session) for session in ("a", "b", "c")]
        await client.post("/delete", headers={"X-Session-ID": "a"})
        too_long = await client.post("/create", headers={"X-Session-ID": "x" * 201}, json={})

        assert statuses == [200, 200, 503]
        assert await create("c") == 200
        assert too_long.status_code == 400


async def test_session_with_pings_stays_and_one_without_is_deleted() -> None:
    now = [0.0]
    async with (
        serving("ors", f"{OWN}:EchoEnv", idle_timeout_s=10, clock=lambda: now[0]) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        for session in ("pinged", "silent"):
            headers = {"X-Session-ID": session}
            await client.post("/create", json={"split": "train", "index": 0}, headers=headers)
            await client.get("/echo/prompt", headers=headers)
        now[0] = 8.0
        await client.post("/ping", headers={"X-Session-ID": "pinged"})
        now[0] = 11.0

        for sweep in served.host.sweeps:
            await sweep()

        assert served.host.num_open == 1
        pings = [
            (await client.post("/ping", headers={"X-Session-ID": session})).status_code
            for session in ("pinged", "silent")
        ]
        assert pings == [200, 404]


KILLED = """
import asyncio, sys
from openreward import AsyncEnvironmentsAPI

async def main():
    async with AsyncEnvironmentsAPI(base_url=sys.argv[1], api_key="none") as api:
        env = api.get("echo", base_url=sys.argv[1])
        async with env.session(task=await env.get_task("train", 0)) as session:
            await session.get_prompt()
            print("ready", flush=True)
            await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_killed_client_leaves_no_session() -> None:
    async with serving("ors", f"{OWN}:EchoEnv", idle_timeout_s=2.0) as served:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, served.url, stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        closed = Echo.closed
        assert served.host.num_open == 1

        client.send_signal(signal.SIGKILL)
        await client.wait()
        await until_closed(served.host)

        assert Echo.closed == closed + 1


@pytest.mark.parametrize("body", ['{"index": NaN}', '{"task": "\\ud800"}'])
async def test_request_that_is_not_valid_json_in_an_answer_is_refused(body: str) -> None:
    async with (
        serving("ors", f"{OWN}:EchoEnv") as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        headers = {"Content-Type": "application/json", "X-Session-ID": "s"}
        answer = await client.post("/create", content=body, headers=headers)

    assert answer.status_code == 422
    assert all("input" not in reason for reason in answer.json()["detail"])

"""Our environments as OpenEnv servers, played by OpenEnv's own clients and validated by it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("openenv", reason="the extra openenv is not installed")

from openenv import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

from tests.serving.own_environments import Echo
from tests.serving.served import OWN, WORD_SUMS, serving, until_closed

pytestmark = pytest.mark.slow

GUESSING = "environments/number_guessing.py"
OPENENV = Path(sys.executable).parent / "openenv"


@pytest.mark.parametrize("target", [GUESSING, WORD_SUMS])
async def test_openenv_validates_the_server(target: str) -> None:
    async with serving("openenv", target) as served:
        process = await asyncio.create_subprocess_exec(
            OPENENV, "validate", "--url", served.url, "--timeout", "60", stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()

        assert process.returncode == 0, output.decode()
        assert "Verdict: PASS" in output.decode()
        assert served.host.num_open == 0


async def test_generic_client_wins_a_game() -> None:
    async with serving("openenv", GUESSING) as served:
        async with GenericEnvClient(base_url=served.url) as client:
            result = await client.reset(split="test", index=3)
            low, high, rewards = 1, 100, []
            while not result.done:
                guess = (low + high) // 2
                result = await client.step({"message": f"<guess>{guess}</guess>"})
                rewards.append(result.reward)
                if result.observation["text"] == "higher":
                    low = guess + 1
                else:
                    high = guess - 1
            state = await client.state()

        # The fractions of information add up to 1, the win is 1, each turn costs 0.05.
        assert sum(rewards) == pytest.approx(2.0 - 0.05 * len(rewards))
        assert result.observation["outcome"] == "done"
        assert state["total_reward"] == pytest.approx(sum(rewards))
        assert (state["split"], state["index"], state["step_count"]) == ("test", 3, len(rewards))


async def test_same_seed_starts_the_same_item() -> None:
    async with serving("openenv", WORD_SUMS) as served:
        texts = []
        for seed in (1, 1, 2):
            async with GenericEnvClient(base_url=served.url) as client:
                texts.append((await client.reset(seed=seed)).observation["text"])

        assert texts[0] == texts[1] != texts[2]


async def test_tools_are_called_by_actions() -> None:
    async with serving("openenv", WORD_SUMS) as served:
        async with GenericEnvClient(base_url=served.url) as client:
            listed = (await client.step({"type": "list_tools"})).observation["tools"]
            result = await client.reset(index=0)
            boxes, parts, loose = map(int, re.findall(r"\d+", result.observation["text"]))
            call = {"type": "call_tool", "tool_name": "multiply"}
            result = await client.step({**call, "arguments": {"a": boxes, "b": parts}})
            product = int(result.observation["result"])
            faulty = await client.step({**call, "arguments": {"a": "x"}})
            answer = {"message": f"<answer>{product + loose}</answer>"}
            end = await client.step(answer)

        assert [tool["name"] for tool in listed] == ["add", "multiply"]
        assert product == boxes * parts
        assert (faulty.reward, faulty.metadata["is_error"]) == (-0.1, True)
        assert (end.reward, end.done, end.metadata["total_reward"]) == (1.0, True, 0.9)


async def test_tools_are_mcp_tools_of_the_same_episode() -> None:
    async with serving("openenv", WORD_SUMS) as served:
        async with MCPToolClient(base_url=served.url) as client:
            await client.reset(index=0)
            tools = await client.list_tools()
            total = await client.call_tool("add", a=1, b=2)
            error = await client.call_tool("add", a=1, b="many")
            state = await client.state()

        assert {tool.name for tool in tools} == {"add", "multiply"}
        assert tools[0].input_schema["required"] == ["a", "b"]
        assert total == "3"
        assert error.startswith("wrong arguments: b")
        assert state.step_count == 2
        await until_closed(served.host)


async def test_error_of_the_environment_names_its_kind_and_spares_others() -> None:
    async with serving("openenv", f"{OWN}:EchoEnv") as served:
        async with (
            GenericEnvClient(base_url=served.url) as failing,
            GenericEnvClient(base_url=served.url) as other,
        ):
            await failing.reset()
            await other.reset()
            with pytest.raises(RuntimeError, match=r"failed \(ValueError\)") as error:
                await failing.step({"message": "raise"})
            answer = await other.step({"message": "a"})
            again = await failing.reset()

        assert "secret" not in str(error.value)
        assert "Traceback" not in str(error.value)
        assert answer.observation["text"] == "you said a"
        assert again.observation["text"].startswith("item")


@pytest.mark.parametrize(
    ("reset", "action", "reason"),
    [
        ({"index": 10**12}, None, "out of range"),
        ({"index": "1; --"}, None, "index: expected an integer"),
        ({"split": "dev"}, None, "no split 'dev'"),
        ({"split": ["train"]}, None, "split: expected a text"),
        ({"seed": 1.5}, None, "seed: expected an integer"),
        ({}, {"massage": "x"}, "VALIDATION_ERROR"),
        ({}, {"message": "x" * 101}, "at most 100"),
        (None, {"message": "x"}, "call reset first"),
    ],
)
async def test_wrong_request_has_a_reason_and_the_session_continues(
    reset: dict[str, object] | None, action: dict[str, object] | None, reason: str
) -> None:
    async with serving("openenv", f"{OWN}:EchoEnv", max_text_chars=100) as served:
        async with GenericEnvClient(base_url=served.url) as client:

            async def ask() -> None:
                if reset is not None:
                    await client.reset(**reset)
                if action is not None:
                    await client.step(action)

            with pytest.raises(RuntimeError, match=reason):
                await ask()
            result = await client.reset()

        assert result.observation["text"].startswith("item")


async def test_sessions_are_limited_and_end_with_their_connection() -> None:
    async with serving("openenv", f"{OWN}:EchoEnv", max_sessions=1) as served:
        async with GenericEnvClient(base_url=served.url) as first:
            await first.reset()
            async with GenericEnvClient(base_url=served.url) as second:
                with pytest.raises((RuntimeError, ConnectionError), match=r"capacity|closed"):
                    await second.reset()
            assert served.host.num_open == 1
        await until_closed(served.host)
        async with GenericEnvClient(base_url=served.url) as third:
            await third.reset()


KILLED = """
import asyncio, sys
from openenv import GenericEnvClient

async def main():
    clients = [GenericEnvClient(base_url=sys.argv[1]) for _ in range(3)]
    for client in clients:
        await client.connect()
        await client.reset()
    print("ready", flush=True)
    await clients[0].step({"message": "hang"})

asyncio.run(main())
"""


async def test_killed_client_leaves_no_session() -> None:
    async with serving("openenv", f"{OWN}:EchoEnv", step_timeout_s=1.0) as served:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, served.url, stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        opened, closed = Echo.opened, Echo.closed

        client.send_signal(signal.SIGKILL)
        await client.wait()
        await until_closed(served.host)

        assert (Echo.opened - opened, Echo.closed - closed) == (0, 3)


async def test_pages_describe_the_environment() -> None:
    async with (
        serving("openenv", f"{OWN}:QuestionEnv") as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        metadata = (await client.get("/metadata")).json()
        schema = (await client.get("/schema")).json()
        tasks = (await client.post("/questions/task_range", json={"split": "test"})).json()
        stateless = await client.post("/step", json={"action": {"message": "0"}})
        web = await client.get("/web")

        assert metadata["name"] == "questions"
        assert metadata["description"] == "Three sums; a score has two parts."
        assert schema["action"]["required"] == ["message"]
        assert tasks["tasks"] == [{"split": "test", "index": 0}, {"split": "test", "index": 1}]
        assert (stateless.status_code, web.status_code) == (409, 404)
        assert "call reset first" in stateless.json()["detail"]


async def test_reward_parts_are_in_the_metadata() -> None:
    async with (
        serving("openenv", f"{OWN}:QuestionEnv") as served,
        GenericEnvClient(base_url=served.url) as client,
    ):
        opening = (await client.reset(index=0)).observation["messages"]
        result = await client.step({"message": "0"})

        assert [message["role"] for message in opening] == ["system", "user"]
        assert (result.reward, result.done) == (2.0, True)
        assert result.metadata["reward_parts"] == {"right": 1.0, "short": 1.0}


async def test_session_without_connection_is_closed_when_idle() -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    async with (
        serving("openenv", WORD_SUMS, max_sessions=1, idle_timeout_s=0.5) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        first = (await client.post("/mcp", json=create)).json()
        second = (await client.post("/mcp", json=create)).json()
        while "result" in second:  # the machine stood still, and the first was idle
            first, second = second, (await client.post("/mcp", json=create)).json()
        for _ in range(200):
            await asyncio.sleep(0.1)
            third = (await client.post("/mcp", json=create)).json()
            if "result" in third:
                break

        assert first["result"]["session_id"]
        assert "capacity" in second["error"]["message"]
        assert third["result"]["session_id"] != first["result"]["session_id"]


@pytest.mark.parametrize("body", ['{"index": NaN}', '{"task": "\\ud800"}'])
async def test_request_that_is_not_valid_json_in_an_answer_is_refused(body: str) -> None:
    async with (
        serving("openenv", GUESSING) as served,
        httpx.AsyncClient(base_url=served.url) as client,
    ):
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/number_guessing/num_tasks", content=body, headers=headers)

    assert answer.status_code == 422
    assert all("input" not in reason for reason in answer.json()["detail"])

"""Tasks of Inspect with the installed package, evaluated in its own processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")

from atroposlib.adapters.inspect_ai import InspectAdapter
from atroposlib.adapters.registry import make_adapter
from atroposlib.errors import (
    ConfigError,
    EpisodeError,
    EpisodeFailedError,
    EpisodeRewardError,
    EpisodeTimeoutError,
)
from atroposlib.scored_data import IGNORE_INDEX, check_group
from tests.adapters.playing import group_of, playing
from tests.byte_tokenizer import save_byte_tokenizer
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "fixtures" / "inspect_sums.py"
SUMS = f"inspect_ai:{FILE}@sums"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 0, "b": 1}}</tool_call>'
IN_ORDER = {"shuffle": False, "num_workers": 1}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, make_env: Any) -> None:
    """Run workers with this repository, and with tokens that are characters."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def uses_the_tool(prompt: str) -> str:
    return CALL if "What is" in prompt and "[tool]" not in prompt else "The sum is 1"


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def workers_of(pid: int) -> list[int]:
    """Workers below a process."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    rows = [line.split(maxsplit=1) for line in listed.splitlines()]
    return [int(child) for child, words in rows if "atroposlib.adapters.inspect_ai" in words]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_solver_with_tools_and_scorers_reach_the_known_reward_with_exact_tokens() -> None:
    async with ScriptedEngine(uses_the_tool) as engine, playing(engine, SUMS, IN_ORDER) as env:
        group = await group_of(env)
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)

    check_group(group)
    assert group["scores"] == [1.0, 1.0]
    assert group["reward_parts"] == [{"includes": 1.0}] * 2
    tokenizer = CharTokenizer()
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert all(m in (t, IGNORE_INDEX) for t, m in zip(tokens, masks, strict=True))
        written = tokenizer.decode([m for m in masks if m != IGNORE_INDEX])
        assert written.split(tokenizer.eos_token)[:-1] == [CALL, "The sum is 1"]
    assert metrics["train/metric/num_turns"] == 2.0
    assert metrics["train/metric/parts/length"] == len("The sum is 1")
    assert metrics["train/metric/parts/right"] == 1.0


async def test_reward_is_the_sum_of_the_named_scores() -> None:
    args = {**IN_ORDER, "reward": ["includes", "parts/right"]}
    async with ScriptedEngine(uses_the_tool) as engine, playing(engine, SUMS, args) as env:
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [2.0]
    assert rollout.reward_parts == [{"includes": 1.0, "parts/right": 1.0}]


async def test_unknown_score_is_named_with_those_there_are() -> None:
    args = {**IN_ORDER, "reward": ["exact"]}
    async with (
        ScriptedEngine(uses_the_tool) as engine,
        playing(engine, SUMS, args, episode_retries=0) as env,
    ):
        with pytest.raises(
            EpisodeRewardError, match=r"no score exact; its scores are: includes, p"
        ):
            await env.collect_trajectory(await env.get_next_item())


async def test_sample_that_the_first_scorer_leaves_out_has_no_reward_of_another() -> None:
    spec = f"inspect_ai:{FILE}@partly_scored"
    async with (
        ScriptedEngine(lambda prompt: "1") as engine,
        playing(engine, spec, IN_ORDER, episode_retries=0) as env,
    ):
        with pytest.raises(
            EpisodeRewardError, match=r"no score unscored; its scores are: includes$"
        ):
            await env.collect_trajectory(await env.get_next_item())


async def test_policy_is_asked_in_place_of_the_model_of_a_task() -> None:
    spec = f"inspect_ai:{FILE}@with_a_model"
    async with ScriptedEngine(lambda prompt: "1") as engine, playing(engine, spec, {}) as env:
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]


async def test_choices_are_asked_and_scored_by_inspect() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "ANSWER: B"

    async with (
        ScriptedEngine(reply) as engine,
        playing(engine, f"inspect_ai:{FILE}@choices", IN_ORDER) as env,
    ):
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]
    assert "B) 4" in prompts[-1]


async def test_limit_of_messages_truncates_and_is_scored() -> None:
    args = {**IN_ORDER, "message_limit": 5}
    async with (
        ScriptedEngine(lambda prompt: "no idea") as engine,
        playing(engine, f"inspect_ai:{FILE}@submitting", args) as env,
    ):
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.outcome == "truncated"
    assert rollout.rewards == [0.0]
    assert rollout.metrics["limit/message"] == 1.0


async def test_items_follow_the_seed_and_held_out_samples_are_only_evaluated() -> None:
    orders = []
    for seed in (0, 0, 1):
        adapter = make_adapter(SUMS, {"held_out": 2, "num_workers": 1}, seed=seed)
        await adapter.open()
        orders.append([(await adapter.item(i))["index"] for i in range(8)])
        held_out = [item["index"] for item in await adapter.eval_items(10)]
        await adapter.close()

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:4]) == sorted(orders[0][4:]) == [0, 1, 2, 3]
    assert held_out == [4, 5]


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("raises", EpisodeFailedError, "KeyError"),
        ("nan", EpisodeRewardError, "nan"),
        ("asks", EpisodeFailedError, "asks the policy for a grade"),
        ("exits", EpisodeFailedError, "ended with code 3"),
        ("hangs", EpisodeTimeoutError, "no answer within"),
        ("blocks", EpisodeTimeoutError, "no answer within"),
    ],
)
async def test_broken_rollout_is_counted_and_its_worker_replaced(
    fault: str, error: type[EpisodeError], text: str
) -> None:
    args = {**IN_ORDER, "task_args": {"fault": fault}}
    spec = f"inspect_ai:{FILE}@broken"
    async with ScriptedEngine(lambda prompt: "1") as engine, playing(engine, spec, args) as env:
        item = await env.get_next_item()
        if error is EpisodeTimeoutError:
            env.config.conversation_timeout_s = 8.0
        with pytest.raises(error, match=text):
            await env.collect_trajectory(item)
        assert env.failure_counts == {error.__name__: 1}
        assert isinstance(env.adapter, InspectAdapter)
        assert len(workers_of(os.getpid())) == len(env.adapter._workers)
        env.adapter.args.task_args["fault"] = ""
        await asyncio.gather(*(worker.end() for worker in env.adapter._workers))
        env.config.conversation_timeout_s = 120.0
        rollout, _ = await env.collect_trajectory(item)

    assert rollout.rewards == [1.0]
    assert workers_of(os.getpid()) == []


async def test_cancelled_rollout_ends_its_worker() -> None:
    async with ScriptedEngine(uses_the_tool) as engine, playing(engine, SUMS, IN_ORDER) as env:
        item = await env.get_next_item()
        engine.delay_s = 300
        before = len(engine.requests)
        rolling = asyncio.ensure_future(env.collect_trajectory(item))
        await until(lambda: len(engine.requests) > before)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        assert env.episodes_open == 0
        await until(lambda: workers_of(os.getpid()) == [])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (f"{FILE}@graded", {}, "model_graded_qa asks a model; name one with the argument grader"),
        (f"{FILE}@sandboxed", {}, r"runs commands in a sandbox \(local\)"),
        (f"{FILE}@summs", {}, "summs"),
        ("no_such_package/summs", {}, "no_such_package/summs"),
        (FILE.name, {}, "8 tasks; expected one"),
        (f"{FILE}@broken", {"task_args": {"fault": "no licence"}}, "SystemExit: no licence"),
        (f"{FILE}@sums", {"task_args": {"counts": 3}}, "no argument 'counts'; did you mean count"),
        (f"{FILE}@sums", {"held_out": 6}, "6 samples, 6 of them held out"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_open(
    name: str, args: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILE.parent)
    adapter = make_adapter(f"inspect_ai:{name}", args, seed=0)

    with pytest.raises(ConfigError, match=message):
        await adapter.open()
    await adapter.close()
    assert workers_of(os.getpid()) == []


async def test_local_sandbox_runs_if_it_is_allowed() -> None:
    call = '<tool_call>{"name": "bash", "arguments": {"command": "echo $((40 + 2))"}}</tool_call>'

    def reply(prompt: str) -> str:
        return "The sum is 1" if "42" in prompt else call

    args = {**IN_ORDER, "sandbox": "task"}
    async with (
        ScriptedEngine(reply) as engine,
        playing(engine, f"inspect_ai:{FILE}@sandboxed", args) as env,
    ):
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]


async def test_grader_answers_for_a_model_graded_scorer() -> None:
    graded = {"role": "assistant", "content": "GRADE: C"}
    async with (
        ScriptedEngine(lambda prompt: "1") as engine,
        ScriptedEngine(messages=lambda body: graded) as grader,
    ):
        args = {
            **IN_ORDER,
            "grader": "openai-api/grader/m",
            "grader_args": {"base_url": grader.base_url, "api_key": "x"},
        }
        async with playing(engine, f"inspect_ai:{FILE}@graded", args) as env:
            rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]
    assert len(grader.requests) == 1


def test_check_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", SUMS, "check", "--args", "num_workers=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=500,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


async def test_killed_program_leaves_no_worker(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "The sum is 1"

    async with ScriptedEngine(reply, delay_s=0.5, tokenizer=tokenizer) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atroposlib.cli.env", SUMS, "process"),
            *("--args", json.dumps({"num_workers": 2})),
            *("--env.tokenizer_name", str(tmp_path / "tokenizer"), "--env.use_wandb", "false"),
            *("--env.total_steps", "100", "--env.group_size", "2"),
            *("--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")),
            *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await until(lambda: any("What is" in prompt for prompt in asked))
        workers = workers_of(process.pid)
        process.kill()
        await process.wait()
        assert workers
        await until(lambda: not any(map(is_running, workers)))

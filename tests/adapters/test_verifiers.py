"""Environments for verifiers, with the installed version: 0.4 with tasksets, or 0.1 with rubrics.

Both versions play the same sums, `fixtures/vf_sums.py` and `fixtures/vf_sums_rubric.py`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed")

from atroposlib.adapters import registry
from atroposlib.adapters.registry import make_adapter
from atroposlib.adapters.verifiers import VerifiersAdapter
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.proxy import AgentProxy
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import (
    ConfigError,
    EpisodeError,
    EpisodeFailedError,
    EpisodeRewardError,
    EpisodeTimeoutError,
    MissingExtraError,
)
from atroposlib.scored_data import IGNORE_INDEX, check_group
from environments.eval_environments.verifiers_eval import evaluate, read_flags
from environments.verifiers_server import VerifiersEnv, VfEnvConfig
from tests.adapters.playing import group_of, playing
from tests.byte_tokenizer import save_byte_tokenizer
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
VERSION = importlib.metadata.version("verifiers")
HAS_TASKSETS = not VERSION.startswith("0.1.")
SUMS = "vf-sums" if HAS_TASKSETS else "vf-sums-rubric"
SPEC = f"verifiers:{SUMS}"
TOOL = "adder_add" if HAS_TASKSETS else "add"
CALL = f"<tool_call>{json.dumps({'name': TOOL, 'arguments': {'a': 3, 'b': 4}})}</tool_call>"
NUM_TURNS = 2 if HAS_TASKSETS else 3
"""The 0.1 environment asks for a confirmation."""

MakeEnv = Callable[..., Any]

only_tasksets = pytest.mark.skipif(not HAS_TASKSETS, reason=f"verifiers {VERSION} has no tasksets")
only_rubrics = pytest.mark.skipif(HAS_TASKSETS, reason=f"verifiers {VERSION} has no rubrics")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, make_env: MakeEnv) -> None:
    """Make the fixtures importable here and in processes, with tokens that are characters."""
    monkeypatch.syspath_prepend(str(FIXTURES))
    paths = [str(FIXTURES), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def uses_the_tool(prompt: str) -> str:
    """Call the tool, then give its result; the prompts of the engine's first look are short."""
    if "What is" in prompt and "[tool]" not in prompt:
        return CALL
    return "The sum is 7"


def at_three(**env_args: Any) -> dict[str, Any]:
    """The first item is 3 + 4."""
    return {"shuffle": False, "env_args": {"offset": 3, **env_args}}


def without_tools(**env_args: Any) -> dict[str, Any]:
    """As `at_three`, without the process of the tool in 0.4."""
    task = {"task": {"has_tools": False}} if HAS_TASKSETS else {}
    return at_three(**task, **env_args)


def opened(args: dict[str, Any], **settings: Any) -> VerifiersAdapter:
    adapter = make_adapter(SPEC, args, **{"seed": 0, **settings})
    assert isinstance(adapter, VerifiersAdapter)
    return adapter


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not holds():  # noqa: ASYNC110 - other processes give no event
            await asyncio.sleep(0.1)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_policy_with_the_tool_reaches_the_known_reward_with_exact_tokens() -> None:
    async with ScriptedEngine(uses_the_tool) as engine, playing(engine, SPEC, at_three()) as env:
        group = await group_of(env)
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)

    check_group(group)
    assert group["scores"] == [3.0, 3.0]
    assert group["reward_parts"] == [{"correct": 2.0, "short": 1.0}] * 2
    tokenizer = CharTokenizer()
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert all(m in (t, IGNORE_INDEX) for t, m in zip(tokens, masks, strict=True))
        written = tokenizer.decode([m for m in masks if m != IGNORE_INDEX])
        assert written.replace(tokenizer.eos_token, "|").split("|")[:-1] == [
            CALL,
            *["The sum is 7"] * (NUM_TURNS - 1),
        ]
    assert metrics["train/metric/num_turns"] == NUM_TURNS
    assert metrics["train/metric/truncated"] == 0.0
    calls = "train/metric/calls" if HAS_TASKSETS else "train/metric/total_tool_calls"
    assert metrics[calls] == 1.0


async def test_wrong_answer_earns_what_the_rubric_says() -> None:
    async with (
        ScriptedEngine(lambda prompt: "It is certainly twelve thousand") as engine,
        playing(engine, SPEC, without_tools()) as env,
    ):
        group = await group_of(env)

    assert group["scores"] == [0.0, 0.0]


async def test_items_follow_the_seed_and_hold_each_task_once_per_pass() -> None:
    orders = []
    for seed in (0, 0, 1):
        adapter = opened({}, seed=seed)
        await adapter.open()
        orders.append([(await adapter.item(i))["index"] for i in range(16)])
        await adapter.close()

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:8]) == sorted(orders[0][8:]) == list(range(8))
    assert orders[0][:8] != orders[0][8:]


async def test_held_out_tasks_are_evaluated_and_not_trained_on() -> None:
    given = {"held_out": 2, **({} if HAS_TASKSETS else {"env_args": {"has_eval": False}})}
    adapter = opened(given)
    await adapter.open()
    trained = {(await adapter.item(i))["index"] for i in range(12)}
    evaluated = await adapter.eval_items(10)
    await adapter.close()

    assert trained == set(range(6))
    assert evaluated == [{"split": "train", "index": 6}, {"split": "train", "index": 7}]


async def test_evaluation_tasks_have_arguments_of_their_own() -> None:
    args = {"shuffle": False, "eval_args": {"offset": 3, "count": 1}}
    async with ScriptedEngine(uses_the_tool) as engine, playing(engine, SPEC, args) as env:
        [item] = env.eval_items()
        rollout = await env.play_for_evaluation(item)

    assert item == {"split": "eval", "index": 0}
    assert rollout.rewards == [3.0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("raises", EpisodeFailedError),
        ("nan", EpisodeRewardError),
        ("hangs", EpisodeTimeoutError),
        ("blocks", EpisodeTimeoutError),
    ],
)
async def test_broken_rollout_is_counted_and_the_next_one_goes_on(
    fault: str, error: type[EpisodeError]
) -> None:
    async with (
        ScriptedEngine(lambda prompt: "no tool") as engine,
        playing(
            engine,
            SPEC,
            without_tools(fault=fault, count=1),
            conversation_timeout_s=8.0 if error is EpisodeTimeoutError else 120.0,
        ) as env,
    ):
        item = await env.get_next_item()
        with pytest.raises(error):
            await env.collect_trajectory(item)
        assert env.failure_counts == {error.__name__: 1}
        assert env.episodes_open == 0
        env.adapter.args.env_args["fault"] = ""
        env.adapter._source = None  # loads the environment without its fault
        env.config.conversation_timeout_s = 120.0
        rollout, _ = await env.collect_trajectory(item)

    assert rollout.outcome == "done"


async def test_cancelled_rollout_leaves_no_session_and_no_process() -> None:
    async with ScriptedEngine(uses_the_tool, delay_s=60) as engine:
        async with playing(engine, SPEC, at_three()) as env:
            item = await env.get_next_item()
            rolling = asyncio.ensure_future(env.collect_trajectory(item))
            await until(lambda: bool(engine.requests))
            rolling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rolling
            assert env.episodes_open == 0
            await until(lambda: not children())
        # The loop of the library drops the key of the ended session once its coroutine has ended.
        await until(lambda: not [name for name in os.environ if name.startswith("ATROPOS_")])


def children() -> list[str]:
    """Command lines of the processes below this one."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    return [line for line in listed.splitlines() if "vf_sums" in line or "chat_program" in line]


async def test_signal_handlers_of_the_process_are_kept() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    adapter = opened({})
    await adapter.open()
    await adapter.close()

    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("no-such-env", {}, "there is no module 'no_such_env'"),
        ("json", {}, "json"),
        (SUMS, {"env_args": {"offst": 3}}, "offst"),
        (SUMS, {"held_out": 8}, "8 training tasks, 8 of them held out"),
        (SUMS, {"env_args": {"count": 0}}, "0 training tasks|cannot be loaded"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_open(
    name: str, args: dict[str, Any], message: str
) -> None:
    adapter = make_adapter(f"verifiers:{name}", args, seed=0)

    with pytest.raises(ConfigError, match=message):
        await adapter.open()
    await adapter.close()


@only_tasksets
async def test_shared_tools_of_training_end_if_those_of_evaluations_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import verifiers.v1 as vf

    running = set()

    class SharedTools(vf.SingleAgentEnv):
        @asynccontextmanager
        async def shared_tools(self) -> AsyncIterator[dict[str, Any]]:
            if self.taskset.config.fault:
                raise RuntimeError("the tools cannot be started")
            running.add("train")
            try:
                yield {}
            finally:
                running.remove("train")

    monkeypatch.setattr(vf, "load_environment", SharedTools)
    adapter = opened({**at_three(), "eval_args": {"fault": "raises"}})

    with pytest.raises(RuntimeError, match="the tools cannot be started") as kept:
        await adapter.open()

    assert kept.value.__traceback__ is not None  # it would keep what is open
    assert not running
    await adapter.close()


@only_tasksets
async def test_environment_for_the_older_interface_is_refused_with_the_version_to_install() -> None:
    adapter = make_adapter("verifiers:vf-old-interface", {}, seed=0)

    with pytest.raises(ConfigError, match=r"written for verifiers 0\.1.*'verifiers<0\.2'"):
        await adapter.open()


@only_tasksets
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"harness": "bash"}, "runs commands of the model on this machine"),
        ({"runtime": "prime"}, "a paid service"),
        (
            {"env_settings": {"agent": {"client": {"type": "eval", "base_url": "http://x/v1"}}}},
            "0 agents without",
        ),
    ],
)
async def test_placement_that_is_unsafe_or_paid_is_refused(
    args: dict[str, Any], message: str
) -> None:
    adapter = opened(args)

    with pytest.raises(ConfigError, match=message):
        await adapter.open()


@only_tasksets
async def test_environment_class_of_the_package_plays_with_its_own_run() -> None:
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed, which makes the library's chat program")
    args = {"shuffle": False}
    async with (
        ScriptedEngine(lambda prompt: "higher" if "Secret" in prompt else "5") as engine,
        playing(engine, "verifiers:vf-guess", args) as env,
    ):
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]
    assert rollout.metrics["num_turns"] == 2.0


@only_rubrics
async def test_rewards_of_a_whole_group_are_refused() -> None:
    adapter = opened({"env_args": {"is_group": True}})

    with pytest.raises(ConfigError, match="scores the rollouts of a group together"):
        await adapter.open()


async def test_empty_answer_is_scored_as_the_policys() -> None:
    async with (
        ScriptedEngine(lambda prompt: "") as engine,
        playing(engine, SPEC, without_tools()) as env,
    ):
        group = await group_of(env)

    assert group["scores"] in ([0.0, 0.0], [1.0, 1.0])  # short, where the version scores it
    assert env.failure_counts == {}


@only_rubrics
async def test_limit_of_turns_truncates() -> None:
    async with (
        ScriptedEngine(uses_the_tool) as engine,
        playing(engine, SPEC, {**at_three(), "max_turns": 1}) as env,
    ):
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.metrics["stop/max_turns_reached"] == 1.0
    assert rollout.metrics["num_turns"] == 1.0


@only_rubrics
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("sophistry-bench-sprint", "sophistry_bench_sprint"),
        ("stardata.envs.constraint_gym", "stardata"),
    ],
)
async def test_public_package_is_played(name: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not installed")
    async with (
        ScriptedEngine(lambda prompt: "A calm and quiet evening") as engine,
        playing(engine, f"verifiers:{name}") as env,
    ):
        group = await group_of(env)

    check_group(group)
    assert len(group["tokens"]) == 2


def test_unsupported_version_and_missing_package_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.importlib.metadata, "version", lambda name: "0.3.1")
    with pytest.raises(ConfigError, match=r"verifiers 0\.3\.1 is installed; this adapter supports"):
        make_adapter(SPEC, {}, seed=0)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(registry.importlib.metadata, "version", missing)
    with pytest.raises(MissingExtraError, match="verifiers"):
        make_adapter(SPEC, {}, seed=0)


def test_check_passes(tmp_path: Path) -> None:
    words = [SPEC, "check", "--args", json.dumps(without_tools())]
    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=500,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


async def test_killed_program_leaves_no_process(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return uses_the_tool(prompt)

    async with ScriptedEngine(reply, delay_s=1.0, tokenizer=tokenizer) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atroposlib.cli.env", SPEC, "process"),
            *("--args", json.dumps(at_three())),
            *("--env.tokenizer_name", str(tmp_path / "tokenizer"), "--env.use_wandb", "false"),
            *("--env.total_steps", "100", "--env.group_size", "2"),
            *("--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")),
            *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await until(lambda: any("What is" in prompt for prompt in asked))
        below = descendants(process.pid)
        process.kill()
        await process.wait()
        await until(lambda: not any(map(is_running, below)))
    assert bool(below) is HAS_TASKSETS


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


async def test_public_environment_file_logs_the_rubric(make_env: MakeEnv) -> None:
    config = VfEnvConfig(
        vf_env_name=SUMS,
        env_args='{"offset": 3}',
        adapter_args={"shuffle": False},
        use_wandb=False,
        tokenizer_name="characters",
        group_size=2,
        max_token_length=20_000,
    )
    async with ScriptedEngine(uses_the_tool) as engine:
        _, server = VerifiersEnv.config_init()
        servers = server if isinstance(server, list) else [server]
        here = servers[0].model_copy(
            update={"base_url": engine.base_url, "model_name": "m", "server_type": "vllm"}
        )
        env = VerifiersEnv(config, here.model_copy(update={"health_check": False}))
        await env.setup()
        group = await group_of(env)
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)
        await env.close()

    assert group["scores"] == [3.0, 3.0]
    assert metrics["metrics/mean_reward"] == 3.0
    assert metrics["metrics/reward_std"] == 0.0
    assert metrics["metrics/avg_num_turns"] == metrics["metrics/max_num_turns"] == NUM_TURNS
    assert metrics["metrics/identical_score_rate"] == 1.0
    assert metrics["metrics/groups_total"] == 1.0
    assert metrics["metrics/correct"] > 0.0


async def test_evaluation_program_writes_rates_of_each_function(tmp_path: Path) -> None:
    async with ScriptedEngine(lambda prompt: "The sum is 7") as engine:
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        manager = ServerManager([server])
        async with AgentProxy(manager, CharTokenizer()) as proxy, proxy.session() as session:
            flags = read_flags(
                [
                    *("--server-url", session.base_url, "--api-key", session.api_key),
                    *("--model-name", "m", "--vf-env-name", SUMS, "--max-eval-items", "1"),
                    *("--eval-dir", str(tmp_path / "results")),
                ]
            )
            metrics = await evaluate(flags, {**without_tools(), "eval_args": {"offset": 3}})
        await manager.close()

    assert metrics["accuracy"] == 1.0
    assert metrics["avg_score"] == 3.0
    assert metrics["correct_correct_rate"] == metrics["short_correct_rate"] == 1.0
    saved = json.loads((tmp_path / "results" / "metrics.json").read_text())
    assert saved["results"]["all"]["avg_score"] == 3.0

"""Names of metrics, what empties the buffers, and evaluation files (sections 4.8 and 4.9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.envs.small_environment import SmallEnv
from tests.envs.test_base_offline import records

MakeEnv = Callable[..., Any]

BUFFERS = {
    "task_duration": "train_perf/task_duration",
    "succeeded_task_duration": "train_perf/succeeded_task_duration",
    "failed_task_duration": "train_perf/failed_task_duration",
    "mainloop_timings": "train_perf/mainloop_timings",
    "workers_added_list": "train_perf/workers_added_per_attempt",
}
COUNTS = {
    "succeeded_task_duration": "train/items_sent_to_api",
    "failed_task_duration": "train/items_rejected",
}


@pytest.mark.parametrize(("buffer", "name"), BUFFERS.items())
def test_perf_stats_summarises_a_buffer_of_two_and_empties_it(
    make_env: MakeEnv, buffer: str, name: str
) -> None:
    env = make_env()
    setattr(env, buffer, [1.0, 3.0])
    metrics: dict[str, Any] = {"own": 1}

    returned = env.perf_stats(metrics)

    statistics = {f"{name}_mean": 2.0, f"{name}_std": 1.0, f"{name}_max": 3.0, f"{name}_min": 1.0}
    count = {COUNTS[buffer]: 2} if buffer in COUNTS else {}
    assert returned is metrics
    assert metrics == {"own": 1, **statistics, **count}
    assert getattr(env, buffer) == []


@pytest.mark.parametrize("buffer", BUFFERS)
def test_perf_stats_leaves_a_single_value_for_later(make_env: MakeEnv, buffer: str) -> None:
    env = make_env()
    setattr(env, buffer, [1.0])

    assert env.perf_stats({}) == {}
    assert getattr(env, buffer) == [1.0]


async def log(env: Any, **given: Any) -> dict[str, Any]:
    """Call `wandb_log` and return what it logged."""
    logged: list[Any] = []
    env.run_log.log = lambda metrics, step: logged.append((metrics, step))
    await SmallEnv.wandb_log(env, given or None)
    [(metrics, step)] = logged
    assert step == env.curr_step
    return dict(metrics)


@pytest.mark.parametrize("name", ["wandb.log", "atroposlib.envs.base.wandb.log"])
async def test_wandb_log_calls_a_replaced_log_without_a_run(make_env: MakeEnv, name: str) -> None:
    env = make_env(use_wandb=True)
    env.curr_step = 7

    with patch(name) as replaced:
        await env.wandb_log({"own": 1})
    await env.wandb_log({"own": 2})  # the real one refuses without a run

    replaced.assert_called_once()
    assert replaced.call_args.args[0]["own"] == 1
    assert replaced.call_args.kwargs == {"step": 7}


async def test_wandb_log_completion_lengths(make_env: MakeEnv) -> None:
    env = make_env()
    env.max_token_len = 100
    env.completion_lengths = [90, 96, 99, 15]
    env.curr_step = 7

    metrics = await log(env)

    assert metrics["train/completion_lengths"] == 75.0
    assert metrics["train/completion_lengths_max"] == 99
    assert metrics["train/completion_lengths_min"] == 15
    assert metrics["train/completion_lengths_std"] == pytest.approx(1210.5**0.5)
    assert metrics["train/completion_lengths_p95"] == 0.5  # the share above 95
    assert env.completion_lengths == []


async def test_wandb_log_without_rollouts_logs_only_what_there_is(make_env: MakeEnv) -> None:
    metrics = await log(make_env(), own=1)

    assert metrics["own"] == 1
    assert not [name for name in metrics if name.startswith("train")]


async def test_wandb_log_table_of_rollouts_and_its_buffer(make_env: MakeEnv) -> None:
    env = make_env()
    env.rollouts_for_wandb = [[("a", 1.0)], [("b", 0.0)]]

    metrics = await log(env)

    assert metrics["train/rollouts"]["columns"] == ["text", "score"]
    assert metrics["train/rollouts"]["rows"] == [["a", 1.0], ["b", 0.0]]
    assert env.rollouts_for_wandb == []


async def test_wandb_log_prefixes_all_but_the_servers_metrics(make_env: MakeEnv) -> None:
    env = make_env()
    env.wandb_prepend = "small_0"

    async def metrics_of(metrics: dict[str, Any], name: str) -> dict[str, Any]:
        return {f"server/{name}_x": 1}

    env.server.servers[0].wandb_metrics = metrics_of

    metrics = await log(env, own=1)

    assert metrics["small_0_own"] == 1
    assert metrics["server/server_0_x"] == 1


async def test_wandb_log_without_servers_works(make_env: MakeEnv) -> None:
    env = make_env()
    env.server.servers = []

    assert (await log(env, own=1))["own"] == 1


class Nameless(SmallEnv):
    name = None


@pytest.mark.parametrize(
    ("env_cls", "task"), [(SmallEnv, "small_eval"), (Nameless, "Nameless_eval")]
)
async def test_evaluate_log_defaults(
    make_env: MakeEnv, tmp_path: Path, env_cls: type[Any], task: str
) -> None:
    env = make_env(env_cls, data_dir_to_save_evals="evals", max_token_length=5)

    await env.evaluate_log({"a": 1.0}, generation_parameters={"temperature": 0.0}, verbose=False)

    report = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert report["results"] == {f"atropos|{task}|0": {"a": 1.0}, "all": {"a": 1.0}}
    assert report["config_general"] == {
        "model_name": "m",
        "total_evaluation_time_seconds": report["config_general"]["total_evaluation_time_seconds"],
        "generation_parameters": {"max_new_tokens": 5, "temperature": 0.0},
    }
    assert float(report["config_general"]["total_evaluation_time_seconds"]) == pytest.approx(
        0, abs=60
    )
    assert not (tmp_path / "evals" / "samples.jsonl").exists()


async def test_evaluate_log_takes_the_model_of_the_config_first(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(data_dir_to_save_evals="evals", model_name="of the config")

    await env.evaluate_log({}, task_name="t", start_time=1.0, end_time=3.5, samples=[{"a": 1}])

    report = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert report["config_general"]["model_name"] == "of the config"
    assert report["config_general"]["total_evaluation_time_seconds"] == "2.5"
    assert records(tmp_path / "evals" / "samples.jsonl") == [{"a": 1}]


async def test_evaluate_log_tolerates_metrics_that_are_no_numbers(
    make_env: MakeEnv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make_env(data_dir_to_save_evals="evals")

    await env.evaluate_log({"eval/name": "text", "eval/none": None, "eval/list": [1]})

    assert "name" in capsys.readouterr().out


def test_checkpoint_is_written_and_read_back(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env()
    env.checkpoint_dir, env.wandb_prepend, env.curr_step = str(tmp_path), "small_0", 4

    env.save_checkpoint(4)
    assert not (tmp_path / "env_checkpoints").exists()
    env.save_checkpoint(4, {"num_items": 9})
    env.load_checkpoint()

    path = tmp_path / "env_checkpoints" / "small_0" / "step-4.json"
    assert json.loads(path.read_text()) == {"num_items": 9}
    assert env.num_items == 9

"""When the base class calls a hook, with what, and what it leaves behind (sections 4.1 to 4.6)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServer, BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.errors import ConfigError
from tests.contract.scored_groups import scored, take
from tests.envs.live_service import LiveService, ScriptedTrainer
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.envs.test_base_offline import process

MakeEnv = Callable[..., Any]


class Renamed(SmallEnv):
    """Every hook under parameter names of its own; notes the order of the calls."""

    async def get_next_item(self) -> Any:
        self.events.append("get_next_item")
        return await super().get_next_item()

    async def collect_trajectories(self, item_tuple: Any) -> Any:  # type: ignore[override]
        self.events.append("collect_trajectories")
        return scored(), []

    async def postprocess_histories(self, data: Any) -> Any:  # type: ignore[override]
        self.events.append("postprocess_histories")
        return data

    async def add_rollouts_for_wandb(  # type: ignore[override]
        self, group: Any, thing: Any = None
    ) -> None:
        self.events.append("add_rollouts_for_wandb")

    async def create_rollout_table(self, wdict: Any) -> Any:  # type: ignore[override]
        self.events.append("create_rollout_table")
        return wdict

    async def wandb_log(self, metrics: Any) -> None:  # type: ignore[override]
        self.events.append("wandb_log")
        await super().wandb_log(metrics)

    def save_checkpoint(self, number: int, more: Any = None) -> None:  # type: ignore[override]
        self.events.append(f"save_checkpoint {number}")

    async def cleanup(self) -> None:
        self.events.append("cleanup")


async def test_hooks_get_their_arguments_by_position_while_processing(make_env: MakeEnv) -> None:
    env = make_env(Renamed)

    await process(env, groups=1)

    assert env.events == [
        *("setup", "get_next_item", "collect_trajectories", "postprocess_histories"),
        *("add_rollouts_for_wandb", "wandb_log", "create_rollout_table", "close"),
    ]


async def test_hooks_get_their_arguments_by_position_while_serving(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(Renamed, rollout_server_url=service.url)

    async with ScriptedTrainer(
        service.url, save_checkpoint_interval=1, checkpoint_dir=str(tmp_path)
    ) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 60)
        await asyncio.wait_for(serving, 60)

    assert env.events[0] == "setup"
    assert env.events[-1] == "close"
    assert {"cleanup", "wandb_log", "create_rollout_table", "save_checkpoint 3"} <= set(env.events)
    assert env.last_completed_item["scores"] == [1.0, 0.0]


async def test_serving_starts_in_the_order_of_the_contract(make_env: MakeEnv) -> None:
    env = make_env()
    order: list[str] = []

    def note(name: str) -> Callable[[], Any]:
        async def called() -> None:
            order.append(name)
            if name == "get_server_info":
                raise LookupError("far enough")

        return called

    for name in ("setup", "setup_wandb", "register_env", "get_server_info"):
        setattr(env, name, note(name))

    with pytest.raises(LookupError):
        await env.env_manager()

    assert order == ["setup", "setup_wandb", "register_env", "get_server_info"]


async def test_postprocess_is_called_only_when_there_is_something(make_env: MakeEnv) -> None:
    env = make_env(Renamed)
    returned: list[Any] = [(None, []), ([], []), ({}, [])]
    env.collect_trajectories = lambda item: returned.pop()

    for _ in range(3):
        await run_one(env)

    assert "postprocess_histories" not in env.events
    assert env.events.count("cleanup") == 3


async def run_one(env: Any) -> Any:
    """One rollout, as serving has it; return what its worker returned."""
    env.rollout_scheduler.start("item")
    (worker,) = env.workers
    return await worker


async def test_one_worker_records_durations_by_outcome(make_env: MakeEnv) -> None:
    env = make_env()
    outcomes: list[Any] = [(scored(), ["later"]), ([], []), (None, ["more"])]
    env.collect_trajectories = lambda item: outcomes.pop(0)
    env._send_scored_data_to_api = take

    results = [await run_one(env) for _ in range(3)]

    assert results[0]["scores"] == [1.0, 0.0]
    assert results[1:] == [[], None]
    assert len(env.task_duration) == 3
    assert len(env.succeeded_task_duration) == 2  # nothing to send is no failure
    assert len(env.failed_task_duration) == 1
    assert env.task_successful == [1, 1, 0]
    assert env.backlog == ["later", "more"]
    assert env.running_items == {}


@pytest.mark.parametrize("hook", ["collect_trajectories", "postprocess_histories"])
async def test_one_worker_that_raises_has_no_data_and_is_counted(
    make_env: MakeEnv, hook: str
) -> None:
    env = make_env(Renamed)

    async def fail(_: Any) -> Any:
        raise KeyError("answer")

    setattr(env, hook, fail)

    assert await run_one(env) is None
    assert env.failure_counts == {"KeyError": 1}
    assert env.events[-1] == "cleanup"
    assert len(env.failed_task_duration) == 1


async def test_one_worker_survives_sending_that_raises(make_env: MakeEnv) -> None:
    env = make_env()
    env.collect_trajectories = lambda item: (scored(), [])

    async def fail(*_: Any) -> None:
        raise OSError("no route")

    env.handle_send_to_api = fail

    assert (await run_one(env))["scores"] == [1.0, 0.0]
    assert env.failure_counts == {"OSError": 1}


async def test_running_items_hold_item_worker_and_start_time(make_env: MakeEnv) -> None:
    env = make_env()
    item_uuid = env.rollout_scheduler.start("item")

    record = env.running_items[item_uuid]

    assert record["item"] == "item"
    assert record["worker"] in env.workers
    assert record["start_time"] > 0
    await env.rollout_scheduler.shut_down(grace_s=1)


def test_constructor_takes_the_four_by_keyword_and_by_position(make_env: MakeEnv) -> None:
    make_env()

    by_keyword = SmallEnv(config=small_config(), server_configs=SERVERS, slurm=False, testing=True)
    by_position = SmallEnv(small_config(), SERVERS, False, True)

    assert by_keyword.testing is by_position.testing is True
    assert len(by_keyword.server.servers) == 1  # the scripted one


def test_constructor_uses_server_class_and_reasoning_of_the_environment(make_env: MakeEnv) -> None:
    class OwnServer(OpenAIServer):
        pass

    class Own(SmallEnv):
        server_cls = OwnServer

    env = make_env(Own, thinking_mode=True, reasoning_effort="high", max_reasoning_tokens=2048)

    assert BaseEnv.server_cls is APIServer
    assert isinstance(env.server.servers[0], OwnServer)
    reasoning = env.server.reasoning_config
    assert (reasoning.enabled, reasoning.effort, reasoning.max_tokens) == (True, "high", 2048)


@pytest.mark.parametrize(
    ("total_steps", "expected"), [(-1, 9), (5, 5)], ids=["the trainer's", "its own"]
)
async def test_registration_sets_the_attributes_of_the_contract(
    service: LiveService, make_env: MakeEnv, tmp_path: Path, total_steps: int, expected: int
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, total_steps=total_steps, wandb_name="w")

    async with ScriptedTrainer(
        service.url,
        starting_step=4,
        num_steps=9,
        save_checkpoint_interval=3,
        checkpoint_dir=str(tmp_path),
    ) as trainer:
        await trainer.register()
        await env.register_env()
        await env.get_server_info()
        await env.get_status()
        await env.service_session.leave(timeout_s=1)

    assert (env.env_id, env.wandb_prepend) == (0, "w_0")
    assert (env.checkpoint_dir, env.checkpoint_interval) == (str(tmp_path), 3)
    assert env.config.total_steps == expected
    assert (env.config.batch_size, env.max_token_len) == (4, 64)
    assert env.status_dict["queue_size"] == 0
    assert {"current_step", "env_weight", "self_queue_size", "max_group_size"} <= set(
        env.status_dict
    )


class Infos:
    """A session whose service says what it is told to say."""

    def __init__(self, **info: Any) -> None:
        self.client = self
        self.reply = info

    async def info(self) -> Any:
        return self.reply

    async def wandb_info(self) -> Any:
        return self.reply

    async def ask(self, question: Any, *, waiting_for: str) -> Any:
        return await question()


async def test_server_info_without_any_batch_size_says_so(make_env: MakeEnv) -> None:
    env = make_env()
    env.service_session = Infos(batch_size=-1, max_token_len=-1)

    with pytest.raises(ConfigError, match="no batch size is known"):
        await env.get_server_info()


async def test_server_info_group_as_large_as_the_batch_is_allowed(make_env: MakeEnv) -> None:
    env = make_env(group_size=4, batch_size=8)
    env.service_session = Infos(batch_size=4, max_token_len=-1)

    await env.get_server_info()

    assert (env.config.batch_size, env.max_token_len) == (4, -1)


@pytest.mark.parametrize(
    ("wandb_name", "pattern"), [("w", r"w-\d{4}-\d\d-\d\d-[a-z]{6}"), (None, "None")]
)
async def test_wandb_run_of_serving_is_the_trainers(
    make_env: MakeEnv, wandb_name: str | None, pattern: str
) -> None:
    env = make_env(use_wandb=True, wandb_name=wandb_name)
    env.service_session = Infos(project="p", group="g")
    started: list[dict[str, Any]] = []
    env.run_log.start = lambda **run: started.append(run)

    await env.setup_wandb()
    await env.setup_wandb()  # with a project set nothing is asked and nothing opened

    [run] = started
    assert (env.wandb_project, env.wandb_group) == (run["project"], run["group"]) == ("p", "g")
    assert re.fullmatch(pattern, str(run["name"]))
    assert run["config"]["group_size"] == 2


async def test_wandb_run_is_not_opened_unless_wanted(make_env: MakeEnv) -> None:
    env = make_env(use_wandb=False)

    await env.setup_wandb()

    assert env.service_session is None


def test_wandb_run_of_process_has_a_dated_name(make_env: MakeEnv) -> None:
    env = make_env(use_wandb=True)
    started: list[dict[str, Any]] = []
    env.run_log.start = lambda **run: started.append(run)

    env._reporter.start_local_run()

    assert (started[0]["project"], started[0]["group"]) == (None, None)
    assert re.fullmatch(r"small-\d{4}-\d\d-\d\d-[a-z]{6}", started[0]["name"])


@pytest.mark.parametrize(("least", "sent", "num_logs"), [(2, 1, 0), (2, 2, 1), (0, 0, 1)])
async def test_metrics_wait_for_a_new_step_and_enough_groups(
    make_env: MakeEnv, least: int, sent: int, num_logs: int
) -> None:
    env = make_env(min_items_sent_before_logging=least)
    env.service_session = None
    env.items_sent_this_step = sent
    logged: list[Any] = []
    env.wandb_log = logged.append

    for step in (0, 1, 1):
        env.status_dict = {"current_step": step}
        await env.env_step_checks()

    assert logged == [{}] * num_logs
    assert env.curr_step == 1


async def test_workers_added_are_noted_except_at_the_very_start(make_env: MakeEnv) -> None:
    env = make_env(batch_size=4, max_num_workers=3)
    env.status_dict = {"current_step": 0, "queue_size": 0}

    await env.add_train_workers()
    assert (env.workers_added_list, len(env.workers)) == ([], 3)
    env.curr_step = 1
    await env.add_train_workers()

    assert env.workers_added_list == [0]
    await env.rollout_scheduler.shut_down(grace_s=1)


@pytest.mark.parametrize(
    ("alone", "expected"),
    [({}, 8), ({"status_dict": {}}, 8), ({"min_batch_allocation": 0.5}, 6)],
)
def test_derived_batch_size(make_env: MakeEnv, alone: dict[str, Any], expected: int) -> None:
    # A service of May 2025 says nothing of fractions: all of the batch is free.
    env = make_env(batch_size=8, min_batch_allocation=alone.get("min_batch_allocation"))
    env.status_dict = alone.get("status_dict")
    if expected == 6:
        env.status_dict = {"unallocated_fraction": 0.25}  # int(8 * (0.25 + 0.5))

    assert env.derived_batch_size == expected


def test_config_of_a_subclass_is_the_one_of_its_class() -> None:
    class OwnConfig(BaseEnvConfig):
        own: int = 3

    class Own(SmallEnv):
        env_config_cls = OwnConfig

    config, _ = Own.config_init()

    assert isinstance(config, OwnConfig)

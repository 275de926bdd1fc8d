"""Registering with the real service: names, weights, limits, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from atroposlib.envs.rollouts import annotate_groups
from atroposlib.envs.server_handling.server_baseline import (
    SampledVersions,
    note_sampled,
    sampled_versions,
)
from atroposlib.errors import ConfigError, TrajectoryApiError
from tests.api.may_2025_service import May2025Service
from tests.api.scripted_service import scripted
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until, until
from tests.envs.small_environment import SmallEnv
from tests.envs.test_base_delivery import RecordingSession

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]


class NumberedEnv(SmallEnv):
    """Its trajectories name the item they were made from."""

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        trajectory, backlog = await super().collect_trajectory(item)
        return {**trajectory, "tokens": [65, item, 67], "masks": [-100, item, 67]}, backlog


async def test_register_negative_weight_never_updates_the_servers(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, inference_weight=-1)
    updates: list[float] = []
    env.server.update_weight = updates.append

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert updates == []


async def test_register_group_larger_than_batch_names_both(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, group_size=8)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        with pytest.raises(ValueError, match="group_size is 8 but the trainer's batch_size is 4"):
            await env.env_manager()


async def test_register_without_any_number_of_steps_says_what_to_set(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async with ScriptedTrainer(service.url, num_steps=-1) as trainer:
        await trainer.register()
        with pytest.raises(ValueError, match=r"set --env\.total_steps"):
            await env.env_manager()


async def test_register_late_restores_the_checkpoint(
    service: LiveService, make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    folder = tmp_path / "env_checkpoints" / "small_4"
    folder.mkdir(parents=True)
    (folder / "step-5.json").write_text('{"num_items": 40, "unheard_of": 1}')
    env = make_env(rollout_server_url=service.url)

    async with ScriptedTrainer(
        service.url, starting_step=6, checkpoint_dir=str(tmp_path), num_steps=1000
    ) as trainer:
        await trainer.register()
        await serve_until(env, until(lambda: env.num_items > 40))

    assert "unheard_of" in caplog.text


@pytest.mark.parametrize(
    ("wandb_name", "class_name", "expected"),
    [("mine", "small", "mine_0"), (None, "small", "small_0"), (None, None, "SmallEnv_0")],
)
async def test_register_name_falls_back(
    service: LiveService,
    make_env: MakeEnv,
    wandb_name: str | None,
    class_name: str | None,
    expected: str,
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, wandb_name=wandb_name)
    env.name = class_name

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await env.register_env()
        await env.service_session.leave(timeout_s=1)

    assert env.wandb_prepend == expected


async def test_fresh_run_in_mid_run_gets_the_waiting_groups_under_the_new_id(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(NumberedEnv, rollout_server_url=service.url)
    env.most_items = 8
    finish = asyncio.Event()
    env.before_rollout = lambda item: finish.wait()

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        # Somebody else comes first, so that the environment's id is 1 here and 0 later.
        await trainer.client.register_env(
            max_token_length=8, desired_name="other", weight=1.0, group_size=2
        )

        async def play() -> None:
            await until(lambda: env.env_id == 1 and len(env.workers) == 4)
            await asyncio.to_thread(service.stop)
            finish.set()
            await until(lambda: not env.running_items)  # finished, waiting to be sent
            service.start()
            await trainer.register()
            await trainer.train(4)

        await serve_until(env, play())

    assert sorted(group["tokens"][0][1] for group in trainer.groups) == list(range(1, 9))
    assert {group["env_id"] for group in trainer.groups} == {0}
    assert not env.drop_counts


@pytest.mark.parametrize("num_steps", [3, 9])
async def test_running_environment_takes_over_the_settings_of_a_replaced_run(
    service: LiveService, make_env: MakeEnv, num_steps: int
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async with ScriptedTrainer(service.url, num_steps=6) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(2), 120)
        trainer.registration |= {
            "replace": True,
            "num_steps": num_steps,
            "starting_step": 1,  # the checkpoint that the trainer goes on from
            "max_token_len": 77,
        }
        trainer.steps = 1
        await trainer.register()
        await asyncio.wait_for(trainer.train(num_steps), 120)
        await asyncio.wait_for(serving, 120)

    assert (env.curr_step, env.config.total_steps, env.max_token_len) == (num_steps, num_steps, 77)
    assert (env.env_id, env.wandb_prepend) == (0, "small_0")


async def test_register_shows_the_token_of_the_environment_variable(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"detail": "unknown token"}, status=401)

    monkeypatch.setenv("ATROPOS_API_TOKEN", "s3cret")
    async with scripted(handler, free_port) as url:
        env = make_env(rollout_server_url=url)
        with pytest.raises(TrajectoryApiError, match="set ATROPOS_API_TOKEN"):
            await env.env_manager()

    assert seen == ["Bearer s3cret"]
    assert "s3cret" not in f"{env.config!r}{vars(env)}{vars(env.service_session)}"


async def test_register_at_an_address_without_its_scheme_is_refused_at_once(
    make_env: MakeEnv,
) -> None:
    env = make_env(rollout_server_url="localhost:18000")

    with pytest.raises(ConfigError, match="'localhost:18000'; expected an address such as http"):
        await asyncio.wait_for(env.env_manager(), 60)


@pytest.mark.parametrize("status", [404, 501])
async def test_register_at_another_server_says_that_it_is_no_service(
    make_env: MakeEnv, free_port: int, status: int
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>\nnothing here")

    async with scripted(handler, free_port) as url:
        env = make_env(rollout_server_url=url)
        # A setting that cannot be used: the command line ends with this one line.
        with pytest.raises(
            ConfigError, match=r"not a trajectory service; check the address"
        ) as caught:
            await asyncio.wait_for(env.env_manager(), 60)

    assert "\n" not in str(caught.value)
    assert url in str(caught.value)


async def test_groups_carry_the_policy_version_their_rollout_started_under(
    make_env: MakeEnv,
) -> None:
    env = make_env()
    env.service_session = RecordingSession()
    env.status_dict = {"current_step": 0, "queue_size": 0, "policy_version": 7}

    async def take_a_step(item: int) -> None:
        env.status_dict = {"current_step": 1, "queue_size": 0, "policy_version": 8}

    env.before_rollout = take_a_step
    env.rollout_scheduler.start(1)
    await until(lambda: env.service_session.sent)

    assert env.service_session.sent[0]["policy_version"] == 7


@pytest.mark.parametrize(
    ("version", "given", "expected"), [(3, None, 3), (3, 1, 1), (None, None, None)]
)
def test_annotate_groups_keeps_the_policy_version_of_a_group(
    version: int | None, given: int | None, expected: int | None
) -> None:
    group = {} if given is None else {"policy_version": given}

    annotate_groups([group, None], SampledVersions(), policy_version=version)

    assert group.get("policy_version") == expected


async def test_environment_serves_a_service_of_may_2025_to_the_end(
    make_env: MakeEnv, free_port: int
) -> None:
    service = May2025Service()

    async with scripted(service, free_port) as url, ScriptedTrainer(url) as trainer:
        env = make_env(rollout_server_url=url)
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert len(trainer.groups) == 6
    assert not env.drop_counts
    assert not env.failure_counts


@pytest.mark.parametrize("form", [np.array, list])
def test_annotate_groups_reads_arrays_as_lists(form: Any) -> None:
    with sampled_versions() as sampled:
        note_sampled(3, tokens=[1, 2], finish_reason="stop", is_from_text=True)
    group = {
        "tokens": form([[1, 2], [1, 3]]),
        "masks": form([[-100, 2], [-100, 3]]),
        "inference_logprobs": form([[1.0, 1.0], [1.0, 1.0]]),
    }

    annotate_groups(group, sampled)

    assert group["finish_reasons"] == ["stop", None]
    assert group["tokenized_from_text"] is True
    assert group["inference_logprobs"] is None

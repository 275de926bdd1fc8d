"""Serving against the real service in process, with a scripted trainer."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from atroposlib.envs import reporting, rollouts, scheduler
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import EngineSetupError, NoDataError
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until, until
from tests.envs.small_environment import SERVERS, SmallEnv
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]


async def test_serve_runs_until_the_trainer_is_done(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url + "/")
    before = asyncio.all_tasks()

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 120)
        await asyncio.wait_for(serving, 120)

    assert env.curr_step == 3
    assert env.config.total_steps == 3
    assert (env.config.batch_size, env.max_token_len) == (4, 64)
    assert len(trainer.groups) == 6
    assert all(group["scores"] == [0.0, 1.0] for group in trainer.groups)
    assert {group["env_id"] for group in trainer.groups} == {0}
    assert env.events == ["setup", "close"]
    assert asyncio.all_tasks() <= before  # nothing new; collected clients may still end


async def test_serve_started_before_service_and_trainer_waits_for_both(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(rollout_server_url=service.url)
    serving = asyncio.create_task(env.env_manager())
    await until(lambda: "not available" in caplog.text)

    service.start()
    await until(lambda: "waiting for the trainer to start" in caplog.text)
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await asyncio.wait_for(trainer.train(3), 120)
        await asyncio.wait_for(serving, 120)

    assert caplog.text.count("waiting for the trainer to start") == 1
    assert env.wandb_prepend == "small_0"


async def test_serve_service_reset_registers_again_and_goes_on(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async def act() -> None:
        async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
            await trainer.register()
            await trainer.train(2)
        service.stop()
        service.start()
        async with ScriptedTrainer(service.url, num_steps=1000, starting_step=7) as trainer:
            await trainer.register()
            await trainer.train(2)
            await until(lambda: env.curr_step == 9)
            assert env.num_cancelled == 0

    await serve_until(env, act())

    assert "does not know this environment" in caplog.text


async def test_serve_rollout_raising_is_counted_and_the_run_goes_on(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async def fail_odd_items(item: int) -> None:
        if item % 2:
            raise ValueError(f"no answer in item {item}")

    env.before_rollout = fail_odd_items
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert env.failure_counts["ValueError"] >= 1
    assert len(trainer.groups) == 6


class RaisingReward(SmallEnv):
    async def postprocess_histories(self, trajectories: Any) -> Any:
        if self.num_items < 8:
            raise ZeroDivisionError("reward")
        return trajectories


async def test_serve_reward_raising_is_counted_and_the_run_goes_on(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(RaisingReward, rollout_server_url=service.url)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert env.failure_counts["ZeroDivisionError"] >= 1


class WrongMasks(SmallEnv):
    async def postprocess_histories(self, trajectories: Any) -> Any:
        if self.num_items < 40:
            return {**trajectories, "masks": [[-100]] * 2}
        return trajectories


class WrongCells(SmallEnv):
    def rollout_cells(self, item: Any) -> Any:
        raise ZeroDivisionError("a cell")


@pytest.mark.parametrize(
    ("env_class", "said"),
    [
        (WrongMasks, "(failures so far: none; groups dropped: {'malformed': "),
        (WrongCells, "sending a group failed: a cell"),
    ],
)
async def test_serve_unusable_groups_hold_back_the_next_as_failures_do(
    service: LiveService,
    make_env: MakeEnv,
    caplog: pytest.LogCaptureFixture,
    env_class: type[SmallEnv],
    said: str,
) -> None:
    service.start()
    env = make_env(env_class, rollout_server_url=service.url)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await until(lambda: "in a row without a usable group" in caplog.text)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    assert said in caplog.text
    assert env.drop_counts["malformed"] + env.failure_counts["ZeroDivisionError"] >= 5


@pytest.mark.parametrize("usable_items", [0, 4])
async def test_serve_whose_first_groups_are_all_malformed_ends_and_says_why(
    service: LiveService,
    make_env: MakeEnv,
    monkeypatch: pytest.MonkeyPatch,
    usable_items: int,
) -> None:
    monkeypatch.setattr(rollouts, "NUM_UNUSABLE_AT_START", 12)
    service.start()

    class AlwaysWrong(SmallEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            if self.num_items <= usable_items:
                return trajectories
            return {**trajectories, "masks": [[-100]] * 2}

    env = make_env(AlwaysWrong, rollout_server_url=service.url)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        # While the run ends, rollouts that were in flight may still be dropped.
        most_dropped = 15 if usable_items else math.inf
        await until(lambda: serving.done() or env.drop_counts["malformed"] > most_dropped)
        is_ended = serving.done()
        serving.cancel()
        [error] = await asyncio.gather(serving, return_exceptions=True)

    assert is_ended == (usable_items == 0)
    if is_ended:
        assert isinstance(error, NoDataError)
        assert re.search(
            r"all of the first \d\d groups were dropped, the last one as malformed: masks\[",
            str(error),
        )


async def test_serve_ends_with_the_trainer_although_total_steps_is_more(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service.start()
    env = make_env(rollout_server_url=service.url, total_steps=1000)

    async with ScriptedTrainer(service.url, num_steps=3) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 120)
        await asyncio.wait_for(serving, 120)

    assert "trainer step 3 of 3" in caplog.text
    assert "done: the training run has ended with step 3" in caplog.text


async def test_serve_goes_on_while_a_trainer_only_restarts(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, total_steps=1000)

    async with ScriptedTrainer(service.url, num_steps=4) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(2), 120)
    async with ScriptedTrainer(service.url, num_steps=4, starting_step=2) as restarted:
        await restarted.register()
        await until(lambda: env.curr_step >= 2)
        assert not serving.done()
        await asyncio.wait_for(restarted.train(2), 120)
        await asyncio.wait_for(serving, 120)

    assert env.curr_step == 4


async def test_serve_tells_that_the_trainer_has_done_the_steps_it_registered(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service.start()
    env = make_env(rollout_server_url=service.url, total_steps=1000, end_with_trainer=False)

    async with ScriptedTrainer(service.url, num_steps=3) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 120)
        await until(lambda: "has done the 3 steps that it registered" in caplog.text)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    assert env.curr_step == 3


async def test_serve_time_outs_are_counted_and_the_run_goes_on(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, worker_timeout=0.05)

    async def hang_on_third(item: int) -> None:
        if item == 3:
            await asyncio.Event().wait()

    env.before_rollout = hang_on_third
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()

        async def act() -> None:
            await until(lambda: env.failure_counts["worker_timeout"])
            await trainer.train(3)

        await serve_until(env, act())


async def test_serve_full_queue_starts_none_and_cancels_none(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, max_batches_offpolicy=2, max_num_workers=64)

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()

        async def act() -> None:
            # 2 batches of 4 sequences are 4 groups of 2, and not one more
            await until(
                lambda: env.service_session is not None and env.service_session.num_groups_sent == 4
            )
            await asyncio.sleep(0.1)
            assert env.num_items == 4
            await trainer.train(1)
            await until(lambda: env.service_session.num_groups_sent == 6)
            await asyncio.sleep(0.1)
            assert env.num_items == 6
            assert env.num_cancelled == 0

        await serve_until(env, act())


async def test_serve_step_jump_evaluates_and_saves_once(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, steps_per_eval=2)
    saved: list[int] = []
    env.save_checkpoint = saved.append

    async with ScriptedTrainer(
        service.url, num_steps=1000, save_checkpoint_interval=2, checkpoint_dir=str(tmp_path)
    ) as trainer:
        await trainer.register()

        async def act() -> None:
            await until(lambda: env.status_dict is not None)
            refresh, env.get_status = env.get_status, lambda: asyncio.sleep(0)  # looks away
            await trainer.train(3)  # step 0 to 3
            env.get_status = refresh
            await until(lambda: env.curr_step == 3)
            await asyncio.sleep(0.05)

        await serve_until(env, act())

    assert env.num_evaluations == 1
    assert saved == [2]


class BrokenDataset(SmallEnv):
    async def get_next_item(self) -> Any:
        raise OSError("data set is gone")


async def test_serve_next_item_raising_ends_the_run_in_order(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(BrokenDataset, rollout_server_url=service.url)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        with pytest.raises(OSError, match="data set is gone"):
            await asyncio.wait_for(env.env_manager(), 60)

    assert env.events == ["setup", "close"]
    assert not env.service_session.is_registered


class LongEvaluation(SmallEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await super().evaluate()
        self.over = asyncio.Event()
        await self.over.wait()


@pytest.mark.parametrize(
    ("handling", "goes_on"), [("STOP_TRAIN", False), ("LIMIT_TRAIN", True), ("NONE", True)]
)
async def test_serve_during_an_evaluation(
    service: LiveService, make_env: MakeEnv, handling: str, goes_on: bool
) -> None:
    service.start()
    env = make_env(
        LongEvaluation,
        rollout_server_url=service.url,
        steps_per_eval=1,
        eval_handling=handling,
        max_batches_offpolicy=0,  # the queue is never full
    )

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()

        async def act() -> None:
            await trainer.train(1)
            await until(lambda: env.num_evaluations == 1)
            num_items = env.num_items
            if goes_on:
                await until(lambda: env.num_items > num_items + 4)
                return
            await asyncio.sleep(0.1)
            assert env.num_items == num_items
            env.over.set()
            await until(lambda: env.num_items > num_items)

        await serve_until(env, act())


async def test_serve_cancelled_ends_everything_and_disconnects(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, data_path_to_save_groups="groups.jsonl")
    before = asyncio.all_tasks()
    hanging = asyncio.Event()

    async def hang(item: int) -> None:
        if item > 2:
            hanging.set()
            await asyncio.Event().wait()

    env.before_rollout = hang
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(hanging.wait(), 60)
        await until(lambda: env.service_session.num_groups_sent == 2)
        serving.cancel()
        await asyncio.wait({serving})
        # A disconnected environment no longer counts in the sum of weights.
        status = await trainer.client.status_env(0)

    assert serving.cancelled()
    assert status["env_weight"] == pytest.approx(0.01)
    assert env.events == ["setup", "close"]
    assert env.workers == set()
    assert env.num_cancelled > 0
    assert asyncio.all_tasks() <= before  # nothing new; collected clients may still end
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[0.0, 1.0]] * 2


async def test_serve_logs_metrics_with_prefix_drops_and_failures(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, metrics_path="metrics.jsonl")
    env.drop_counts["scores_equal"] = 3
    env.failure_counts["ValueError"] = 2

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(4, pace_s=0.05))

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1]["small_0_drops/scores_equal"] == 3
    assert records[-1]["small_0_failures/ValueError"] == 2
    assert records[-1]["small_0_train/completion_lengths"] == 2.0
    assert records[-1]["small_0_train/rollouts"]["rows"][0] == ["ABC", 0.0]


async def test_serve_refused_group_is_counted_with_the_services_words(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async def act() -> None:
        await until(lambda: env.service_session is not None and env.service_session.is_registered)
        group = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}
        await env.handle_send_to_api({**group, "messages": [[{"content": "no role"}], []]})

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        await serve_until(env, act())

    assert env.drop_counts["refused_by_service"] == 1
    assert "422" in caplog.text
    assert "role" in caplog.text


async def test_serve_rollout_without_data_keeps_its_slot_for_a_moment(make_env: MakeEnv) -> None:
    env = make_env()
    env.empty_rollout_s = 3600.0
    env.collect_trajectories = _nothing

    env.rollout_scheduler.start("item")
    await until(lambda: env.task_duration)
    for _ in range(5):
        await asyncio.sleep(0)

    assert len(env.workers) == 1
    assert env.running_items == {}
    await env.rollout_scheduler.shut_down(grace_s=0.01)


async def test_serve_rollout_that_cancels_itself_is_counted(make_env: MakeEnv) -> None:
    env = make_env()

    async def cancel_itself(item: Any) -> Any:
        inner = asyncio.ensure_future(asyncio.sleep(100))
        inner.cancel()
        await inner

    env.collect_trajectories = cancel_itself
    env.rollout_scheduler.start("item")
    await until(lambda: not env.workers)

    assert env.failure_counts == {"RuntimeError": 1}


async def test_serve_rollout_that_loses_its_cancellation_sends_no_group(make_env: MakeEnv) -> None:
    env = make_env()
    sent: list[Any] = []

    async def lose_cancellation(item: Any) -> Any:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(100)
        return {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}, []

    async def send(*args: Any) -> None:
        sent.append(args)

    env.collect_trajectories = lose_cancellation
    env.handle_send_to_api = send
    env.rollout_scheduler.start("item")
    await asyncio.sleep(0)

    assert env.rollout_scheduler.set_running_aside() == 1
    await until(lambda: not env.rollout_scheduler._ending)

    assert env.backlog == ["item"]
    assert sent == []


async def test_loop_of_a_stalled_run_keeps_a_bounded_number_of_timings(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "MAX_LOOP_VALUES", 3)
    env = make_env()

    async def same_status() -> None:
        env.status_dict = {"current_step": 0, "queue_size": 0}

    env.get_status = same_status
    for _ in range(9):
        await env._serving_loop._refresh_status()

    assert len(env.mainloop_timings) == 3


async def _nothing(item: Any) -> tuple[None, list[Any]]:
    return None, []


async def test_serve_ends_once_over_wrong_settings_in_the_first_rollouts(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async def refuse(item: int) -> None:
        raise EngineSetupError("inference server u serves no model 'X'; it serves: tiny")

    env.before_rollout = refuse
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        with pytest.raises(EngineSetupError, match="it serves: tiny"):
            await asyncio.wait_for(env.env_manager(), 120)

    assert "Traceback" not in caplog.text
    assert env.events == ["setup", "close"]


async def test_serve_ends_over_wrong_settings_that_the_environment_has_caught(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async def nothing(item: int) -> Any:
        with suppress(EngineSetupError):
            await env.server.tokens_and_logprobs_completion(prompt="hi")
        return None, []

    env.collect_trajectories = nothing
    async with ScriptedEngine(["ok"], model="tiny", aliases=()) as engine:
        config = SERVERS[0].model_copy(update={"base_url": engine.base_url, "server_type": "vllm"})
        env.server = ServerManager([config])
        async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
            await trainer.register()
            with pytest.raises(EngineSetupError, match="it serves: tiny"):
                await asyncio.wait_for(env.env_manager(), 120)


async def test_serve_goes_on_over_wrong_settings_after_the_first_group(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, max_num_workers=1)

    async def refuse_the_second(item: int) -> None:
        if item % 2 == 0:
            raise EngineSetupError("the adapter is loaded again")

    env.before_rollout = refuse_the_second
    async with ScriptedTrainer(service.url, num_steps=3) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 120)
        await asyncio.wait_for(serving, 120)

    assert env.failure_counts["EngineSetupError"] > 1
    assert caplog.text.count("Traceback") == 1


async def served_to_its_end(env: Any, service: LiveService) -> BaseException:
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        with pytest.raises(NoDataError) as caught:
            await asyncio.wait_for(env.env_manager(), 60)
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("tokens"), "KeyError: 'tokens'"),
        (TemplateError("roles"), "TemplateError: roles"),
        (EngineStatusError("text only", status=400), "EngineStatusError: text only"),
    ],
)
async def test_serve_whose_first_rollouts_all_fail_by_a_mistake_ends_and_names_it(
    service: LiveService,
    make_env: MakeEnv,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    monkeypatch.setattr(scheduler, "NUM_UNUSABLE_AT_START", 12)
    monkeypatch.setattr(scheduler, "MISTAKES_S", 0.0)
    service.start()

    class Mistaken(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            raise error

    ended = await served_to_its_end(make_env(Mistaken, rollout_server_url=service.url), service)

    assert f"rollouts failed, the last one with {said}" in str(ended)
    assert ("`check`" in str(ended)) == (not isinstance(error, EngineStatusError))


@pytest.mark.parametrize(
    ("field", "reason"), [({"images": object()}, "encodable"), ({"overrides": {"a": 1}}, "refused")]
)
async def test_serve_whose_first_groups_cannot_be_sent_ends_although_some_have_equal_scores(
    service: LiveService,
    make_env: MakeEnv,
    monkeypatch: pytest.MonkeyPatch,
    field: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(rollouts, "NUM_UNUSABLE_AT_START", 12)
    service.start()

    class Unsendable(SmallEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            scores = [0.0, 0.0] if self.num_items % 4 == 0 else trajectories["scores"]
            return {**trajectories, **field, "scores": scores}

    error = await served_to_its_end(make_env(Unsendable, rollout_server_url=service.url), service)

    assert reason in str(error)


async def test_serve_groups_without_a_difference_name_the_remedy(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()

    class Constant(SmallEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            return {**trajectories, "scores": [1.0, 1.0]}

    env = make_env(Constant, rollout_server_url=service.url)
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, until(lambda: "10 so far, every group: `check`" in caplog.text))


@pytest.mark.parametrize(
    ("most_items", "text"),
    [
        (0, "get_next_item returned None at its first call"),
        (None, "10 items in a row gave no group: the collecting hooks of Silent returned none"),
    ],
)
async def test_serve_without_items_or_groups_says_so(
    service: LiveService,
    make_env: MakeEnv,
    caplog: pytest.LogCaptureFixture,
    most_items: int | None,
    text: str,
) -> None:
    service.start()

    class Silent(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            return None, []

    env = make_env(Silent, rollout_server_url=service.url)
    env.most_items = most_items
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, until(lambda: text in caplog.text))

    assert caplog.text.count(text) == 1

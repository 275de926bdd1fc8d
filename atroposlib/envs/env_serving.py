"""Serving: roll out, score and send groups for a trainer until its run is over.

setup -> wandb -> register -> info -> [ status -> step checks ] every moment
                                      [ fill -> handle_env -> send ] whenever there is room
at the end, however it comes: rollouts end, close(), disconnect, logs closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from atroposlib.envs.capacity import (
    crossed_boundary,
    failure_pause_s,
    is_queue_full,
    is_run_finished,
    worker_limit,
)
from atroposlib.envs.config import EvalHandlingEnum, StragglerPolicyEnum
from atroposlib.envs.env_delivery import stamp_policy_version
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.env_registration import RegisteredEnv
from atroposlib.envs.evaluation_runner import EvaluationRunner
from atroposlib.envs.group_assembly import as_pair
from atroposlib.envs.rollout_scheduler import RolloutScheduler
from atroposlib.envs.server_handling.weight_versions import sampled_versions

__all__ = ["ServingEnv"]

logger = logging.getLogger(__name__)


class PartAttribute:
    """An attribute of the environment that lives in one of its parts."""

    def __init__(self, part: str, name: str) -> None:
        self._part = part
        self._name = name

    def __get__(self, env: ServingEnv | None, owner: type[ServingEnv]) -> Any:
        return self if env is None else getattr(getattr(env, self._part), self._name)

    def __set__(self, env: ServingEnv, value: Any) -> None:
        # Before the base class's constructor there is no part yet; that one begins with its own.
        if self._part in vars(env):
            setattr(getattr(env, self._part), self._name, value)


class ServingEnv(RegisteredEnv):
    """The serving half of an environment.

    Attributes:
        status_interval_s: seconds between two looks at the service's queue.
        shutdown_grace_s: seconds a finished group may take to be sent when the run ends.
        empty_rollout_s: seconds a rollout without data keeps its slot at least.
        rollout_scheduler: owner of the rollout tasks.
        evaluation_runner: owner of the evaluation task.
    """

    status_interval_s = 0.2
    shutdown_grace_s = 10.0
    empty_rollout_s = 0.1

    workers = PartAttribute("rollout_scheduler", "workers")
    backlog = PartAttribute("rollout_scheduler", "backlog")
    running_items = PartAttribute("rollout_scheduler", "running_items")
    eval_runner = PartAttribute("evaluation_runner", "task")
    last_completed_item = PartAttribute("rollout_scheduler", "last_completed_item")

    rollout_scheduler: RolloutScheduler
    evaluation_runner: EvaluationRunner
    last_loop_time: float | None
    _failures_in_a_row: int
    _trainer_steps: int

    async def env_manager(self) -> None:
        """Serve until the trainer has done its steps.

        Waits for the service and the trainer. Cancelling is safe and the way to stop early:
        rollouts may go on for `rollout_grace_s`, what is finished is delivered, `close` is called,
        the service is told, logs are closed. Cancelling again cuts the grace short.
        """
        self.service_session = self._open_session()
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            ending.callback(self._close_records)
            ending.push_async_callback(self.service_session.leave, timeout_s=self.shutdown_grace_s)
            ending.push_async_callback(self._run_close_hook)
            ending.push_async_exit(self._end_rollouts)
            ending.push_async_callback(
                self.evaluation_runner.shut_down, grace_s=self.shutdown_grace_s
            )
            await settle(self.setup())
            await self.setup_wandb()
            await settle(self.register_env())
            await settle(self.get_server_info())
            self.run_figures.begin()
            await self.rollout_scheduler.run(
                refresh=self._refresh_status,
                fill=self._fill_workers,
                interval_s=self.status_interval_s,
            )
            logger.info("the trainer has done its %d steps", self.config.total_steps)
            await self.evaluation_runner.finish()

    async def _end_rollouts(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the rollouts; those of a run that is stopped, not over, get time to finish."""
        is_stopped = isinstance(error, asyncio.CancelledError)
        await self.rollout_scheduler.shut_down(
            grace_s=self.shutdown_grace_s,
            rollout_grace_s=self.config.rollout_grace_s if is_stopped else 0.0,
        )

    async def _run_close_hook(self) -> None:
        self.run_figures.end()
        await self._run_tolerated(self.close(), "close")
        await self._run_tolerated(self._close_score_pool(), "closing the score pool")
        await self._run_tolerated(self.server.close(), "closing the inference connections")

    def _close_records(self) -> None:
        self.run_log.finish()
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
        self._side_thread.close()
        logger.info(
            "environment closed at step %d; groups dropped: %s; failures: %s",
            self.curr_step,
            dict(self.drop_counts) or "none",
            dict(self.failure_counts) or "none",
        )

    async def _run_tolerated(self, result: Any, hook: str) -> None:
        """Await a hook without which the run can go on; count and log when it fails."""
        try:
            await settle(result)
        except Exception as error:
            self.count_failure(type(error).__name__)
            logger.exception("%s failed", hook)

    async def _refresh_status(self) -> bool:
        """Look at the service once; tell whether the run goes on."""
        now = time.time()
        if self.last_loop_time is not None:
            self.mainloop_timings.append(now - self.last_loop_time)
        self.last_loop_time = now
        await self.get_status()
        await settle(self.env_step_checks())
        return not is_run_finished(
            current_step=self._queue_status().current_step, total_steps=self.config.total_steps
        )

    async def env_step_checks(self) -> None:
        """Act on a new trainer step: evaluation, checkpoint, metrics; called after each status."""
        new_step = self._queue_status().current_step
        if new_step == self.curr_step:
            return
        evaluation_step = crossed_boundary(
            old_step=self.curr_step, new_step=new_step, interval=self.config.steps_per_eval
        )
        if evaluation_step is not None:
            self._start_evaluation()
        checkpoint_step = crossed_boundary(
            old_step=self.curr_step, new_step=new_step, interval=self.checkpoint_interval
        )
        if checkpoint_step is not None:
            await self._run_tolerated(
                _called(self.save_checkpoint, checkpoint_step), "save_checkpoint"
            )
        self.curr_step = new_step
        if 0 < self._trainer_steps <= new_step < self.config.total_steps:
            logger.info(
                "the trainer has done the %d steps that it registered; waiting for more, up to "
                "total_steps (%d); --env.total_steps -1 ends with the trainer",
                self._trainer_steps,
                self.config.total_steps,
            )
        logger.info(
            "trainer step %d of %d; %d groups queued, %d rollouts running",
            new_step,
            self.config.total_steps,
            self._queue_status().queue_groups,
            len(self.running_items),
        )
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            self.items_sent_this_step = 0
            await self._run_tolerated(_called(self.wandb_log, {}), "wandb_log")

    def _start_evaluation(self) -> None:
        self.evaluation_runner.start(lambda: settle(self.evaluate()))
        if self.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
            num_items = self.rollout_scheduler.set_running_aside()
            logger.info("evaluating; %d running rollouts are set aside", num_items)

    async def _fill_workers(self) -> None:
        """Start what may start, slowly while every rollout fails."""
        pause_s = failure_pause_s(self._failures_in_a_row)
        if pause_s > 0:
            logger.warning(
                "%d rollouts failed in a row; waiting %.1f s before the next",
                self._failures_in_a_row,
                pause_s,
            )
            await asyncio.sleep(pause_s)
        if len(self.workers) < self.max_num_workers and not self._are_starts_held_back():
            await settle(self.add_train_workers())

    def _are_starts_held_back(self) -> bool:
        return not self._joined_session().is_registered or is_queue_full(
            self._queue_status(), self._capacity_limits()
        )

    async def add_train_workers(self) -> None:
        """Start rollouts up to the limit; called when there is room, never to cancel any."""
        limit = self._worker_limit()
        if self.curr_step > 0 or self.workers:
            self.workers_added_list.append(limit - len(self.workers))
        is_retrying = self.config.straggler_policy == StragglerPolicyEnum.RETRY
        await self.rollout_scheduler.fill(
            self._worker_limit,
            timeout_s=self.config.worker_timeout,
            retries=self.config.straggler_retries if is_retrying else 0,
        )

    def _worker_limit(self) -> int:
        if self._are_starts_held_back():
            return 0
        ratios = {
            EvalHandlingEnum.STOP_TRAIN: 0.0,
            EvalHandlingEnum.LIMIT_TRAIN: self.config.eval_limit_ratio,
            EvalHandlingEnum.NONE: 1.0,
        }
        ratio = ratios[self.config.eval_handling] if self.evaluation_runner.is_running else 1.0
        return worker_limit(self._queue_status(), self._capacity_limits(), evaluation_ratio=ratio)

    async def handle_env(self, item_uuid: str) -> Any:
        """Roll out, score and send one item; the body of every worker.

        Args:
            item_uuid: key in `running_items`; an unknown one gives None.

        Returns:
            What was collected; None when the rollout failed or gave nothing.
        """
        record = self.running_items.get(item_uuid)
        if record is None:
            return None
        policy_version = (self.status_dict or {}).get("policy_version")
        first_step = self.curr_step
        with sampled_versions() as sampled:
            scored = await self._collect_scored_groups(record["item"])
        if sampled.oldest is not None:
            policy_version = sampled.oldest
        self.running_items.pop(item_uuid, None)
        duration_s = time.time() - record["start_time"]
        self.task_duration.append(duration_s)
        self.task_successful.append(int(scored is not None))
        if scored is None:
            self.failed_task_duration.append(duration_s)
        else:
            self.succeeded_task_duration.append(duration_s)
        if scored:
            stamp_policy_version(scored, policy_version)
            self.run_figures.add_staleness(self.curr_step - first_step)
            num_unusable = self._num_unusable_groups()
            await self._run_tolerated(
                self.handle_send_to_api(scored, record["item"]), "sending a group"
            )
            # A rollout that nobody can use has failed too, and holds back the next.
            is_unusable = self._is_unusable(scored, before=num_unusable)
            self._failures_in_a_row = self._failures_in_a_row + 1 if is_unusable else 0
            self.rollout_scheduler.request_refresh()
        await settle(self.cleanup())
        if not scored:
            # Else an environment that swallows errors would run through its data set in seconds.
            await asyncio.sleep(max(0.0, self.empty_rollout_s - duration_s))
        return scored

    async def _collect_scored_groups(self, item: Any) -> Any:
        """Collect and postprocess one item; None when that fails."""
        try:
            collected, backlog = as_pair(await settle(self.collect_trajectories(item)))
            self.backlog.extend(backlog)
            if collected:
                collected = await settle(self.postprocess_histories(collected))
        except Exception as error:  # a failed rollout is a result: counted, the run goes on
            self.count_failure(type(error).__name__)
            self._failures_in_a_row += 1
            logger.exception("a rollout failed; its group is lost")
            return None
        if not collected:
            self._failures_in_a_row = 0
        return collected


async def _called(hook: Any, *args: Any) -> Awaitable[Any]:
    """Call a hook inside a coroutine, so that what it raises is raised where it is awaited."""
    return await settle(hook(*args))  # type: ignore[no-any-return]

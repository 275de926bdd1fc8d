"""Serving: roll out, score and send groups for a trainer until its run is over.

setup -> wandb -> register -> info -> [ status -> step checks ] every moment
                                      [ fill -> handle_env -> send ] whenever there is room
at the end, however it comes: rollouts end, last metrics, close(), disconnect, logs closed

Registering an environment with the trajectory service, and keeping that standing.

wandb_info (waits for the trainer) -> register-env (waits for it to start) -> info
status-env, again and again; an id the service forgot goes back to register-env
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any

from atroposlib.envs.capacity import (
    CapacityLimits,
    QueueStatus,
    crossed_boundary,
    derived_batch_size,
    failure_pause_s,
    is_queue_full,
    is_run_finished,
    worker_limit,
)
from atroposlib.envs.config import EvalHandlingEnum, StragglerPolicyEnum
from atroposlib.envs.delivery import (
    DeliveringEnv,
    mark_tokenized_from_text,
    stamp_finish_reasons,
    stamp_policy_version,
)
from atroposlib.envs.hooks import settle
from atroposlib.envs.reporting import dated_run_name
from atroposlib.envs.rollouts import as_pair
from atroposlib.envs.run_snapshot import RepeatedErrors
from atroposlib.envs.scheduler import EvaluationRunner, RolloutScheduler
from atroposlib.envs.server_handling.server_baseline import sampled_versions
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.service_session import UNKNOWN_ENV_STATUSES, EngineWatch, EnvSession
from atroposlib.errors import (
    ConfigError,
    EngineSetupError,
    InferenceError,
    MissingExtraError,
    TrajectoryApiError,
)

__all__ = [
    "RegisteredEnv",
    "ServingEnv",
    "cancelled",
]


class RegisteredEnv(DeliveringEnv):
    """The registered half of a serving environment.

    Attributes:
        retry_interval_s: seconds between two attempts while the service or trainer is missing.
        env_id: id of the registration, None before it.
        status_dict: latest `/status-env` reply, None before the first.
        max_num_workers: rollouts at once, whatever the queue.
        checkpoint_interval: trainer steps between two checkpoints.
    """

    retry_interval_s = 1.0

    env_id: int | None
    status_dict: dict[str, Any] | None
    max_num_workers: int
    checkpoint_interval: int
    _asked_steps: int
    _groups_in_status: int

    def _open_session(self) -> EnvSession:
        from atroposlib.api.client import RetryRule, TrajectoryApiClient

        client = TrajectoryApiClient(
            self.config.rollout_server_url,
            # The session repeats posts itself: the id in them may have changed meanwhile.
            post_retry=RetryRule(attempts=1),
            token=self._service_token(),
        )
        return EnvSession(client, retry_s=self.retry_interval_s)

    def _service_token(self) -> str | None:
        """Return what the service is shown when it asks for a token."""
        return None

    def _joined_session(self) -> EnvSession:
        if self.service_session is None:
            self.service_session = self._open_session()
        return self.service_session

    async def setup_wandb(self) -> None:
        """Open the Weights & Biases run under the trainer's project, once the trainer named it.

        Does nothing when the environment has set `wandb_project` and opened a run by itself.
        """
        if not self.config.use_wandb or self.wandb_project is not None:
            return
        session = self._joined_session()

        async def project_and_group() -> dict[str, Any] | None:
            reply = await session.client.wandb_info()
            return reply if reply["project"] is not None else None

        reply = await session.ask(project_and_group, waiting_for="the trainer to register")
        self.wandb_project, self.wandb_group = reply["project"], reply["group"]
        stem = self.config.wandb_name
        self._start_run_log(name=dated_run_name(stem, now=time.time()) if stem else None)

    async def _register_env(self) -> dict[str, Any]:
        """Ask once to be registered; return the reply."""
        session = self._joined_session()
        # Where a trainer took over from an export or another trainer, the environment keeps its id.
        earlier = session.earlier_registration
        return await session.client.register_env(
            **({} if earlier is None else {"earlier": earlier}),
            max_token_length=self.config.max_token_length,
            desired_name=self.desired_name,
            weight=self.config.inference_weight,
            group_size=self.config.group_size,
            min_batch_allocation=self.config.min_batch_allocation,
        )

    async def register_env(self) -> None:
        """Register with the service, waiting for it and for the trainer to start.

        Raises:
            ConfigError: neither the config nor the trainer gives a number of steps.
        """
        session = self._joined_session()

        async def accepted() -> dict[str, Any] | None:
            reply = await self._register_env()
            return reply if reply["status"] == "success" else None

        reply = await session.ask(accepted, waiting_for="the trainer to start")
        is_first = session.env_id is None
        self.env_id = reply["env_id"]
        self.wandb_prepend = reply["wandb_name"]
        if is_first or reply["starting_step"] < self.curr_step:
            # A later step is left to `env_step_checks`: boundaries may lie on the way to it.
            self.curr_step = reply["starting_step"]
        self.checkpoint_dir = reply["checkpoint_dir"]
        self.checkpoint_interval = reply["checkpoint_interval"]
        self._trainer_steps = reply["num_steps"]
        self.config.total_steps = self._last_step(reply["num_steps"])
        session.enter(reply["env_id"], run_id=reply.get("run_id"))
        self._name_metrics_file(reply["wandb_name"])
        logger.info("registered as %s at step %d", self.wandb_prepend, self.curr_step)
        if is_first and self.curr_step > 0:
            self.load_checkpoint()

    def _last_step(self, trainer_steps: int) -> int:
        """Return the step to end at: the trainer's last, or `total_steps` where that is less."""
        asked = self._asked_steps
        if asked == -1:
            if trainer_steps == -1:
                raise ConfigError(
                    "total_steps is -1, but the trainer registered no number of steps either; "
                    "set --env.total_steps"
                )
            return trainer_steps
        if self.config.end_with_trainer and 0 < trainer_steps < asked:
            return trainer_steps
        return asked

    async def get_server_info(self) -> None:
        """Take batch size and length limit from the trainer.

        Raises:
            ConfigError: no batch size is known, or a group does not fit a batch.
        """
        session = self._joined_session()
        info = await session.ask(session.client.info, waiting_for="the trainer's settings")
        if info["batch_size"] != -1:
            self.config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
        if self.max_token_len <= 0:
            logger.info("the trainer sets no length limit; groups of any length are sent")
        batch_size, group_size = self.config.batch_size, self.config.group_size
        if batch_size == -1:
            raise ConfigError(
                "no batch size is known: the trainer registered none and env.batch_size is -1"
            )
        if group_size > batch_size:
            raise ConfigError(
                f"group_size is {group_size} but the trainer's batch_size is {batch_size}; "
                "a group must fit into one batch"
            )

    async def get_status(self) -> None:
        """Fetch the queue's status into `status_dict`, registering again when we were forgotten."""
        session = self._joined_session()
        groups_in_status = 0

        async def status() -> dict[str, Any] | None:
            nonlocal groups_in_status
            for _ in range(2):  # the second time under a new registration
                groups_in_status = session.num_groups_sent
                try:
                    if session.env_id is not None:
                        return await session.status(session.env_id)
                except TrajectoryApiError as error:
                    if error.status not in UNKNOWN_ENV_STATUSES:
                        raise
                    logger.warning(
                        "the service does not know us any more (%s); registering again", error
                    )
                session.forget_registration()
                await settle(self.register_env())
                await settle(self.get_server_info())
            return None

        self.status_dict = await session.ask(status, waiting_for="the status of the queue")
        self._groups_in_status = groups_in_status
        self.server.policy_version = self.status_dict.get("policy_version")
        self.max_num_workers = self._most_workers()
        if self.config.inference_weight >= 0:
            await settle(self.server.update_weight(self.status_dict.get("env_weight", 1.0)))

    def _most_workers(self) -> int:
        if self.config.max_num_workers != -1:
            return self.config.max_num_workers
        return self.config.max_num_workers_per_node * len(self.server.servers)

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch this environment may fill, -1 when unknown."""
        if self.status_dict is None:
            return self.config.batch_size
        return derived_batch_size(
            batch_size=self.config.batch_size,
            unallocated_fraction=self.status_dict.get("unallocated_fraction", 1.0),
            min_batch_allocation=self.config.min_batch_allocation,
        )

    def _queue_status(self) -> QueueStatus:
        reply = self.status_dict or {"current_step": self.curr_step, "queue_size": 0}
        unreported = self._joined_session().num_groups_sent - self._groups_in_status
        return QueueStatus.from_reply(reply, unreported_groups=unreported)

    def _capacity_limits(self) -> CapacityLimits:
        return CapacityLimits(
            group_size=self.config.group_size,
            batch_size=self.config.batch_size,
            max_batches_offpolicy=self.config.max_batches_offpolicy,
            max_workers=self.max_num_workers,
            total_steps=self.config.total_steps,
            min_batch_allocation=self.config.min_batch_allocation,
        )


logger = logging.getLogger(__name__)

LONGEST_LOOK_PAUSE_S = 15.0


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
        final_engine_timeout_s: seconds for which no inference server may be up while the final
            evaluation waits for one; the training run is over then.
        rollout_scheduler: owner of the rollout tasks.
        evaluation_runner: owner of the evaluation task.
    """

    status_interval_s = 0.2
    shutdown_grace_s = 10.0
    empty_rollout_s = 0.1
    final_engine_timeout_s = 60.0

    workers = PartAttribute("rollout_scheduler", "workers")
    backlog = PartAttribute("rollout_scheduler", "backlog")
    running_items = PartAttribute("rollout_scheduler", "running_items")
    eval_runner = PartAttribute("evaluation_runner", "task")
    last_completed_item = PartAttribute("rollout_scheduler", "last_completed_item")

    rollout_scheduler: RolloutScheduler
    evaluation_runner: EvaluationRunner
    last_loop_time: float | None
    _failures_in_a_row: int
    _failures_told: int
    _repeated_errors: RepeatedErrors
    _trainer_steps: int
    _num_evaluations_logged: int
    _step_logged: int
    _engine_watch: EngineWatch

    async def env_manager(self) -> None:
        """Serve until the trainer has done its steps.

        Waits for the service and the trainer. Cancelling is safe and the way to stop early:
        rollouts may go on for `rollout_grace_s`, what is finished is delivered, `close` is called,
        the service is told, logs are closed. Cancelling again cuts the grace short.

        Raises:
            InferenceError: no inference server was up for `engine_timeout`, before the last step.
        """
        self.service_session = self._open_session()
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            ending.push(self._close_records)
            ending.push_async_callback(self.service_session.leave, timeout_s=self.shutdown_grace_s)
            ending.push_async_callback(self._run_close_hook)
            ending.push_async_callback(self._log_last_metrics)
            ending.push_async_exit(self._end_rollouts)
            ending.push_async_callback(
                self.evaluation_runner.shut_down, grace_s=self.shutdown_grace_s
            )
            await settle(self.setup())
            self._expect_engine_tokenizer()
            await self.setup_wandb()
            await settle(self.register_env())
            await settle(self.get_server_info())
            self.run_figures.begin()
            self._begin_engine_watch()
            async with self._ending_without_engines():
                await self.rollout_scheduler.run(
                    refresh=self._refresh_status,
                    fill=self._fill_workers,
                    interval_s=self.status_interval_s,
                )
            logger.info("%s", self._ending_text())
            await self._finish_evaluation()

    def _ending_text(self) -> str:
        """Say at which step serving ends, and whose last step that is."""
        total_steps = self.config.total_steps
        if total_steps < self._trainer_steps:
            return (
                f"done: step {total_steps} is reached (--env.total_steps); the trainer goes on to "
                f"step {self._trainer_steps} without this environment"
            )
        return f"done: the training run has ended with step {total_steps}"

    def _begin_engine_watch(self) -> None:
        if isinstance(self.server, ServerManager):
            self._engine_watch = EngineWatch(self.server.servers)

    @asynccontextmanager
    async def _ending_without_engines(self) -> AsyncIterator[None]:
        """Have the rollouts end when no inference server has been up for `engine_timeout`."""
        limit_s = self.config.engine_timeout

        async def watch() -> None:
            await self._wait_until_engines_left(limit_s)
            self.rollout_scheduler.stop(
                InferenceError(
                    f"no inference server was up for {limit_s:g} s ({self._engine_watch.names}), "
                    f"and step {self.curr_step} of {self.config.total_steps} is not the last: the "
                    "engine may have left with the trainer. Start them again, then this "
                    "environment; --env.engine_timeout sets how long is waited, 0 without limit"
                )
            )

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            await cancelled(watching)

    async def _wait_until_engines_left(self, limit_s: float) -> None:
        """Wait until no inference server has been up for so long; 0: without end."""
        pause_s = limit_s / 20 if limit_s else LONGEST_LOOK_PAUSE_S
        while True:
            await self._engine_watch.look()
            if 0 < limit_s <= self._engine_watch.away_s:
                return
            await asyncio.sleep(min(LONGEST_LOOK_PAUSE_S, pause_s))

    async def _finish_evaluation(self) -> None:
        """Wait for the final evaluation as long as there is an inference server for it."""
        limit_s = self.final_engine_timeout_s
        if self.config.engine_timeout:
            limit_s = min(limit_s, self.config.engine_timeout)
        finishing = asyncio.create_task(self.evaluation_runner.finish())
        watching = asyncio.create_task(self._wait_until_engines_left(limit_s))
        try:
            await asyncio.wait({finishing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                self.count_failure("final_evaluation")
                logger.error(
                    "the final evaluation is given up: no inference server was up for %g s (%s). "
                    "The training run is over, the engine may have left with the trainer",
                    limit_s,
                    self._engine_watch.names,
                )
        finally:
            await cancelled(finishing)
            await cancelled(watching)

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

    async def _log_last_metrics(self) -> None:
        """Log what nothing has logged yet: the last step, its rollouts, the final evaluation."""
        has_rollouts = self.items_sent_this_step > 0 or bool(self.rollouts_for_wandb)
        has_evaluation = self.evaluation_runner.num_ended > self._num_evaluations_logged
        if has_rollouts or has_evaluation or self.curr_step > self._step_logged:
            await self._log_metrics()

    async def _log_metrics(self) -> None:
        self.items_sent_this_step = 0
        self._num_evaluations_logged = self.evaluation_runner.num_ended
        self._step_logged = self.curr_step
        await self._run_tolerated(_called(self.wandb_log, {}), "wandb_log")

    async def _run_close_hook(self) -> None:
        self.run_figures.end()
        await self._run_tolerated(self.close(), "close")
        await self._run_tolerated(self._close_score_pool(), "closing the score pool")
        await self._run_tolerated(self.server.close(), "closing the inference connections")

    def _close_records(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if isinstance(error, Exception) and not self.failure_counts:
            self.count_failure(type(error).__name__)  # what ends the run has failed, too
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
        except Exception as error:  # noqa: BLE001 - logged, with its traceback where it is new
            self.count_failure(type(error).__name__)
            self._repeated_errors.log(f"{hook} failed", error)

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
                "total_steps (%d); --env.end_with_trainer true ends with the trainer",
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
        is_last = is_run_finished(current_step=new_step, total_steps=self.config.total_steps)
        if is_last:
            return  # logged once the rollouts and the final evaluation have ended
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            await self._log_metrics()

    def _start_evaluation(self) -> None:
        self._begin_evaluation()
        self.evaluation_runner.start(lambda: settle(self.evaluate()))
        if self.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
            num_items = self.rollout_scheduler.set_running_aside()
            logger.info("evaluating; %d running rollouts are set aside", num_items)

    async def _fill_workers(self) -> None:
        """Start what may start, slowly while every rollout fails."""
        pause_s = failure_pause_s(self._failures_in_a_row)
        if pause_s > 0:
            is_told = self._failures_in_a_row >= 10 * self._failures_told
            logger.log(
                logging.WARNING if is_told else logging.DEBUG,
                "%d rollouts failed in a row; waiting %.1f s before the next (failures so far: %s)",
                self._failures_in_a_row,
                pause_s,
                dict(self.failure_counts),
            )
            self._failures_told = self._failures_in_a_row if is_told else self._failures_told
            await asyncio.sleep(pause_s)
        else:
            self._failures_told = 0
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
            stamp_finish_reasons(scored, sampled)
            mark_tokenized_from_text(scored, has_text=sampled.has_text)
            if self.curr_step >= first_step:  # else the trainer went back to a checkpoint
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
        except Exception as error:  # noqa: BLE001 - a failed rollout is a result, and counted
            self.count_failure(type(error).__name__)
            self._failures_in_a_row += 1
            if not self._end_over(error):
                self._repeated_errors.log("a rollout failed, its group is lost", error)
            return None
        if not collected:
            self._failures_in_a_row = 0
            self._end_over(self._setup_error())
        return collected

    def _end_over(self, error: Exception | None) -> bool:
        """End the run over wrong settings met before the first group; tell whether it ends.

        Later the same error is a failed rollout: an engine may be restarted with other settings.
        """
        is_final = isinstance(error, ConfigError | MissingExtraError)
        if error is None or not is_final or self.run_figures.num_groups:
            return False
        self.rollout_scheduler.stop(error)
        return True

    def _setup_error(self) -> EngineSetupError | None:
        """Return why no request has had an answer, where the environment has caught it."""
        return self.server.setup_error if isinstance(self.server, ServerManager) else None

    def _expect_engine_tokenizer(self) -> None:
        """Have the engines' ids compared with those of the environment's tokenizer."""
        if isinstance(self.server, ServerManager):
            self.server.expect_tokenizer(
                self.tokenizer, name=self.config.tokenizer_name, is_for_all=True
            )


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task of ours and wait until it has ended; what it failed with is raised."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def _called(hook: Any, *args: Any) -> Awaitable[Any]:
    """Call a hook inside a coroutine, so that what it raises is raised where it is awaited."""
    return await settle(hook(*args))  # type: ignore[no-any-return]

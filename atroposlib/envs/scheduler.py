"""`serve`: roll out, score and send groups for a trainer until its run is over.

`ServingLoop` is a member of every environment and drives it. It calls every hook on the
environment (`get_status`, `env_step_checks`, `add_train_workers`, `handle_send_to_api`, ...), so
that overrides apply.

    setup -> wandb -> register -> info -> [ status -> step checks ] every `status_interval_s`
                                          [ fill -> handle_env -> send ] whenever there is room
    at the end: rollouts end, last metrics, close(), disconnect, logs closed

`RolloutScheduler` owns the rollout tasks: it starts, times out, sets aside and ends them.

    next_item / backlog --> start --> run_rollout(uuid) --> done --> next start, at once
                  ^           ^           |                   |
                  |     up to limit()  time is up       wakes `run`
                  |                       |
                  +------- retried -------+----> given up

Invariants:
    - An item is in one place: the backlog, the retries, `running_items`, or its finished rollout.
    - Every task is in `workers` or in `_ending`; `shut_down` ends all.
    - A running rollout is cancelled for three reasons only: its time is up, an evaluation stops
      training, or the run ends. A full queue is not a reason.

`EvaluationRunner` owns the evaluation task: one at a time. Requests during an evaluation start one
more after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum, StragglerPolicyEnum
from atroposlib.envs.reporting import Reporter, keep_latest
from atroposlib.envs.rollouts import (
    NUM_UNUSABLE_AT_START,
    GroupDelivery,
    UnfinishedGroups,
    annotate_groups,
    as_pair,
    settings_without_effect,
)
from atroposlib.envs.run_snapshot import RepeatedErrors
from atroposlib.envs.server_handling.chat_rendering import template_errors
from atroposlib.envs.server_handling.retry import http_status
from atroposlib.envs.server_handling.server_baseline import sampled_versions
from atroposlib.envs.server_handling.server_manager import EngineWatch, ServerManager
from atroposlib.envs.service_session import (
    EnvRegistration,
    crossed_boundary,
    failure_pause_s,
    is_run_finished,
    worker_limit,
)
from atroposlib.errors import (
    ConfigError,
    ContextOverflowError,
    EngineSetupError,
    GroupError,
    InferenceError,
    MissingExtraError,
    NoDataError,
    PromptError,
)
from atroposlib.utils.aio import refuse_cancelled, settle
from atroposlib.utils.text import is_milestone
from atroposlib.utils.tracing import Tracer, open_tracer, root_span

__all__ = [
    "EvaluationRunner",
    "RolloutScheduler",
    "ServingLoop",
    "expect_engine_tokenizer",
    "next_item_of",
    "setup_error_of",
]

logger = logging.getLogger(__name__)


class RolloutScheduler:
    """The rollouts of one environment.

    Args:
        run_rollout: makes and delivers the group of the item with a uuid. Once the group exists, it
            removes the uuid from `running_items`, after which the rollout is not cancelled.
        next_item: returns the next item, or None if none is available now.
        count_failure: called with the name of every failure.
        count_straggler: called with `retried` for each rollout that is started again.
        now: clock, seconds.

    Attributes:
        workers: tasks of the rollouts.
        backlog: items to roll out before new ones; a stack.
        running_items: uuid to `{"item", "worker", "start_time"}`; `is_expired` is added to a record
            whose time is up.
        last_completed_item: result of the latest successful rollout.
    """

    def __init__(
        self,
        *,
        run_rollout: Callable[[str], Awaitable[Any]],
        next_item: Callable[[], Awaitable[Any]],
        count_failure: Callable[[str], None],
        count_straggler: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.workers: set[asyncio.Task[Any]] = set()
        self.backlog: list[Any] = []
        self.running_items: dict[str, dict[str, Any]] = {}
        self.last_completed_item: Any = None
        self._run_rollout = run_rollout
        self._next_item = next_item
        self._count_failure = count_failure
        self._count_straggler = count_straggler
        self._retries: list[tuple[Any, int]] = []  # item, retries left
        self._is_without_item = False
        self._has_started = False
        self._now = now
        self._ending: set[asyncio.Task[Any]] = set()
        self._errors = RepeatedErrors(logger)
        self._fatal: BaseException | None = None
        self._is_stopped = asyncio.Event()
        self._changed = asyncio.Event()
        self._refresh_wanted = asyncio.Event()

    async def run(
        self,
        *,
        refresh: Callable[[], Awaitable[bool]],
        fill: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        """Keep rollouts running until `refresh` returns False.

        Cancelling is safe; `shut_down` ends the rollouts. Raises the exceptions of both functions,
        and the error passed to `stop`. A cancellation inside a function is a RuntimeError.

        Args:
            refresh: fetches the service's status and acts on a new step; False ends the run.
                Called every `interval_s` and after `request_refresh`, in its own task.
            fill: starts rollouts. Called after every refresh, rollout and `wake`.
            interval_s: seconds between two refreshes.
        """
        if not await refresh():
            return
        poller = asyncio.create_task(self._keep_fresh(refresh, interval_s))
        filler = asyncio.create_task(self._keep_filled(fill))
        stopper = asyncio.create_task(self._is_stopped.wait())
        try:
            await asyncio.wait({poller, filler, stopper}, return_when=asyncio.FIRST_COMPLETED)
            for task in (poller, filler):
                if task.done():
                    refuse_cancelled(task)
        finally:
            await _cancel_all({poller, filler, stopper})
        if self._fatal is not None:
            raise self._fatal
        for task in (poller, filler):
            if not task.cancelled():
                task.result()

    async def _keep_fresh(self, refresh: Callable[[], Awaitable[bool]], interval_s: float) -> None:
        """Refresh until the run is over; requests within half an interval are merged."""
        loop = asyncio.get_running_loop()
        merge_s = interval_s / 2
        while True:
            await asyncio.sleep(merge_s)
            # Not `wait_for`: before Python 3.12 it can swallow a cancellation.
            interval_over = loop.call_later(interval_s - merge_s, self._refresh_wanted.set)
            try:
                await self._refresh_wanted.wait()
            finally:
                interval_over.cancel()
            self._refresh_wanted.clear()
            if not await refresh():
                return
            self._changed.set()

    async def _keep_filled(self, fill: Callable[[], Awaitable[None]]) -> None:
        while True:
            self._changed.clear()  # before filling: a change during it must not be missed
            await fill()
            await self._changed.wait()

    def stop(self, error: BaseException) -> None:
        """End `run` with an error; only the first one is raised."""
        if self._fatal is None:
            self._fatal = error
        self._is_stopped.set()

    def wake(self) -> None:
        """Call `fill` again; for changes other than a finished rollout."""
        self._changed.set()

    def request_refresh(self) -> None:
        """Refresh the service's status soon, as after sending."""
        self._refresh_wanted.set()

    async def fill(self, limit: Callable[[], int], *, timeout_s: float, retries: int = 0) -> None:
        """Start rollouts until `limit` workers run or no item is left.

        Args:
            limit: returns the allowed number of workers; called before each start, since it may
                fall while an item is awaited. Running rollouts above it continue.
            timeout_s: time limit of one rollout in seconds; 0 or less: no limit.
            retries: number of retries of an item whose rollout exceeds the limit.
        """
        while len(self.workers) < limit():
            if self._retries:
                item, tries_left = self._retries.pop()
                self.start(item, timeout_s=timeout_s, retries=tries_left)
                continue
            item = self.backlog.pop() if self.backlog else await self._next_item()
            if item is None:
                if not (self._has_started or self._is_without_item):
                    self._is_without_item = True
                    logger.warning(
                        "get_next_item returned None at its first call: no item to roll out; "
                        "asking again until there is one"
                    )
                return
            if len(self.workers) >= limit():
                self.backlog.append(item)
                return
            self.start(item, timeout_s=timeout_s, retries=retries)

    def start(self, item: Any, *, timeout_s: float = 0.0, retries: int = 0) -> str:
        """Start the rollout of an item and return its uuid; arguments as for `fill`."""
        self._has_started = True
        item_uuid = str(uuid.uuid4())
        worker = asyncio.create_task(self._work(item_uuid))
        record = {"item": item, "worker": worker, "start_time": self._now()}
        self.running_items[item_uuid] = record
        self.workers.add(worker)
        timer = None
        if timeout_s > 0:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._expire, item_uuid, timeout_s, retries)
        worker.add_done_callback(partial(self._finish, item_uuid, timer))
        return item_uuid

    async def _work(self, item_uuid: str) -> Any:
        return await self._run_rollout(item_uuid)

    def _finish(
        self, item_uuid: str, timer: asyncio.TimerHandle | None, worker: asyncio.Task[Any]
    ) -> None:
        if timer is not None:
            timer.cancel()
        self.running_items.pop(item_uuid, None)
        self.workers.discard(worker)
        self._ending.discard(worker)
        self._changed.set()
        if worker.cancelled():
            return
        error = worker.exception()
        if error is not None:
            self._count_failure(type(error).__name__)
            self._errors.log("a rollout failed", error)
        elif worker.result():
            self.last_completed_item = worker.result()

    def _expire(self, item_uuid: str, timeout_s: float, tries_left: int) -> None:
        """Cancel a rollout that took too long; retry its item, or drop and count it."""
        record = self._cancel(item_uuid)
        if record is None:
            return
        record["is_expired"] = True
        if tries_left > 0:
            self._retries.append((record["item"], tries_left - 1))
            self._count_straggler("retried")
            outcome = "started again"
        else:
            self._count_failure("worker_timeout")
            outcome = "given up"
        logger.warning("rollout %s took more than %g s; %s", item_uuid, timeout_s, outcome)

    def _cancel(self, item_uuid: str) -> dict[str, Any] | None:
        """Cancel a rollout that has no group yet and return its record; otherwise return None."""
        record = self.running_items.get(item_uuid)
        if record is None or record["worker"].done():
            return None
        del self.running_items[item_uuid]
        worker = record["worker"]
        worker.cancel()
        self.workers.discard(worker)
        self._ending.add(worker)
        self._changed.set()
        return record

    def set_running_aside(self) -> int:
        """Cancel rollouts without a group, move their items to the backlog, return the count."""
        records = [self._cancel(item_uuid) for item_uuid in list(self.running_items)]
        items = [record["item"] for record in records if record is not None]
        self.backlog.extend(items)
        return len(items)

    async def shut_down(self, *, grace_s: float, rollout_grace_s: float = 0.0) -> None:
        """End all rollouts and deliveries, each within a grace period.

        Cancelling skips the rest of `rollout_grace_s`.

        Args:
            grace_s: seconds for rollouts that already send their group. The log names tasks that
                ignore a cancellation for another such period.
            rollout_grace_s: seconds for the other rollouts, before they are cancelled.
        """
        try:
            if rollout_grace_s > 0:
                await self._let_finish(rollout_grace_s)
        finally:
            await self._end_all(grace_s)

    async def _let_finish(self, grace_s: float) -> None:
        if not self.running_items:
            return
        num_running = len(self.running_items)
        logger.info("%d rollouts may continue for up to %g s", num_running, grace_s)
        await asyncio.wait(set(self.workers), timeout=grace_s)
        num_left = len(self.running_items)
        logger.info("%d of them finished, %d are cancelled", num_running - num_left, num_left)

    async def _end_all(self, grace_s: float) -> None:
        for item_uuid in list(self.running_items):
            self._cancel(item_uuid)
        if self.workers:
            logger.info("waiting up to %g s for %d groups being sent", grace_s, len(self.workers))
            await asyncio.wait(set(self.workers), timeout=grace_s)
        if self.workers:
            logger.warning("%d groups were not sent within %g s", len(self.workers), grace_s)
        for worker in self.workers:
            self._count_failure("not_sent")
            worker.cancel()
        # Those that were cancelled above only end: another cancellation would stop their clean-up.
        ending = {*self.workers, *self._ending}
        stuck = (await asyncio.wait(ending, timeout=grace_s))[1] if ending else set()
        for task in stuck:
            logger.error("a task ignores its cancellation: %s", task)


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    unfinished = {task for task in tasks if not task.done()}
    for task in unfinished:
        task.cancel()
    if unfinished:
        await asyncio.wait(unfinished)


class EvaluationRunner:
    """The evaluations of one environment; failures are counted and logged.

    Args:
        on_end: called when all requested evaluations have ended.
        count_failure: called with the name of an evaluation's exception.

    Attributes:
        task: the current or latest task; None before the first evaluation.
        num_ended: number of evaluations that have ended, including failed ones.
    """

    def __init__(self, *, on_end: Callable[[], None], count_failure: Callable[[str], None]) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.num_ended = 0
        self._on_end = on_end
        self._count_failure = count_failure
        self._errors = RepeatedErrors(logger)
        self._wanted: Callable[[], Awaitable[Any]] | None = None
        self._is_shut_down = False

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def start(self, evaluate: Callable[[], Awaitable[Any]]) -> None:
        """Start an evaluation, now or after the running one."""
        if self.is_running:
            logger.warning("the previous evaluation is still running; the next one waits for it")
            self._wanted = evaluate
            return
        self.task = asyncio.create_task(self._evaluate_in_turn(evaluate))
        self.task.add_done_callback(lambda _: self._on_end())

    async def _evaluate_in_turn(self, evaluate: Callable[[], Awaitable[Any]]) -> None:
        await self._evaluate(evaluate)
        while self._wanted is not None:
            evaluate, self._wanted = self._wanted, None
            await self._evaluate(evaluate)

    async def _evaluate(self, evaluate: Callable[[], Awaitable[Any]]) -> None:
        try:
            await evaluate()
        except (Exception, asyncio.CancelledError) as error:  # counted and logged; training goes on
            if self._is_shut_down and isinstance(error, asyncio.CancelledError):
                raise
            self._count_failure(type(error).__name__)
            self._errors.log("the evaluation failed", error)
        self.num_ended += 1

    async def finish(self) -> None:
        """Wait for the running evaluation and the next one, if any."""
        if self.task is not None:
            await asyncio.wait({self.task})

    async def shut_down(self, *, grace_s: float) -> None:
        """Cancel the running evaluation and wait until it has ended, at most `grace_s`."""
        self._wanted = None
        if self.task is None or self.task.done():
            return
        self._is_shut_down = True
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=grace_s)
        if not self.task.done():
            logger.error("the evaluation ignores its cancellation: %s", self.task)


class DrivenEnv(Protocol):
    """Attributes and methods of an environment that `serve`, `process` and `evaluate` use."""

    config: BaseEnvConfig
    server: Any
    tokenizer: Any
    status_interval_s: float
    shutdown_grace_s: float
    empty_rollout_s: float
    final_engine_timeout_s: float
    n_groups_to_process: int
    group_size_to_process: int

    @property
    def desired_name(self) -> str: ...
    async def setup(self) -> None: ...
    async def setup_wandb(self) -> None: ...
    async def register_env(self) -> None: ...
    async def get_server_info(self) -> None: ...
    async def get_status(self) -> None: ...
    async def env_step_checks(self) -> None: ...
    async def add_train_workers(self) -> None: ...
    async def get_next_item(self) -> Any: ...
    async def collect_trajectories(self, item: Any, /) -> Any: ...
    async def postprocess_histories(self, trajectories: Any, /) -> Any: ...
    def check_gold_answer(self, item: Any, /) -> Any: ...
    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any,
        /,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None: ...
    async def cleanup(self) -> None: ...
    async def wandb_log(self, wandb_metrics: dict[str, Any], /) -> None: ...
    async def evaluate(self) -> Any: ...
    def save_checkpoint(self, step: int, /) -> None: ...
    def count_failure(self, name: str, /) -> None: ...
    async def _run_close_hook(self) -> None: ...
    def _close_records(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


MISTAKES = (
    AssertionError,
    AttributeError,
    ContextOverflowError,
    GroupError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    PromptError,
    TypeError,
)
"""Errors of an environment's code or lengths; unlike an outage, they do not end by themselves."""
REFUSED_REQUESTS = (400, 413, 422)
"""Statuses of an engine that does not understand a request, such as images for a model of text."""
MISTAKES_S = 60.0
"""Seconds for which all rollouts must fail: many fail at once if what they call is not up yet."""
NUM_EMPTY_LOGGED = 10
"""Number of items in a row without a group at which the log first says so."""

ITEM_WARNING_S = 60.0
"""Seconds in `get_next_item` after which the log says so."""


class ServingLoop:
    """Serves one environment: follows the trainer's step and keeps rollouts running.

    Args:
        env: The environment to serve.
        reporter: Counts failures and durations.
        registration: Settings and status of the service.
        delivery: Counts unusable groups.
        scheduler: Owns the rollout tasks.
        evaluations: Owns the evaluation task.

    Attributes:
        last_loop_time: Time of the latest status request, seconds since the epoch; None before it.
    """

    def __init__(
        self,
        env: DrivenEnv,
        *,
        reporter: Reporter,
        registration: EnvRegistration,
        delivery: GroupDelivery,
        scheduler: RolloutScheduler,
        evaluations: EvaluationRunner,
    ) -> None:
        self.last_loop_time: float | None = None
        self._env = env
        self._reporter = reporter
        self._registration = registration
        self._delivery = delivery
        self._scheduler = scheduler
        self._evaluations = evaluations
        self._unfinished = UnfinishedGroups(
            on_finished=scheduler.wake, add_durations=reporter.length_bias.add_durations
        )
        registration.count_running = self._num_running_sequences
        self._failures_in_a_row = 0
        self._mistakes_in_a_row = 0
        self._mistakes_since = 0.0
        self._empty_in_a_row = 0
        self._failures_logged = 0
        self._num_evaluations_logged = 0
        self._step_logged = 0
        self._tracer: Tracer | None = None

    async def run(self) -> None:
        """Implement `BaseEnv.env_manager`."""
        env, session = self._env, self._registration.open_session()
        watch = EngineWatch.of(env.server)
        self._tracer = open_tracer("atropos-environment")
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            if self._tracer is not None:
                ending.push_async_callback(asyncio.to_thread, self._tracer.close)
            ending.push(env._close_records)
            ending.push_async_callback(session.leave, timeout_s=env.shutdown_grace_s)
            ending.push_async_callback(env._run_close_hook)
            ending.push_async_callback(self._log_last_metrics)
            ending.push_async_exit(self._end_rollouts)
            ending.push_async_callback(self._evaluations.shut_down, grace_s=env.shutdown_grace_s)
            for text in settings_without_effect(env.config):
                logger.warning("%s", text)
            await settle(env.setup())
            expect_engine_tokenizer(env.server, env.tokenizer, name=env.config.tokenizer_name)
            await env.setup_wandb()
            await settle(env.register_env())
            await settle(env.get_server_info())
            self._reporter.run_figures.begin()
            serving = self._scheduler.run(
                refresh=self._refresh_status,
                fill=self._fill_workers,
                interval_s=env.status_interval_s,
            )
            if not await watch.guard(serving, limit_s=env.config.engine_timeout):
                raise InferenceError(
                    f"no inference server was up for {env.config.engine_timeout:g} s "
                    f"({watch.names}), and step {self._registration.curr_step} of "
                    f"{env.config.total_steps} is not the last: the engine may have left with the "
                    "trainer. Start them again, then this environment; --env.engine_timeout sets "
                    "the time limit, 0 waits without limit"
                )
            logger.info("%s", self._ending_text())
            await self._finish_evaluation(watch)

    def _ending_text(self) -> str:
        total_steps = self._env.config.total_steps
        if total_steps < self._registration.trainer_steps:
            return (
                f"done: step {total_steps} is reached (--env.total_steps); the trainer continues "
                f"to step {self._registration.trainer_steps} without this environment"
            )
        return f"done: the training run has ended with step {total_steps}"

    async def _finish_evaluation(self, watch: EngineWatch) -> None:
        """Wait for the final evaluation, as long as an inference server is up."""
        limit_s = self._env.final_engine_timeout_s
        if self._env.config.engine_timeout:
            limit_s = min(limit_s, self._env.config.engine_timeout)
        if not await watch.guard(self._evaluations.finish(), limit_s=limit_s):
            self._env.count_failure("final_evaluation")
            logger.error(
                "the final evaluation is given up: no inference server was up for %g s (%s). "
                "The training run is over, the engine may have left with the trainer",
                limit_s,
                watch.names,
            )

    async def _end_rollouts(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the rollouts; if the run is stopped early, they have time to finish."""
        is_stopped = isinstance(error, asyncio.CancelledError)
        await self._scheduler.shut_down(
            grace_s=self._env.shutdown_grace_s,
            rollout_grace_s=self._env.config.rollout_grace_s if is_stopped else 0.0,
        )

    async def _log_last_metrics(self) -> None:
        """Log metrics if there is a step, rollout or evaluation since the last log."""
        has_rollouts = self._delivery.items_sent_this_step > 0 or bool(
            self._reporter.rollouts_for_wandb
        )
        has_evaluation = self._evaluations.num_ended > self._num_evaluations_logged
        if has_rollouts or has_evaluation or self._registration.curr_step > self._step_logged:
            await self._log_metrics()

    async def _log_metrics(self) -> None:
        self._delivery.items_sent_this_step = 0
        self._num_evaluations_logged = self._evaluations.num_ended
        self._step_logged = self._registration.curr_step
        await self._reporter.tolerate(_called(self._env.wandb_log, {}), "wandb_log")

    async def _refresh_status(self) -> bool:
        """Fetch the status and act on it; return whether the run continues."""
        now = time.time()
        if self.last_loop_time is not None:
            keep_latest(self._reporter.mainloop_timings, now - self.last_loop_time)
        self.last_loop_time = now
        await self._env.get_status()
        await settle(self._env.env_step_checks())
        return not is_run_finished(
            current_step=self._registration.queue_status().current_step,
            total_steps=self._env.config.total_steps,
        )

    async def act_on_step(self) -> None:
        """Implement `BaseEnv.env_step_checks`."""
        config, registration = self._env.config, self._registration
        queue = registration.queue_status()
        old_step, new_step = registration.curr_step, queue.current_step
        if new_step == old_step:
            return
        evaluation_step = crossed_boundary(
            old_step=old_step, new_step=new_step, interval=config.steps_per_eval
        )
        if evaluation_step is not None:
            self._start_evaluation()
        checkpoint_step = crossed_boundary(
            old_step=old_step, new_step=new_step, interval=registration.checkpoint_interval
        )
        if checkpoint_step is not None:
            await self._reporter.tolerate(
                _called(self._env.save_checkpoint, checkpoint_step), "save_checkpoint"
            )
        registration.curr_step = new_step
        if 0 < registration.trainer_steps <= new_step < config.total_steps:
            logger.info(
                "the trainer has done the %d steps that it registered; waiting for more, up to "
                "total_steps (%d); --env.end_with_trainer true ends with the trainer",
                registration.trainer_steps,
                config.total_steps,
            )
        logger.info(
            "trainer step %d of %d; %d groups queued, %d rollouts running",
            new_step,
            config.total_steps,
            queue.queue_groups,
            len(self._scheduler.running_items),
        )
        if is_run_finished(current_step=new_step, total_steps=config.total_steps):
            return  # logged once the rollouts and the final evaluation have ended
        if self._delivery.items_sent_this_step >= config.min_items_sent_before_logging:
            await self._log_metrics()

    def _start_evaluation(self) -> None:
        self._reporter.begin_evaluation()
        self._evaluations.start(lambda: settle(self._env.evaluate()))
        if self._env.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
            num_items = self._scheduler.set_running_aside()
            logger.info("evaluating; %d running rollouts are set aside", num_items)

    async def _fill_workers(self) -> None:
        """Start rollouts, after a pause if many failed in a row."""
        pause_s = failure_pause_s(self._failures_in_a_row)
        if pause_s > 0:
            is_shown = self._failures_in_a_row >= 10 * self._failures_logged
            logger.log(
                logging.WARNING if is_shown else logging.DEBUG,
                "%d rollouts in a row without a usable group; waiting %.1f s before the next "
                "(failures so far: %s; groups dropped: %s)",
                self._failures_in_a_row,
                pause_s,
                dict(self._reporter.failure_counts) or "none",
                dict(self._reporter.drop_counts) or "none",
            )
            self._failures_logged = self._failures_in_a_row if is_shown else self._failures_logged
            await asyncio.sleep(pause_s)
        else:
            self._failures_logged = 0
        if (
            len(self._scheduler.workers) < self._registration.max_num_workers
            and not self._registration.are_starts_held_back
        ):
            await settle(self._env.add_train_workers())

    async def add_workers(self) -> None:
        """Implement `BaseEnv.add_train_workers`."""
        limit = self._worker_limit()
        if self._registration.curr_step > 0 or self._scheduler.workers:
            keep_latest(self._reporter.workers_added_list, limit - len(self._scheduler.workers))
        is_retrying = self._env.config.straggler_policy == StragglerPolicyEnum.RETRY
        await self._scheduler.fill(
            self._worker_limit,
            timeout_s=self._env.config.worker_timeout,
            retries=self._env.config.straggler_retries if is_retrying else 0,
        )

    def _num_running_sequences(self) -> int:
        num_started = len(self._scheduler.running_items) * self._env.config.group_size
        return max(0, num_started - self._unfinished.num_finished)

    def _worker_limit(self) -> int:
        if self._registration.are_starts_held_back:
            return 0
        ratios = {
            EvalHandlingEnum.STOP_TRAIN: 0.0,
            EvalHandlingEnum.LIMIT_TRAIN: self._env.config.eval_limit_ratio,
            EvalHandlingEnum.NONE: 1.0,
        }
        ratio = ratios[self._env.config.eval_handling] if self._evaluations.is_running else 1.0
        return worker_limit(
            self._registration.queue_status(),
            self._registration.capacity_limits(),
            evaluation_ratio=ratio,
            finished_sequences=self._unfinished.num_finished,
        )

    async def roll_out(self, item_uuid: str) -> Any:
        """Implement `BaseEnv.handle_env`."""
        record = self._scheduler.running_items.get(item_uuid)
        if record is None:
            return None
        with (
            root_span(self._tracer, "rl.item", self._described(item_uuid)),
            self._registration.numbered_rollout(),
        ):
            scored, duration_s = await self._make_groups(item_uuid, record)
        await settle(self._env.cleanup())
        if not scored:
            # Else an environment that suppresses errors would consume its data set in seconds.
            await asyncio.sleep(max(0.0, self._env.empty_rollout_s - duration_s))
        return scored

    async def _make_groups(self, item_uuid: str, record: dict[str, Any]) -> tuple[Any, float]:
        """Roll out, score and deliver an item; return its groups and the seconds until scored."""
        policy_version = (self._registration.status_dict or {}).get("policy_version")
        first_step = self._registration.curr_step
        running = self._scheduler.running_items
        try:
            with sampled_versions() as sampled, self._unfinished.counting():
                scored = await self._collect_scored_groups(record["item"])
        except asyncio.CancelledError as cancelled:
            if item_uuid not in running:
                raise
            self._failures_in_a_row += 1
            raise RuntimeError("a rollout was cancelled by its own environment") from cancelled
        if sampled.oldest is not None:
            policy_version = sampled.oldest
        if running.pop(item_uuid, None) is None:
            # The rollout has lost its cancellation, as `asyncio.wait_for` does before Python 3.12;
            # its item is rolled out again, or counted as failed.
            raise asyncio.CancelledError
        duration_s = time.time() - record["start_time"]
        self._reporter.add_rollout(duration_s=duration_s, has_data=scored is not None)
        if scored:
            annotate_groups(scored, sampled, policy_version=policy_version)
            staleness = self._registration.curr_step - first_step
            if staleness >= 0:  # else the trainer went back to a checkpoint
                self._reporter.run_figures.add_staleness(staleness)
            num_unusable = self._delivery.num_unusable_groups()
            is_delivered = await self._reporter.tolerate(
                _called(self._env.handle_send_to_api, scored, record["item"]), "sending a group"
            )
            # A rollout with unusable groups only counts as failed and delays the next ones.
            is_unusable = self._delivery.is_unusable(scored, before=num_unusable)
            is_failed = is_unusable or not is_delivered
            self._failures_in_a_row = self._failures_in_a_row + 1 if is_failed else 0
            error = self._delivery.error_of_first_groups()
            if error is not None:
                self._scheduler.stop(error)
            self._scheduler.request_refresh()
        return scored, duration_s

    def _described(self, item_uuid: str) -> dict[str, Any] | None:
        if self._tracer is None:
            return None
        earlier = self._registration.session().earlier_registration
        return {
            "rl.item.id": item_uuid,
            "rl.environment.name": self._env.desired_name,
            "rl.environment.id": self._registration.env_id,
            "rl.run.id": None if earlier is None else earlier[1],
        }

    async def _collect_scored_groups(self, item: Any) -> Any:
        try:
            collected, backlog = as_pair(await settle(self._env.collect_trajectories(item)))
            self._scheduler.backlog.extend(backlog)
            if collected:
                collected = await settle(self._env.postprocess_histories(collected))
        except Exception as error:  # noqa: BLE001 - a failed rollout is a result, and counted
            self._env.count_failure(type(error).__name__)
            self._failures_in_a_row += 1
            if not self._stop_if_fatal(error):
                self._reporter.errors.log("a rollout failed, its group is lost", error)
                self._stop_if_never_right(error)
            return None
        self._empty_in_a_row = 0 if collected else self._empty_in_a_row + 1
        if not collected:
            if is_milestone(self._empty_in_a_row) and self._empty_in_a_row >= NUM_EMPTY_LOGGED:
                logger.warning(
                    "%d items in a row gave no group: the collecting hooks of %s returned none",
                    self._empty_in_a_row,
                    type(self._env).__name__,
                )
            self._failures_in_a_row = self._mistakes_in_a_row = 0
            self._stop_if_fatal(setup_error_of(self._env.server))
        return collected

    def _stop_if_never_right(self, error: Exception) -> None:
        """End the run if the first rollouts all fail because of a mistake, not of an outage."""
        is_mistake = isinstance(error, (*MISTAKES, *template_errors()))
        is_refused = http_status(error) in REFUSED_REQUESTS
        self._mistakes_in_a_row = self._mistakes_in_a_row + 1 if is_mistake or is_refused else 0
        count = self._mistakes_in_a_row
        if count == 1:
            self._mistakes_since = time.monotonic()
        is_new = time.monotonic() - self._mistakes_since < MISTAKES_S
        if is_new or count < NUM_UNUSABLE_AT_START or self._reporter.run_figures.num_groups:
            return
        remedy = "the subcommand `check` finds such errors before a run"
        if is_refused:
            remedy = "the engine does not accept such requests"
        self._scheduler.stop(
            NoDataError(
                f"all of the first {count} rollouts failed, the last one with "
                f"{type(error).__name__}: {error}; the traceback is in the log above, and {remedy}"
            )
        )

    def _stop_if_fatal(self, error: Exception | None) -> bool:
        """End the run on an error of the settings before the first group; return whether it ends.

        Later, such an error fails one rollout: an engine may be restarted with other settings.
        """
        is_final = isinstance(error, ConfigError | MissingExtraError)
        if error is None or not is_final or self._reporter.run_figures.num_groups:
            return False
        self._scheduler.stop(error)
        return True


async def next_item_of(env: DrivenEnv) -> Any:
    """Return the next item of an environment, None if there is none now.

    Raises:
        ConfigError: `get_next_item` let the end of an iterator pass, which Python reports as an
            error of the caller.
    """
    name = f"{type(env).__name__}.get_next_item"
    text = "%s has not returned for %g s; it returns None if there is no item now"
    late = asyncio.get_running_loop().call_later(
        ITEM_WARNING_S, logger.warning, text, name, ITEM_WARNING_S
    )
    try:
        return await settle(env.get_next_item())
    except (StopIteration, StopAsyncIteration, RuntimeError) as error:
        ended = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(ended, StopIteration | StopAsyncIteration):
            raise
        place = traceback.extract_tb(ended.__traceback__)[-1]
        raise ConfigError(
            f"{name} raised {type(ended).__name__} ({place.filename}:{place.lineno}): its iterator "
            "has ended; return None if no items are left, or start again, as itertools.cycle does"
        ) from error
    finally:
        late.cancel()


def setup_error_of(server: Any) -> EngineSetupError | None:
    """Return the error of the engine's settings because of which no request was answered."""
    return server.setup_error if isinstance(server, ServerManager) else None


def expect_engine_tokenizer(server: Any, tokenizer: Any, *, name: str) -> None:
    """Let the server manager compare the engines' token ids with those of a tokenizer."""
    if isinstance(server, ServerManager):
        server.expect_tokenizer(tokenizer, name=name, is_for_all=True)


async def _called(hook: Any, *args: Any) -> Any:
    """Call a hook in a coroutine, so that its errors are raised where it is awaited."""
    return await settle(hook(*args))

"""Run an environment without a trajectory service: `process` and `evaluate`.

process: items -> concurrent rollouts -> groups with gold answers, in the order of the items
         -> JSONL; at the end an HTML page of the file
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping, MutableMapping
from contextlib import AsyncExitStack
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple

from atroposlib.envs.evaluation_statistics import INTERVAL_ENDS
from atroposlib.envs.reporting import Reporter
from atroposlib.envs.rollouts import GroupDelivery, annotate_groups, as_pair
from atroposlib.envs.run_snapshot import RecentErrors
from atroposlib.envs.scheduler import (
    DrivenEnv,
    expect_engine_tokenizer,
    next_item_of,
    setup_error_of,
)
from atroposlib.envs.server_handling.retry import describe
from atroposlib.envs.server_handling.server_baseline import sampled_versions
from atroposlib.envs.server_handling.server_manager import EngineWatch
from atroposlib.envs.service_session import EnvRegistration
from atroposlib.errors import InferenceError, NoDataError, NoVerdictError
from atroposlib.utils.aio import settle
from atroposlib.utils.text import short_score

__all__ = ["ProcessRun", "evaluate_once"]

logger = logging.getLogger(__name__)

MAX_EMPTY_GROUPS_IN_A_ROW = 100
"""Number of items in a row without data after which `process` ends."""

MAX_UNWRITTEN = 4
"""Unwritten groups per running one: finished groups wait for those of earlier items."""


class _Rollout(NamedTuple):
    item: Any
    collected: Any
    duration_s: float


class ProcessRun:
    """One run of `process`.

    Args:
        env: The environment; `process` has set its number of groups.
        reporter: Counts groups and opens the metrics.
        registration: Holds the number of groups made as `curr_step`.
        delivery: Counts unusable groups.
    """

    def __init__(
        self,
        env: DrivenEnv,
        reporter: Reporter,
        registration: EnvRegistration,
        delivery: GroupDelivery,
    ) -> None:
        self._env = env
        self._reporter = reporter
        self._registration = registration
        self._delivery = delivery
        self._errors = RecentErrors()
        self._scores: list[list[Any]] = []
        self._num_items = 0

    async def run(self) -> None:
        """Implement `BaseEnv.process_manager`."""
        env, reasons = self._env, self._errors
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            logging.getLogger().addHandler(reasons)
            ending.callback(logging.getLogger().removeHandler, reasons)
            ending.push(self._write_group_page)
            ending.push(env._close_records)
            ending.push_async_callback(env._run_close_hook)
            await settle(env.setup())
            self._reporter.start_local_run()
            self._registration.curr_step = 0
            expect_engine_tokenizer(env.server, env.tokenizer, name=env.config.tokenizer_name)
            self._reporter.run_figures.begin()
            await while_engines_stay(env, self._process_all_groups())
            self._report_scores()

    async def _process_all_groups(self) -> None:
        started: deque[asyncio.Task[_Rollout]] = deque()
        try:
            await self._deliver_in_order(started)
        except BaseException:
            await self._deliver_finished(started)
            raise
        finally:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
        if not self._scores and self._delivery.num_unusable_groups():
            why = self._commonest_error() or f"look at what {self._rollout_hook} returns"
            raise NoDataError(f"all {self._registration.curr_step} groups were dropped; {why}")

    async def _deliver_finished(self, started: deque[asyncio.Task[_Rollout]]) -> None:
        """Write the finished groups of later items after an earlier item ended the run."""
        for task in started:
            if not task.done() or task.cancelled() or task.exception() is not None:
                continue
            if not task.result().collected:
                continue
            try:
                await self._write_rollout(task.result())
            except Exception as error:  # noqa: BLE001 - must not replace that of the earlier item
                logger.warning("a finished group is not recorded completely: %s", describe(error))
                return

    async def _deliver_in_order(self, started: deque[asyncio.Task[_Rollout]]) -> None:
        """Roll out up to `max_num_workers` items at once; write groups in item order.

        Args:
            started: rollouts with unwritten groups, in item order; changed in place.
        """
        num_empty, has_items = 0, True
        while self._registration.curr_step < self._env.n_groups_to_process:
            has_items = has_items and await self._start_rollouts(started)
            if not started:
                if self._num_items == 0:
                    logger.warning(
                        "%s.get_next_item returned None at its first call: no item to roll out",
                        type(self._env).__name__,
                    )
                logger.info("no items left after %d groups", self._registration.curr_step)
                return
            if not started[0].done():
                running = {task for task in started if not task.done()}
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                continue
            rollout = started.popleft().result()
            if not rollout.collected:
                num_empty += 1
                logger.info(
                    "an item gave no group, %.1f s; %d in a row", rollout.duration_s, num_empty
                )
                setup_error = setup_error_of(self._env.server)
                if setup_error is not None:
                    raise setup_error
                if num_empty >= MAX_EMPTY_GROUPS_IN_A_ROW:
                    why = self._commonest_error() or (
                        f"{self._rollout_hook} returned no group. Some environments return none "
                        "when all scores are equal, such as those of a model that solves no item"
                    )
                    raise NoDataError(f"{num_empty} items in a row gave no data; {why}")
                continue
            num_empty = 0
            await self._write_rollout(rollout)

    async def _write_rollout(self, rollout: _Rollout) -> None:
        item, collected, duration_s = rollout
        await self._add_gold_answer(collected, item)
        num_unusable = self._delivery.num_unusable_groups()
        await settle(
            self._env.handle_send_to_api(
                collected, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
            )
        )
        await settle(self._env.wandb_log({}))
        self._registration.curr_step += 1
        if not self._delivery.is_unusable(collected, before=num_unusable):
            self._report_processed_groups(collected, duration_s=duration_s)

    async def _start_rollouts(self, started: deque[asyncio.Task[_Rollout]]) -> bool:
        """Start rollouts; return False if no items are left."""
        most = max(1, self._registration.max_num_workers)
        while True:
            num_running = sum(not task.done() for task in started)
            is_failed = any(task.done() and task.exception() is not None for task in started)
            num_wanted = self._env.n_groups_to_process - self._registration.curr_step - len(started)
            if num_wanted <= 0 or num_running >= most or len(started) >= MAX_UNWRITTEN * most:
                return True
            if is_failed:
                return True  # its error ends the run after the groups before it are written
            item = await next_item_of(self._env)
            if item is None:
                return False
            self._num_items += 1
            self._env.config.group_size = self._env.group_size_to_process
            started.append(asyncio.create_task(self._roll_out(item)))

    async def _roll_out(self, item: Any) -> _Rollout:
        number = self._reporter.run_figures.begin_item()
        started_at = time.monotonic()
        try:
            with sampled_versions() as sampled:
                collected, _ = as_pair(await settle(self._env.collect_trajectories(item)))
                if collected:
                    collected = await settle(self._env.postprocess_histories(collected))
        except NoVerdictError as error:  # as with a group of which nothing can be learned
            self._env.count_failure(type(error).__name__)
            logger.warning("an item is left out: %s", error)
            collected = None
        finally:
            self._reporter.run_figures.end_item(number)
        annotate_groups(collected, sampled)
        return _Rollout(item, collected, time.monotonic() - started_at)

    async def _add_gold_answer(self, collected: Any, item: Any) -> None:
        """Add the gold answer of an item to its groups."""
        try:
            gold = await settle(self._env.check_gold_answer(item))
        except Exception:  # an author's hook; the groups are useful without its answer
            logger.warning("check_gold_answer failed; the group has no gold answer", exc_info=True)
            return
        if gold is None:
            return
        answer = gold if isinstance(gold, str) else list(gold)
        for group in collected if isinstance(collected, list) else [collected]:
            if isinstance(group, MutableMapping):
                group.setdefault("gold_answer", answer)

    @property
    def _rollout_hook(self) -> str:
        return f"{type(self._env).__name__}.collect_trajectories"

    def _commonest_error(self) -> str:
        """Return the most frequent error of the log as a clause; empty without errors."""
        if not self._errors.lines:
            return ""
        return f"most of them with: {max(self._errors.lines, key=lambda line: line.count).text}"

    def _report_processed_groups(self, collected: Any, *, duration_s: float) -> None:
        groups = collected if isinstance(collected, list) else [collected]
        rows = [group.get("scores") for group in groups if isinstance(group, Mapping)]
        scores = [score for row in rows if isinstance(row, list | tuple) for score in row]
        self._scores.append(scores)
        logger.info(
            "group %d of %d: %d trajectories, scores %s, %.1f s",
            self._registration.curr_step,
            self._env.n_groups_to_process,
            len(scores),
            [short_score(score) for score in scores],
            duration_s,
        )

    def _report_scores(self) -> None:
        """Log the mean score and the number of groups with equal scores."""
        numbers = [s for scores in self._scores for s in scores if isinstance(s, Real)]
        if not numbers:
            return
        num_equal = sum(all(s == scores[0] for s in scores) for scores in self._scores)
        logger.info(
            "mean score %.3g of %d trajectories; all scores are equal in %d of %d groups",
            sum(map(float, numbers)) / len(numbers),
            len(numbers),
            num_equal,
            len(self._scores),
        )

    def _write_group_page(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the page, or remove the empty file of a run that failed before its first group."""
        if self._delivery.jsonl_writer is None:
            return
        path = self._delivery.jsonl_writer.path
        if error is not None and path.stat().st_size == 0:
            path.unlink()  # otherwise the next run would need another name
            return
        from atroposlib.frontend.jsonl2html import generate_html

        logger.info("the groups are in %s", path)
        generate_html(path)


async def evaluate_once(env: DrivenEnv, reporter: Reporter) -> None:
    """Implement `BaseEnv._run_evaluate`."""
    async with AsyncExitStack() as ending:  # runs from the last line to the first
        ending.push(env._close_records)
        ending.push_async_callback(env._run_close_hook)
        await settle(env.setup())
        reporter.start_local_run()
        expect_engine_tokenizer(env.server, env.tokenizer, name=env.config.tokenizer_name)
        reporter.begin_evaluation()
        logged_before = reporter.run_log.latest
        await while_engines_stay(env, settle(env.evaluate()))
        reporter.require_answers(None)
        if reporter.run_log.latest is logged_before:
            await reporter.tolerate(_log_kept_metrics(env), "wandb_log")
        latest = reporter.run_log.latest
        for name, value in latest.items():
            if "eval/" in name and isinstance(value, Real) and not name.endswith(INTERVAL_ENDS):
                low, high = latest.get(f"{name}_ci_low"), latest.get(f"{name}_ci_high")
                shown = "" if low is None else f" (95% interval {low:.4g} to {high:.4g})"
                logger.info("%s: %.4g%s", name, value, shown)


async def _log_kept_metrics(env: DrivenEnv) -> None:
    """Log the results that an overridden `wandb_log` adds, as at the next step of `serve`."""
    await settle(env.wandb_log({}))


async def while_engines_stay(env: DrivenEnv, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which needs an inference server.

    Raises:
        InferenceError: no server was up for `engine_timeout`, once one had answered.
    """
    watch = EngineWatch.of(env.server)
    limit_s = env.config.engine_timeout
    if not await watch.guard(work, limit_s=limit_s):
        raise InferenceError(
            f"no inference server was up for {limit_s:g} s ({watch.names}); start it, then this "
            "command again. --env.engine_timeout sets the time limit, 0 waits without limit"
        )

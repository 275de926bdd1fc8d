"""Own the rollout tasks of one environment: start, time out, set aside and end them.

    next_item / backlog --> start --> run_rollout(uuid) --> done --> next start, at once
                  ^           ^           |                   |
                  |    limit() says    time is up       wakes `run`
                  |      how many         |
                  +---- tried again ------+----> given up

It is given functions and knows neither the service nor what a rollout does. Items are opaque:
they are never hashed, copied or compared.

Invariants:
    - An item is in one place: the backlog, those to be tried again, `running_items`, or handed to
      its rollout for good.
    - Every task it creates is in `workers` or in `_ending`; `shut_down` ends all.
    - A running rollout is cancelled for three reasons only: its time is up, an evaluation stops
      training, or the run ends. Never because the queue filled.

Own the task of an environment's evaluation: one at a time, none left out.

start ──► runs ──► on_end
  │         ▲
  └─ one runs already: the next begins when it has ended (several wanted meanwhile are one)
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from atroposlib.envs.run_snapshot import RepeatedErrors

__all__ = [
    "EvaluationRunner",
    "RolloutScheduler",
]

logger = logging.getLogger(__name__)


class RolloutScheduler:
    """The rollouts of one environment.

    Args:
        run_rollout: produces, and delivers, the group of the item running under a uuid. It removes
            the uuid from `running_items` once the group exists; from then on it is not cancelled.
        next_item: the next item, None when there is none now.
        count_failure: told the name of every failure seen here.
        count_straggler: told `retried` for each rollout whose item is tried again.
        now: clock, seconds.

    Attributes:
        workers: tasks of the rollouts.
        backlog: items to roll out before new ones; a stack.
        running_items: uuid to `{"item", "worker", "start_time"}`.
        last_completed_item: what the latest successful rollout returned.
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
        self.backlog: list[Any] = []  # items may be anything
        self.running_items: dict[str, dict[str, Any]] = {}
        self.last_completed_item: Any = None
        self._run_rollout = run_rollout
        self._next_item = next_item
        self._count_failure = count_failure
        self._count_straggler = count_straggler
        self._second_tries: list[tuple[Any, int]] = []  # item, tries it has left
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
        """Keep rollouts running until `refresh` says that the run is over.

        Args:
            refresh: fetches the service's status and acts on a new step; False ends the run.
                Called every `interval_s` and after `request_refresh`, in a task of its own.
            fill: starts what may start. Called after every refresh, rollout and `wake`.
            interval_s: seconds between two refreshes.

        Cancelling is safe; `shut_down` ends what is still running. Exceptions of both functions,
        and what `stop` was given, are passed on.
        """
        if not await refresh():
            return
        poller = asyncio.create_task(self._keep_fresh(refresh, interval_s))
        filler = asyncio.create_task(self._keep_filled(fill))
        stopper = asyncio.create_task(self._is_stopped.wait())
        try:
            await asyncio.wait({poller, filler, stopper}, return_when=asyncio.FIRST_COMPLETED)
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
        """Have `run` raise an error: no rollout can succeed. The first one counts."""
        if self._fatal is None:
            self._fatal = error
        self._is_stopped.set()

    def wake(self) -> None:
        """Have `run` fill again: something else than a rollout made room."""
        self._changed.set()

    def request_refresh(self) -> None:
        """Ask for the service's status soon; something was sent."""
        self._refresh_wanted.set()

    async def fill(self, limit: Callable[[], int], *, timeout_s: float, retries: int = 0) -> None:
        """Start rollouts until `limit` workers run or no item is left.

        Args:
            limit: workers allowed now; asked again before each start, since it may sink while an
                item is awaited. Rollouts above it are left alone.
            timeout_s: seconds one rollout may take, 0 or less for ever.
            retries: times an item is tried again whose rollout took longer.
        """
        while len(self.workers) < limit():
            if self._second_tries:
                item, tries_left = self._second_tries.pop()
                self.start(item, timeout_s=timeout_s, retries=tries_left)
                continue
            item = self.backlog.pop() if self.backlog else await self._next_item()
            if item is None:
                return
            if len(self.workers) >= limit():
                self.backlog.append(item)
                return
            self.start(item, timeout_s=timeout_s, retries=retries)

    def start(self, item: Any, *, timeout_s: float = 0.0, retries: int = 0) -> str:
        """Start the rollout of an item and return its uuid; see `fill` for the limits."""
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
        """End a rollout that took too long; its item is tried again, or dropped and counted."""
        record = self._cancel(item_uuid)
        if record is None:
            return
        if tries_left > 0:
            self._second_tries.append((record["item"], tries_left - 1))
            self._count_straggler("retried")
            outcome = "started again"
        else:
            self._count_failure("worker_timeout")
            outcome = "given up"
        logger.warning("rollout %s took more than %g s; %s", item_uuid, timeout_s, outcome)

    def _cancel(self, item_uuid: str) -> dict[str, Any] | None:
        """Cancel a rollout whose group does not exist yet; return its record, or None."""
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
        """Cancel all rollouts and put their items on the backlog; return how many.

        A rollout that already delivers its group is left to finish.
        """
        records = [self._cancel(item_uuid) for item_uuid in list(self.running_items)]
        items = [record["item"] for record in records if record is not None]
        self.backlog.extend(items)
        return len(items)

    async def shut_down(self, *, grace_s: float, rollout_grace_s: float = 0.0) -> None:
        """End everything: rollouts and deliveries, each within a grace period.

        Cancelling it skips what is left of the rollouts' period.

        Args:
            grace_s: seconds for rollouts that already send their group. What does not obey a
                cancellation within another such period is named in the log.
            rollout_grace_s: seconds for all others, before they are cancelled.
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
        logger.info("%d rollouts may go on for up to %g s", num_running, grace_s)
        await asyncio.wait(set(self.workers), timeout=grace_s)
        num_left = len(self.running_items)
        logger.info("%d of them finished, %d are cancelled", num_running - num_left, num_left)

    async def _end_all(self, grace_s: float) -> None:
        for item_uuid in list(self.running_items):
            self._cancel(item_uuid)
        if self.workers:
            logger.info("waiting up to %g s for %d groups being sent", grace_s, len(self.workers))
            await asyncio.wait(set(self.workers), timeout=grace_s)
        stuck = await _cancel_all({*self.workers, *self._ending}, timeout_s=grace_s)
        for task in stuck:
            logger.error("a task ignores its cancellation: %s", task)


async def _cancel_all(
    tasks: Iterable[asyncio.Task[Any]], *, timeout_s: float | None = None
) -> set[asyncio.Task[Any]]:
    """Cancel tasks and wait until they have ended; return those still running."""
    unfinished = {task for task in tasks if not task.done()}
    for task in unfinished:
        task.cancel()
    if not unfinished:
        return set()
    _, pending = await asyncio.wait(unfinished, timeout=timeout_s)
    return pending


class EvaluationRunner:
    """The evaluations of one environment; a failure is counted and goes no further.

    Args:
        on_end: called when evaluations have ended, however they did, and none is wanted.
        count_failure: told the exception name of an evaluation that failed.

    Attributes:
        task: the running evaluations or the latest, None before the first.
        num_ended: evaluations that have ended, failed ones included.
    """

    def __init__(self, *, on_end: Callable[[], None], count_failure: Callable[[str], None]) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.num_ended = 0
        self._on_end = on_end
        self._count_failure = count_failure
        self._errors = RepeatedErrors(logger)
        self._wanted: Callable[[], Awaitable[Any]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is running."""
        return self.task is not None and not self.task.done()

    def start(self, evaluate: Callable[[], Awaitable[Any]]) -> bool:
        """Start an evaluation, now or when the running one has ended; tell whether it is now."""
        if self.is_running:
            logger.warning("the previous evaluation is still running; the next one waits for it")
            self._wanted = evaluate
            return False
        self.task = asyncio.create_task(self._evaluate_in_turn(evaluate))
        self.task.add_done_callback(lambda _: self._on_end())
        return True

    async def _evaluate_in_turn(self, evaluate: Callable[[], Awaitable[Any]]) -> None:
        await self._evaluate(evaluate)
        while self._wanted is not None:
            evaluate, self._wanted = self._wanted, None
            await self._evaluate(evaluate)

    async def _evaluate(self, evaluate: Callable[[], Awaitable[Any]]) -> None:
        try:
            await evaluate()
        except Exception as error:  # noqa: BLE001 - counted and logged, training goes on
            self._count_failure(type(error).__name__)
            self._errors.log("the evaluation failed", error)
        self.num_ended += 1

    async def finish(self) -> None:
        """Wait for the running evaluation and one that waits for it, if there are any."""
        if self.task is not None:
            await asyncio.wait({self.task})

    async def shut_down(self, *, grace_s: float) -> None:
        """Cancel the running evaluation and wait until it has ended, at most `grace_s`."""
        self._wanted = None
        if self.task is None or self.task.done():
            return
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=grace_s)
        if not self.task.done():
            logger.error("the evaluation ignores its cancellation: %s", self.task)

"""Own the task of an environment's evaluation: one at a time, none left out.

start ──► runs ──► on_end
  │         ▲
  └─ one runs already: the next begins when it has ended (several wanted meanwhile are one)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from atroposlib.envs.recent_errors import RepeatedErrors

__all__ = ["EvaluationRunner"]

logger = logging.getLogger(__name__)


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

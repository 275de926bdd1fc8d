"""Noticing that a training stands still although every process is alive."""

from __future__ import annotations

import time
from collections.abc import Callable

from example_trainer.processes import ManagedProcess, ProcessFailedError

__all__ = ["StallWatch"]

_LIMIT_WITHOUT_ENVIRONMENT_S = 60.0


class StallWatch:
    """Raises once the trainer has made no step for too long.

    Args:
        limit_s: Seconds without a step; when the environment has ended, one minute is enough.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = 0
        self._since = clock()

    def check(
        self, num_steps: int, *, trainer: ManagedProcess, environment: ManagedProcess
    ) -> None:
        """Raise `ProcessFailedError` when nothing has happened for too long.

        Args:
            num_steps: Steps the trainer has logged.
            trainer: Named when it is stuck with an environment at work.
            environment: Named when it has ended and the trainer still waits.
        """
        now = self._clock()
        if num_steps != self._num_steps:
            self._num_steps, self._since = num_steps, now
        stalled_s = now - self._since
        if environment.returncode is not None and stalled_s >= min(
            _LIMIT_WITHOUT_ENVIRONMENT_S, self._limit_s
        ):
            raise ProcessFailedError(environment, "ended, but the trainer has steps left to do")
        if stalled_s >= self._limit_s:
            raise ProcessFailedError(trainer, f"has made no step for {stalled_s:.0f} s")

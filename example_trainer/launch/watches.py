"""Noticing what is wrong with a run although every process of it is alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from example_trainer.doors import require_extra
from example_trainer.processes import ManagedProcess, ProcessFailedError

__all__ = ["EngineWatch", "StallWatch"]

_LIMIT_WITHOUT_ENVIRONMENT_S = 60.0
_TITLE = "VLLM::"


class EngineWatch:
    """The named processes of an engine that is ready.

    vLLM's server can outlive its workers for minutes: while it waits for an answer that will not
    come, for instance in the middle of a weight update, it neither ends nor reports it.

    Args:
        engine: Started and ready; the processes it has started by now are those it needs.
    """

    def __init__(self, engine: ManagedProcess) -> None:
        with require_extra("trainer"):
            import psutil

        self._engine = engine
        # Only those that carry the engine's title: other children come and go.
        self._parts = {
            child: title
            for child in psutil.Process(engine.pid).children(recursive=True)
            if (title := " ".join(child.cmdline())).startswith(_TITLE)
        }

    def check(self) -> None:
        """Raise `ProcessFailedError` when one of them is gone."""
        import psutil

        for part, title in self._parts.items():
            try:
                is_gone = part.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_gone = True
            if is_gone:
                raise ProcessFailedError(self._engine, f"lost its process {title.strip()}")


class StallWatch:
    """Raises once the trainer has made no step for too long.

    Args:
        limit_s: Seconds without a step; when an environment has ended, one minute is enough.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = 0
        self._since = clock()

    def check(
        self,
        num_steps: int,
        *,
        trainer: ManagedProcess,
        environments: Sequence[ManagedProcess],
    ) -> None:
        """Raise `ProcessFailedError` when nothing has happened for too long.

        Args:
            num_steps: Steps the trainer has logged.
            trainer: Named when it is stuck with all environments at work.
            environments: The first that has ended while the trainer still waits is named.
        """
        now = self._clock()
        if num_steps != self._num_steps:
            self._num_steps, self._since = num_steps, now
        stalled_s = now - self._since
        ended = next((each for each in environments if each.returncode is not None), None)
        if ended is not None and stalled_s >= min(_LIMIT_WITHOUT_ENVIRONMENT_S, self._limit_s):
            raise ProcessFailedError(ended, "ended, but the trainer has steps left to do")
        if stalled_s >= self._limit_s:
            raise ProcessFailedError(trainer, f"has made no step for {stalled_s:.0f} s")

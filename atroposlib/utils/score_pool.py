"""Running scoring code beside the event loop, each call under a time limit.

Checking an answer can cost any amount of time: a completion such as `9**9**9**9` keeps a symbolic
parser busy for ever and holds the interpreter while it does. In a worker process it stalls nobody,
and the worker is ended when its time is up.

    score = await self.score_pool.run(check_answer, completion, gold, timeout=5, default=0.0)
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, TypeVar

from atroposlib.utils.milestones import is_milestone
from atroposlib.utils.score_backends import (
    ProcessBackend,
    RayBackend,
    ScoreBackend,
    ScoreCrashError,
    ScoreTimeoutError,
    ThreadBackend,
)

__all__ = ["ScoreCrashError", "ScorePool", "ScoreTimeoutError"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

THREADS = 4
"""Threads of a pool that was given no workers."""

_BACKENDS: dict[str, type[ProcessBackend] | type[ThreadBackend] | type[RayBackend]] = {
    "PROCESS": ProcessBackend,
    "THREAD": ThreadBackend,
    "RAY": RayBackend,
}


class _Absent(Enum):
    DEFAULT = "no default"


class ScorePool:
    """Workers for scoring functions; they start with the first call and end with `close`.

    A call that takes too long, or whose worker dies, costs its own score and nothing else.

    Args:
        num_workers: calls at once; 0 runs them in threads of this process.
        timeout_s: seconds one call may take when it names no limit.
        backend: `PROCESS`, `THREAD` (nothing can be stopped when its time is up, only the wait
            for it ends) or `RAY` (needs the extra `ray`).

    Attributes:
        counts: `calls`, `timeouts`, `crashes` and `errors` (functions that raised) so far.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        timeout_s: float = 20.0,
        backend: Literal["PROCESS", "THREAD", "RAY"] = "PROCESS",
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._kind = _BACKENDS["THREAD" if num_workers == 0 else backend]
        self._num_workers = num_workers or THREADS
        self._timeout_s = timeout_s
        self._backend: ScoreBackend | None = None

    @property
    def num_timeouts(self) -> int:
        """Calls ended so far because their time was up."""
        return self.counts["timeouts"]

    async def run(
        self,
        function: Callable[..., Result],
        *args: Any,
        timeout: float | None = None,
        default: Result | Literal[_Absent.DEFAULT] = _Absent.DEFAULT,
    ) -> Result:
        """Wait for a call of `function` in a worker.

        Cancelling the wait gives the call up; its worker goes on with the next one.

        Args:
            function: a module-level function, so that a worker can import it.
            args: its arguments, which must be picklable.
            timeout: seconds this call may take, from when a worker takes it up.
            default: returned when the time is up or the worker died; without it both raise.

        Raises:
            ScoreTimeoutError: the call took longer than allowed, and there is no default.
            ScoreCrashError: the worker died, and there is no default.
            TypeError: `function` cannot be sent to a worker.
            Exception: whatever `function` raises.
        """
        limit_s = self._timeout_s if timeout is None else timeout
        if self._kind is not ThreadBackend:
            _check_importable(function)
        self.counts["calls"] += 1
        try:
            result: Result = await self._workers().call(function, args, limit_s)
        except ScoreTimeoutError as error:
            self.counts["timeouts"] += 1
            return self._instead(default, error, function)
        except ScoreCrashError as error:
            self.counts["crashes"] += 1
            return self._instead(default, error, function)
        except Exception:
            self.counts["errors"] += 1
            raise
        return result

    def close(self) -> None:
        """End the workers; running calls are given up. Closing twice is harmless."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _instead(
        self,
        default: Result | Literal[_Absent.DEFAULT],
        error: Exception,
        function: Callable[..., Any],
    ) -> Result:
        """Return the default; say so for the 1st, 10th, 100th, ... call that gets one."""
        if default is _Absent.DEFAULT:
            raise error
        count = self.counts["timeouts"] + self.counts["crashes"]
        name = getattr(function, "__qualname__", repr(function))
        level = logging.WARNING if is_milestone(count) else logging.DEBUG
        told = "scoring given up: %s: %s; it counts as %.80r (%d so far)"
        logger.log(level, told, name, error, default, count)
        return default

    def _workers(self) -> ScoreBackend:
        if self._backend is None:
            self._backend = self._kind(self._num_workers)
        return self._backend


def _check_importable(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{function!r} cannot be sent to a worker ({error}); score with a function at the top "
            "level of a module, or set --env.score_backend THREAD"
        ) from error

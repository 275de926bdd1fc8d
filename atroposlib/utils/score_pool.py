"""Running scoring code outside the event loop, each call with a time limit.

Checking an answer can take unbounded time: a completion such as `9**9**9**9` keeps a symbolic
parser busy and holds the interpreter meanwhile. In a worker process it does not stall the event
loop, and the worker is ended when its time is up.

    score = await self.score_pool.run(check_answer, completion, gold, timeout=5, default=0.0)

Backends:

| backend | a call whose time is up | a call that kills its worker |
|---|---|---|
| processes | its worker is ended and replaced | the worker is replaced |
| threads | runs on; only the wait ends | takes this process with it |
| Ray | its worker is ended by Ray | Ray replaces the worker |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar

from atroposlib.errors import AtroposError, MissingExtraError
from atroposlib.utils.text import is_milestone

__all__ = ["ScoreCrashError", "ScorePool", "ScoreTimeoutError"]

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Address space of one worker; a runaway computation fails instead of taking the machine."""

PR_SET_PDEATHSIG = 1
"""Linux: send this process a signal when its parent ends."""

OWNER_CHECK_INTERVAL_S = 1.0
CLOSING_S = 5.0


class ScoreTimeoutError(AtroposError, TimeoutError):
    """A scoring function took longer than it may."""


class ScoreCrashError(AtroposError, RuntimeError):
    """The worker that ran a scoring function died."""


class ScoreBackend(Protocol):
    """A place to run functions."""

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        """Wait for a call.

        Raises:
            ScoreTimeoutError: it took longer than `limit_s`.
            ScoreCrashError: its worker died.
            Exception: whatever `function` raises.
        """

    def close(self) -> None:
        """End the workers; running calls are given up. Closing twice is harmless."""


class ProcessBackend:
    """Worker processes of this machine; they start with the first call."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: Any = None  # a pebble.ProcessPool; pebble is imported when it is needed

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        """Wait for a call; cancelling the wait ends the worker's work on it."""
        from pebble import ProcessExpired

        pool = self._workers()
        future = pool.schedule(_outcome_of, args=[function, list(args)], timeout=limit_s)
        try:
            value, error = await asyncio.wrap_future(future)
        except ProcessExpired as died:
            raise ScoreCrashError(f"the worker of a scoring function died: {died}") from died
        except (TimeoutError, asyncio.TimeoutError) as late:  # two classes before Python 3.11
            raise ScoreTimeoutError(f"ended after {limit_s:g} s") from late
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()

    def _workers(self) -> Any:
        if self._pool is not None and not self._pool.active:
            self.close()  # a pool whose own threads failed never runs anything again
        if self._pool is None:
            from pebble import ProcessPool

            # "spawn": a forked copy of a process with threads and open sockets is not safe.
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=_prepare_worker,
                initargs=[os.getpid()],
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


class ThreadBackend:
    """Threads of this process, which do not keep it from ending."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: Any = None  # a pebble.ThreadPool

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        """Wait for a call; the wait ends with the limit, the call itself does not."""
        if self._pool is None:
            from pebble import ThreadPool

            self._pool = ThreadPool(max_workers=self._num_workers)
        outcome = asyncio.wrap_future(self._pool.schedule(_outcome_of, args=[function, args]))
        try:
            value, error = await asyncio.wait_for(outcome, limit_s)
        except (TimeoutError, asyncio.TimeoutError) as too_late:
            raise ScoreTimeoutError(f"not waited for after {limit_s:g} s") from too_late
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Start no more calls; a call that still runs is abandoned."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            with contextlib.suppress(TimeoutError):
                pool.join(timeout=CLOSING_S)


class RayBackend:
    """Tasks of a Ray cluster: the one that `RAY_ADDRESS` names, or a local one.

    Args:
        num_workers: tasks in flight at once.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, num_workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", extra="ray") from error
        self._ray = ray
        self._slots = asyncio.Semaphore(num_workers)
        self._running: set[Any] = set()
        self._task: Any = None

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        """Wait for a call; cancelling the wait ends its worker."""
        async with self._slots:
            reference = self._remote().remote(function, list(args))
            self._running.add(reference)
            outcome = asyncio.wrap_future(reference.future())
            try:
                value, error = await asyncio.wait_for(outcome, limit_s)
            except (TimeoutError, asyncio.TimeoutError) as too_late:
                raise ScoreTimeoutError(f"ended after {limit_s:g} s") from too_late
            except self._ray.exceptions.RayError as failure:
                raise ScoreCrashError(f"the Ray task failed: {failure}") from failure
            finally:
                self._running.discard(reference)
                if not outcome.done() or outcome.cancelled():
                    self._ray.cancel(reference, force=True)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the tasks that run; the connection to the cluster is left to its other users."""
        for reference in list(self._running):
            self._ray.cancel(reference, force=True)
        self._running.clear()

    def _remote(self) -> Any:
        if self._task is None:
            if not self._ray.is_initialized():
                self._ray.init(log_to_driver=False, ignore_reinit_error=True)
            self._task = self._ray.remote(max_retries=0)(_outcome_of)
        return self._task


def _outcome_of(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return what a call returned, or as second what it raised.

    As a value, so that a `TimeoutError` of the function is not taken for the end of its time.
    """
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001 - raised again where the call is awaited
        return None, error


def _prepare_worker(owner_pid: int) -> None:
    # One thread each: the workers are the parallelism, and numerical libraries reserve memory for
    # every thread they might start.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, hard))
    _end_with_owner(owner_pid)


def _end_with_owner(owner_pid: int) -> None:
    """Keep a worker from outliving a killed owner, also during a computation."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:  # other systems, and an owner that died before the line above
        while os.getppid() == owner_pid:
            time.sleep(OWNER_CHECK_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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

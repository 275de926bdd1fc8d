"""Execution of scoring code outside the event loop, each call with a time limit.

Checking an answer can take unbounded time: a completion such as `9**9**9**9` keeps a symbolic
parser busy, which holds the interpreter lock. In a worker process it does not block the event loop,
and the worker is terminated after the time limit.

    score = await self.score_pool.run(check_answer, completion, gold, timeout=5, default=0.0)

A module of scoring functions that load a package which takes seconds names it, so that a worker
imports it before its first call: `WORKER_IMPORTS = ("math_verify",)`.

| backend | call over the time limit | call that kills its worker |
|---|---|---|
| processes | the worker is terminated and replaced | the worker is replaced |
| threads | the call continues; only the wait ends | this process ends |
| Ray | Ray terminates the worker | Ray replaces the worker |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from atroposlib.errors import AtroposError, MissingExtraError
from atroposlib.utils.text import is_milestone
from atroposlib.utils.tracing import slow_span

__all__ = [
    "ProcessBackend",
    "ScoreCrashError",
    "ScorePool",
    "ScoreTimeoutError",
    "stop_processes",
]

logger = logging.getLogger(__name__)

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Address space of one worker, in addition to what its preparation takes; a computation that
exceeds it fails."""

_IMPORTS = "WORKER_IMPORTS"
"""Attribute of modules, see above."""

PR_SET_PDEATHSIG = 1
"""Option of `prctl` on Linux: signal this process when its parent ends."""

TRACED_CALL_S = 0.01
"""Calls that take less have no span: that of the score says when and how long they ran."""

OWNER_CHECK_INTERVAL_S = 1.0
CLOSING_S = 5.0
MOST_POOLS = 5
"""Pools in which a call is tried, if other calls end them."""


class ScoreTimeoutError(AtroposError, TimeoutError):
    """A scoring function exceeded its time limit."""


class ScoreCrashError(AtroposError, RuntimeError):
    """The worker that ran a scoring function died."""


class ScoreBackend(Protocol):
    """Executor of functions."""

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        """Wait for a call; cancelling gives it up.

        Raises:
            ScoreTimeoutError: it took longer than `limit_s`.
            ScoreCrashError: its worker died.
            Exception: any exception of `function`.
        """

    def close(self) -> None:
        """End the workers; running calls are given up. Closing twice has no effect."""


class ProcessBackend:
    """Worker processes on this machine; they start with the first call.

    Args:
        num_workers: number of concurrent calls.
        prepare: called in each new worker, before its first call and without a time limit; must be
            picklable.
    """

    def __init__(self, num_workers: int, prepare: Callable[[], object] | None = None) -> None:
        self._num_workers = num_workers
        self._prepare = prepare
        self._pool: Any = None  # a pebble.ProcessPool; pebble is imported when it is needed
        self._is_started = False
        self._futures: set[Future[Any]] = set()
        """Calls of the pool that have not ended."""

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
        from pebble import ProcessExpired

        for _ in range(MOST_POOLS):
            pool = self._workers()
            schedule = partial(
                pool.schedule, _sendable_outcome_of, args=[function, list(args)], timeout=limit_s
            )
            # The first call starts the processes, which would block the event loop.
            try:
                future = schedule() if self._is_started else await asyncio.to_thread(schedule)
            except RuntimeError:  # another call has ended the pool
                self._give_up(pool)
                continue
            self._is_started = self._pool is pool
            self._futures.add(future)
            try:
                value, error = await asyncio.wrap_future(future)
            except ProcessExpired as died:
                raise ScoreCrashError(f"the worker of a scoring function died: {died}") from died
            except (TimeoutError, asyncio.TimeoutError) as late:  # two classes before Python 3.11
                raise ScoreTimeoutError(f"ended after {limit_s:g} s") from late
            except BrokenProcessPool:
                self._give_up(pool)
                continue
            finally:
                self._futures.discard(future)
            if error is not None:
                raise error
            return value
        raise ScoreCrashError(
            f"the worker processes ended {MOST_POOLS} times before or during the call; a scoring "
            "function that ends its process at once does this to others"
        )

    def close(self) -> None:
        pool, self._pool = self._pool, None
        self._is_started = False
        if pool is not None:
            stop_processes(pool)

    def _give_up(self, pool: Any) -> None:
        """Let all calls of a pool run in a new one.

        pebble ends a pool if a worker dies before it is known which call the worker runs. Calls
        that were not sent to a worker yet would wait for ever.
        """
        if pool is not self._pool:
            return
        waiting, self._futures = self._futures, set()
        self.close()
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(BrokenProcessPool("another call ended the pool"))

    def _workers(self) -> Any:
        if self._pool is not None and self._is_started and not self._pool.active:
            self._give_up(self._pool)  # a pool whose threads failed cannot run further calls
        if self._pool is None:
            from pebble import ProcessPool

            # "spawn": forking a process with threads and open sockets is not safe.
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=_prepare_worker,
                initargs=[os.getpid(), self._prepare],
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


class ThreadBackend:
    """Daemon threads of this process."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: Any = None  # a pebble.ThreadPool

    async def call(self, function: Callable[..., Any], args: Sequence[Any], limit_s: float) -> Any:
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
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            # pebble waits without limit for the calls of a pool that was stopped.
            ending = threading.Thread(target=pool.join, daemon=True)
            ending.start()
            ending.join(CLOSING_S)


class RayBackend:
    """Tasks of a Ray cluster: that of `RAY_ADDRESS`, or a local one.

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
        async with self._slots:
            outputs = self._remote().remote(function, list(args))
            self._running.add(outputs)
            is_over = False
            try:
                # The first output reports the start: a busy cluster does not shorten the limit.
                await self._next_of(outputs)
                value, error = await asyncio.wait_for(self._next_of(outputs), limit_s)
                is_over = True
            except (TimeoutError, asyncio.TimeoutError) as too_late:
                raise ScoreTimeoutError(f"ended after {limit_s:g} s") from too_late
            except self._ray.exceptions.RayError as failure:
                raise ScoreCrashError(f"the Ray task failed: {failure}") from failure
            finally:
                self._running.discard(outputs)
                if not is_over:
                    self._ray.cancel(outputs, force=True)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the running tasks; the connection to the cluster stays open for other users."""
        for outputs in list(self._running):
            self._ray.cancel(outputs, force=True)
        self._running.clear()

    @staticmethod
    async def _next_of(outputs: Any) -> Any:
        return await (await anext(outputs))

    def _remote(self) -> Any:
        if self._task is None:
            if not self._ray.is_initialized():
                self._ray.init(log_to_driver=False, ignore_reinit_error=True)
            self._task = self._ray.remote(max_retries=0, num_returns="streaming")(
                _start_and_outcome
            )
        return self._task


def _start_and_outcome(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[Any]:
    """Yield None at the start, then the outcome of the call."""
    yield None
    yield _sendable_outcome_of(function, args)


def stop_processes(pool: Any) -> None:
    """Stop a `pebble.ProcessPool` and wait for the end of its workers; running calls are given up.

    `pool.join()` alone removes the semaphores first. A worker that is still starting would not find
    them, and print a traceback.
    """
    pool.stop()
    with contextlib.suppress(AttributeError):  # pebble has no public access to them
        for worker in tuple(pool._pool_manager.worker_manager.workers.values()):
            worker.kill()
    pool.join()


def _outcome_of(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the result and the exception of a call.

    The exception is returned so that a `TimeoutError` of the function is not read as a time limit.
    """
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001 - raised again where the call is awaited
        return None, error


def _sendable_outcome_of(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the outcome of a call for another process.

    An exception whose class takes other arguments than its message cannot be rebuilt there, and
    would end the pool with all its calls.
    """
    outcome = _outcome_of(function, args)
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as problem:  # noqa: BLE001 - code of any class
        error = outcome[1]
        if error is None:
            return None, TypeError(f"the result cannot be sent to another process: {problem}")
        return None, RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return outcome


def _prepare_worker(owner_pid: int, prepare: Callable[[], object] | None) -> None:
    # One thread per worker: numerical libraries reserve memory for every thread they may start.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    _end_with_owner(owner_pid)
    _import_for_workers()
    limit = MEMORY_LIMIT_BYTES
    if prepare is not None:
        prepare()
        limit += _address_space()
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _import_for_workers() -> None:
    for module in list(sys.modules.values()):  # those that the script of the owner imports
        for name in getattr(module, "__dict__", {}).get(_IMPORTS, ()):
            with contextlib.suppress(Exception):  # the call that needs it says so
                importlib.import_module(name)


def _address_space() -> int:
    """Return the bytes of this process's address space; 0 if the system does not report them."""
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _end_with_owner(owner_pid: int) -> None:
    """End a worker when its owner is killed, also during a computation."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:  # for other systems, and an owner that died before the call above
        while os.getppid() == owner_pid:
            time.sleep(OWNER_CHECK_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


Result = TypeVar("Result")

THREADS = 4
"""Number of threads of a pool without workers."""

_BACKENDS: dict[str, type[ProcessBackend] | type[ThreadBackend] | type[RayBackend]] = {
    "PROCESS": ProcessBackend,
    "THREAD": ThreadBackend,
    "RAY": RayBackend,
}


class _Absent(Enum):
    DEFAULT = "no default"


class ScorePool:
    """Workers for scoring functions; they start with the first call and end with `close`.

    A call that takes too long, or whose worker dies, does not affect other calls.

    Args:
        num_workers: number of concurrent calls; 0 runs them in threads of this process.
        timeout_s: default time limit of a call in seconds.
        backend: `PROCESS`, `THREAD` (a call over the limit cannot be stopped) or `RAY` (needs the
            extra `ray`).

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
        """Number of calls that exceeded their time limit."""
        return self.counts["timeouts"]

    async def run(
        self,
        function: Callable[..., Result],
        *args: Any,
        timeout: float | None = None,
        default: Result | Literal[_Absent.DEFAULT] = _Absent.DEFAULT,
    ) -> Result:
        """Wait for a call of `function` in a worker; cancelling gives the call up.

        Args:
            function: a module-level function, so that a worker can import it.
            args: its arguments, which must be picklable.
            timeout: time limit in seconds, from the start of the call in a worker.
            default: result after the time limit or if the worker died; without it, both raise.

        Raises:
            ScoreTimeoutError: the call exceeded its time limit, and there is no default.
            ScoreCrashError: the worker died, and there is no default.
            TypeError: `function` cannot be sent to a worker.
            Exception: any exception of `function`.
        """
        limit_s = self._timeout_s if timeout is None else timeout
        if self._kind is not ThreadBackend:
            _check_importable(function)
        self.counts["calls"] += 1
        try:
            with slow_span("rl.score.worker", at_least_s=TRACED_CALL_S):
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
        """End the workers; running calls are given up. Closing twice has no effect."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _instead(
        self,
        default: Result | Literal[_Absent.DEFAULT],
        error: Exception,
        function: Callable[..., Any],
    ) -> Result:
        """Return the default, and log a warning for the 1st, 10th, 100th, ... such call."""
        if default is _Absent.DEFAULT:
            raise error
        count = self.counts["timeouts"] + self.counts["crashes"]
        name = getattr(function, "__qualname__", repr(function))
        level = logging.WARNING if is_milestone(count) else logging.DEBUG
        message = "scoring given up: %s: %s; it counts as %.80r (%d so far)"
        logger.log(level, message, name, error, default, count)
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

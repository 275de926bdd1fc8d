"""Where scoring functions run: worker processes, threads, or a Ray cluster.

| backend | a call whose time is up | a call that kills its worker |
|---|---|---|
| processes | its worker is ended and replaced | the worker is replaced |
| threads | runs on; only the wait ends | takes this process with it |
| Ray | its worker is ended by Ray | Ray replaces the worker |
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from atroposlib.errors import AtroposError, MissingExtraError

__all__ = [
    "ProcessBackend",
    "RayBackend",
    "ScoreBackend",
    "ScoreCrashError",
    "ScoreTimeoutError",
    "ThreadBackend",
]

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
        """End the workers."""
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
        """Start nothing more; a call that still runs is left behind."""
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
    """Keep a worker from outliving a killed owner, whatever it is computing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:  # other systems, and an owner that died before the line above
        while os.getppid() == owner_pid:
            time.sleep(OWNER_CHECK_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Running scoring code in worker processes, each call under a time limit.

Checking an answer can cost any amount of time: a completion such as `9**9**9**9` keeps a symbolic
parser busy for ever and holds the interpreter while it does. In a worker process it stalls nobody,
and the worker is ended when its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ScorePool"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Address space of one worker; a runaway computation fails instead of taking the machine."""

PR_SET_PDEATHSIG = 1
"""Linux: send this process a signal when its parent ends."""

OWNER_CHECK_INTERVAL_S = 1.0


class ScorePool:
    """Worker processes for scoring functions.

    The workers start with the first call and end with `close`, or when this process ends.

    Args:
        num_workers: processes; 0 runs the calls in threads of this process, where nothing can be
            stopped when its time is up.
        timeout_s: seconds one call may take.

    Attributes:
        num_timeouts: calls ended so far because their time was up.
    """

    def __init__(self, *, num_workers: int = 2, timeout_s: float = 20.0) -> None:
        self.num_timeouts = 0
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._pool: Any = None  # a pebble.ProcessPool; pebble is imported when it is needed

    async def run(self, function: Callable[..., Result], *args: Any, on_timeout: Result) -> Result:
        """Wait for a call of `function` in a worker.

        Cancelling the wait gives the call up; its worker goes on with the next one.

        Args:
            function: a module-level function, so that a worker can import it.
            args: its arguments, which must be picklable.
            on_timeout: returned, and counted, when the call takes longer than allowed.

        Raises:
            Exception: whatever `function` raises.
        """
        if self._num_workers == 0:
            return await asyncio.to_thread(function, *args)
        future = self._workers().schedule(function, args=list(args), timeout=self._timeout_s)
        try:
            result: Result = await asyncio.wrap_future(future)
        except TimeoutError:
            pass
        except asyncio.TimeoutError:  # its own class before Python 3.11
            pass
        else:
            return result
        self.num_timeouts += 1
        logger.debug("%s ended after %g s", function.__name__, self._timeout_s)
        return on_timeout

    def close(self) -> None:
        """End the workers; running calls are given up. Closing twice is harmless."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()

    def _workers(self) -> Any:
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

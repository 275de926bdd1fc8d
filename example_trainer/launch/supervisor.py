"""Several child processes as one whole: when one fails, all end, and the failure is named."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from example_trainer.processes import ManagedProcess, ProcessFailedError, wait_until_ready

__all__ = ["Supervisor", "ending_signals"]

_SETTLE_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM unwind the program once, and ignore those after it.

    SIGINT raises `KeyboardInterrupt`, SIGTERM `SystemExit` with 143.
    """
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    # One interruption is enough: a second one must not break off the ending of the processes.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


class Supervisor:
    """Owns processes: starts them, notices when one ends, stops all of them together.

    A process that ends by itself is a failure unless it was started with `may_finish` and ends
    with code 0. Used as a context manager, it stops every process on exit.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._processes: list[ManagedProcess] = []
        self._may_finish: set[str] = set()

    def start(self, process: ManagedProcess, *, may_finish: bool = False) -> None:
        """Start a process and watch it from now on.

        Args:
            process: Not started before.
            may_finish: Whether ending with code 0 is what it should do at some time.
        """
        # Known before it runs: an interruption during the start must not leave it behind.
        self._processes.append(process)
        if may_finish:
            self._may_finish.add(process.name)
        process.start()

    def check(self) -> None:
        """Raise `ProcessFailedError` when one of the processes has ended but should not have.

        Processes fail because those they depend on failed: the first one in the order of starting
        is named, after a moment in which it may still be seen to end.
        """
        if self._first_failed() is None:
            return
        deadline = self._clock() + _SETTLE_S
        while self._processes[0].is_alive() and self._clock() < deadline:
            self._sleep(0.1)
        failed = self._first_failed()
        assert failed is not None
        raise ProcessFailedError(failed, failed.describe_exit())

    def wait_until_ready(
        self,
        process: ManagedProcess,
        is_ready: Callable[[], bool],
        *,
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> float:
        """Wait for one process while watching all; see `processes.wait_until_ready`."""

        def watch(waited_s: float) -> None:
            self.check()
            if on_wait is not None:
                on_wait(waited_s)

        return wait_until_ready(process, is_ready, timeout_s=timeout_s, on_wait=watch)

    def stop(self, *, grace_s: float = 8.0) -> None:
        """End every process and wait until all are gone; those started last are asked first."""
        for process in reversed(self._processes):
            process.request_stop(grace_s=grace_s)
        for process in reversed(self._processes):
            process.stop(grace_s=grace_s)
        self._processes.clear()

    def _first_failed(self) -> ManagedProcess | None:
        for process in self._processes:
            code = process.poll()
            if code is not None and not (code == 0 and process.name in self._may_finish):
                return process
        return None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

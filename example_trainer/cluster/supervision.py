"""Supervision of the parts of a run as child processes: started in order, and ended together.

RunLives (`restarts`: what to do) ◄── RunSupervisor ──► processes (what happens)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from example_trainer.cluster.parts import Part
from example_trainer.cluster.placement import RunStatus
from example_trainer.cluster.restarts import INVALID_SETTINGS, PartLife, RunLives, may_finish
from example_trainer.launch.stack import Supervisor, check_signals
from example_trainer.processes import ManagedProcess, ProcessFailedError

_POLL_S = 0.25
_CHECK_S = 5.0
_CHECK_TIMEOUT_S = 10.0
_GRACE_S = 5.0
_MAX_CHECKS = 16

StartProcess = Callable[[Part], ManagedProcess]
"""Creates the process of a part, not started yet."""


@dataclass
class _Child:
    """One part and its present process."""

    life: PartLife
    process: ManagedProcess | None = None
    progress_bytes: int = 0
    checked: float = 0.0
    check: Future[bool] | None = None


class RunSupervisor:
    """Runs the parts of one run until its end; every process has ended when `run` returns.

    Args:
        parts: The parts, in the order of their start.
        make_process: Creates the process of a part.
        start_limit_s: Seconds after which a server that does not answer has failed.
        on_event: Receives one line per start, failure and restart.
        on_change: Receives the status whenever it changes; again if it could not write it.
        on_return: Called in a thread with a server that was started again and answers, before
            it counts as running; returns a line about what it did.
        progress: Called often; returns a line about the run's progress now and then.
        clock: Seconds of a monotonic clock.
        sleep: Waits between two looks at the parts.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        make_process: StartProcess,
        *,
        start_limit_s: float,
        on_event: Callable[[str], None],
        on_change: Callable[[RunStatus], None],
        on_return: Callable[[Part], str | None] = lambda part: None,
        progress: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = RunLives(parts, start_limit_s=start_limit_s)
        self._children = [_Child(life) for life in self._run.lives.values()]
        self._make_process = make_process
        self._on_event = on_event
        self._on_change = on_change
        self._on_return = on_return
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._supervisor = Supervisor()
        self._checks = ThreadPoolExecutor(_MAX_CHECKS, thread_name_prefix="health")
        self._http = httpx.Client(timeout=_CHECK_TIMEOUT_S, trust_env=False)
        self._reported: RunStatus | None = None
        self._is_unwritable = False

    def run(self) -> RunStatus:
        """Supervise until the trainer has finished or a part has failed; return the last status.

        An exception, such as that of a signal, ends every process too, and the run is `stopped`.
        """
        try:
            with self._supervisor:
                while self._run.state == "running":
                    check_signals()
                    for child in self._children:
                        self._advance(child)
                    self._report()
                    if (line := self._progress()) is not None:
                        self._say(line)
                    self._sleep(_POLL_S)
        except BaseException:
            self._run.end("stopped")
            raise
        finally:
            self._checks.shutdown(wait=False, cancel_futures=True)
            self._http.close()
            self._run.stop()
            self._report()
        return self.status()

    def status(self) -> RunStatus:
        return self._run.status()

    def _report(self) -> None:
        status = self.status()
        if status == self._reported:
            return
        try:
            self._on_change(status)
        except OSError as error:  # a full disk, which someone may make room on
            if not self._is_unwritable:
                self._say(f"the state of the run cannot be written: {error}")
            self._is_unwritable = True
        else:
            self._reported, self._is_unwritable = status, False

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a reader that has left
            self._on_event(line)

    def _advance(self, child: _Child) -> None:
        """Take the step that the state of one part and the time allow."""
        now, life = self._clock(), child.life
        if life.is_due(now):
            if self._run.has_its_needs(life):
                self._start(child, now)
        elif life.is_live:
            self._watch(child, now)

    def _start(self, child: _Child, now: float) -> None:
        part = child.life.part
        process = self._make_process(part)
        child.process, child.checked = process, 0.0
        child.life.begin(now)
        if part.ready_url is None:
            child.life.answer(now)
        try:
            self._supervisor.start(process, may_finish=True)
        except ProcessFailedError as error:
            self._fail(child, now, error.reason, is_final=process.poll() == INVALID_SETTINGS)
            return
        except OSError as error:
            self._fail(child, now, f"could not be started: {error}")
            return
        child.life.detail = f"pid {process.pid}"
        self._say(f"{part.name} started (log: {process.log_path})")

    def _watch(self, child: _Child, now: float) -> None:
        assert child.process is not None
        life, part = child.life, child.life.part
        code = child.process.poll()
        if code == 0 and may_finish(part):
            self._finish(child)
        elif code is not None:
            is_final = self._run.is_final(life, code, self._answers)
            self._fail(child, now, child.process.describe_exit(), is_final=is_final)
        elif part.ready_url is not None:
            self._check_health(child, now, part.ready_url)
        elif part.progress_file is not None and part.stall_limit_s is not None:
            self._check_progress(child, now, part.progress_file, part.stall_limit_s)

    def _check_health(self, child: _Child, now: float, url: str) -> None:
        life = child.life
        if child.check is not None and child.check.done():
            is_healthy, child.check = child.check.result(), None
            if is_healthy:
                if life.state == "starting":
                    self._say(f"{life.part.name} is ready after {now - life.since:.0f} s")
                life.answer(now)
        elif child.check is None and (life.state == "starting" or now - child.checked >= _CHECK_S):
            child.checked = now
            returns = life.state == "starting" and life.attempts.total > 0
            child.check = self._checks.submit(self._is_ready, life.part, url, returns=returns)
        reason = self._run.silence(life, now)
        if reason is not None:
            self._fail(child, now, reason)

    def _check_progress(self, child: _Child, now: float, path: Path, limit_s: float) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if size != child.progress_bytes:  # a resumed trainer cuts its file
                child.progress_bytes = size
                child.life.answer(now)
        if now - child.life.answered >= limit_s:
            self._fail(child, now, f"made no progress for {limit_s:g} s")

    def _is_ready(self, part: Part, url: str, *, returns: bool) -> bool:
        if not self._answers(url):
            return False
        said = self._on_return(part) if returns else None
        if said is not None:
            self._say(said)
        return True

    def _answers(self, url: str) -> bool:
        try:
            return self._http.get(url).status_code == 200
        except (httpx.HTTPError, RuntimeError):  # RuntimeError: closed at the end of the run
            return False

    def _finish(self, child: _Child) -> None:
        assert child.process is not None
        self._supervisor.forget(child.process)
        self._run.finish(child.life)
        self._say(f"{child.life.part.name} finished")

    def _fail(self, child: _Child, now: float, reason: str, *, is_final: bool = False) -> None:
        """Restart a part later, or end the run."""
        assert child.process is not None
        process, life = child.process, child.life
        process.stop(grace_s=_GRACE_S)
        self._supervisor.forget(process)
        child.check = None
        cause = str(ProcessFailedError(process, reason))
        retry_at = self._run.fail(life, now, reason, is_final=is_final, cause=cause)
        after = (
            "not started again"
            if retry_at is None
            else f"restart {life.attempts.total} in {retry_at - now:.0f} s"
        )
        self._say(f"{life.part.name} {reason}; {after}")


def tail_of(path: Path, *, lines: int, max_bytes: int = 2**20) -> list[str]:
    """Return the last lines of a log; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - max_bytes))
        return log.read().decode(errors="replace").splitlines()[-lines:]
    return []

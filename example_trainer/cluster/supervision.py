"""Supervision of the parts of a run: start in order, restart with back-off, end together.

    waiting ──► starting ──► running ──► finished (exit code 0 of an environment or the trainer)
       ▲                        │
       └── restarting ◄─────────┴──► failed (invalid settings, or no attempts left)

The run has finished with its trainer, and has failed with the first part that has. A part whose
settings are invalid (exit code 2) is not started again, unless a part that it needs failed during
its life: an engine that does not answer looks like an invalid address.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from example_trainer.cluster.parts import Part, RestartPolicy
from example_trainer.cluster.placement import PartState, PartStatus, RunState, RunStatus
from example_trainer.launch.stack import Supervisor
from example_trainer.processes import ManagedProcess, ProcessFailedError

INVALID_SETTINGS = 2
_POLL_S = 0.25
_CHECK_S = 5.0
_CHECK_TIMEOUT_S = 10.0
_GRACE_S = 5.0
_MAX_CHECKS = 16

StartProcess = Callable[[Part], ManagedProcess]
"""Creates the process of a part, not started yet."""


class Attempts:
    """Counts the restarts of one part against its policy; pure."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._used = 0
        self._failed_at: float | None = None
        self.total = 0
        """Restarts during the whole run."""

    def after_failure(self, now: float) -> float | None:
        """Return the time of the next restart; None if no attempts are left."""
        policy = self._policy
        if self._failed_at is not None and now - self._failed_at >= policy.healthy_s:
            self._used = 0
        self._failed_at = now
        if self._used >= policy.attempts:
            return None
        self._used += 1
        self.total += 1
        return now + policy.backoff_s(self._used - 1)


@dataclass
class _Life:
    """One part and its present process."""

    part: Part
    attempts: Attempts
    state: PartState = "waiting"
    process: ManagedProcess | None = None
    since: float = 0.0
    """Time of the start of the process, or of the next one."""
    answered: float = 0.0
    """Time of the last answer of its `ready_url`, or of the last growth of its progress file."""
    progress_bytes: int = 0
    checked: float = 0.0
    check: Future[bool] | None = None
    detail: str = ""


@dataclass
class _Outcome:
    state: RunState = "running"
    detail: str = ""


class RunSupervisor:
    """Runs the parts of one run until its end; every process has ended when `run` returns.

    Args:
        parts: The parts, in the order of their start.
        make_process: Creates the process of a part.
        start_limit_s: Seconds after which a server that does not answer has failed.
        on_event: Receives one line per start, failure and restart.
        on_change: Receives the status whenever it changes.
        on_return: Called in a thread with a server that was started again and answers, before
            it counts as running; returns a line about what it did.
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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lives = {part.name: _Life(part, Attempts(part.restarts)) for part in parts}
        self._make_process = make_process
        self._start_limit_s = start_limit_s
        self._on_event = on_event
        self._on_change = on_change
        self._on_return = on_return
        self._clock = clock
        self._sleep = sleep
        self._supervisor = Supervisor()
        self._checks = ThreadPoolExecutor(_MAX_CHECKS, thread_name_prefix="health")
        self._http = httpx.Client(timeout=_CHECK_TIMEOUT_S, trust_env=False)
        self._outcome = _Outcome()
        self._reported: RunStatus | None = None

    def run(self) -> RunStatus:
        """Supervise until the trainer has finished or a part has failed; return the last status.

        An exception, such as that of a signal, ends every process too, and the run is `stopped`.
        """
        try:
            with self._supervisor:
                while self._outcome.state == "running":
                    for life in self._lives.values():
                        self._advance(life)
                    self._report()
                    self._sleep(_POLL_S)
        except BaseException:
            self._outcome.state = "stopped"
            raise
        finally:
            self._checks.shutdown(wait=False, cancel_futures=True)
            self._http.close()
            self._end_lives()
            self._report()
        return self.status()

    def status(self) -> RunStatus:
        parts = tuple(
            PartStatus(name, life.state, life.attempts.total, life.detail)
            for name, life in self._lives.items()
        )
        return RunStatus(self._outcome.state, parts, self._outcome.detail)

    def _report(self) -> None:
        status = self.status()
        if status != self._reported:
            self._reported = status
            self._on_change(status)

    def _advance(self, life: _Life) -> None:
        """Take the step that the state of one part and the time allow."""
        now = self._clock()
        if life.state == "waiting":
            if all(self._lives[name].state == "running" for name in life.part.after):
                self._start(life, now)
        elif life.state == "restarting":
            if now >= life.since:
                life.state = "waiting"
        elif life.state in ("starting", "running"):
            self._watch(life, now)

    def _start(self, life: _Life, now: float) -> None:
        process = self._make_process(life.part)
        life.process, life.since, life.answered, life.checked = process, now, now, 0.0
        life.state = "starting" if life.part.ready_url else "running"
        try:
            self._supervisor.start(process, may_finish=True)
        except ProcessFailedError as error:
            self._fail(life, now, error.reason, is_final=process.poll() == INVALID_SETTINGS)
            return
        life.detail = f"pid {process.pid}"
        self._on_event(f"{life.part.name} started (log: {process.log_path})")

    def _watch(self, life: _Life, now: float) -> None:
        assert life.process is not None
        code = life.process.poll()
        if code == 0 and life.part.role in ("environment", "trainer"):
            self._finish(life)
        elif code is not None:
            is_final = code == INVALID_SETTINGS and not self._is_excused(life)
            self._fail(life, now, life.process.describe_exit(), is_final=is_final)
        elif life.part.ready_url is not None:
            self._check_health(life, now, life.part.ready_url)
        elif life.part.progress_file is not None and life.part.stall_limit_s is not None:
            self._check_progress(life, now, life.part.progress_file, life.part.stall_limit_s)

    def _is_excused(self, life: _Life) -> bool:
        """Whether a part that it needs does not answer, or was started again during its life."""
        needed = [self._lives[name] for name in life.part.after]
        if any(each.state != "running" or each.since > life.since for each in needed):
            return True
        # Its end may not have been noticed yet.
        urls = [each.part.ready_url for each in needed if each.part.ready_url]
        return not all(self._answers(url) for url in urls)

    def _check_health(self, life: _Life, now: float, url: str) -> None:
        if life.check is not None and life.check.done():
            is_healthy, life.check = life.check.result(), None
            if is_healthy:
                life.answered = now
                if life.state == "starting":
                    life.state = "running"
                    self._on_event(f"{life.part.name} is ready after {now - life.since:.0f} s")
        elif life.check is None and (life.state == "starting" or now - life.checked >= _CHECK_S):
            life.checked = now
            returns = life.state == "starting" and life.attempts.total > 0
            life.check = self._checks.submit(self._is_ready, life.part, url, returns=returns)
        is_starting = life.state == "starting"
        limit_s = self._start_limit_s if is_starting else life.part.restarts.unresponsive_s
        if now - life.answered >= limit_s:
            what = "was not ready" if is_starting else "did not answer"
            self._fail(life, now, f"{what} for {limit_s:g} s")

    def _check_progress(self, life: _Life, now: float, path: Path, limit_s: float) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if size != life.progress_bytes:  # a resumed trainer cuts its file
                life.progress_bytes, life.answered = size, now
        if now - life.answered >= limit_s:
            self._fail(life, now, f"made no progress for {limit_s:g} s")

    def _is_ready(self, part: Part, url: str, *, returns: bool) -> bool:
        if not self._answers(url):
            return False
        said = self._on_return(part) if returns else None
        if said is not None:
            self._on_event(said)
        return True

    def _answers(self, url: str) -> bool:
        try:
            return self._http.get(url).status_code == 200
        except (httpx.HTTPError, RuntimeError):  # RuntimeError: closed at the end of the run
            return False

    def _finish(self, life: _Life) -> None:
        assert life.process is not None
        life.state, life.detail = "finished", ""
        self._supervisor.forget(life.process)
        self._on_event(f"{life.part.name} finished")
        if life.part.role == "trainer":
            self._outcome.state = "finished"

    def _fail(self, life: _Life, now: float, reason: str, *, is_final: bool = False) -> None:
        """Restart a part later, or end the run."""
        assert life.process is not None
        life.process.stop(grace_s=_GRACE_S)
        self._supervisor.forget(life.process)
        life.check = None
        life.detail = reason
        retry_at = None if is_final else life.attempts.after_failure(now)
        if retry_at is None:
            life.state = "failed"
            self._outcome.state = "failed"
            self._outcome.detail = str(ProcessFailedError(life.process, reason))
            self._on_event(f"{life.part.name} {reason}; not started again")
            return
        life.state, life.since = "restarting", retry_at
        self._on_event(
            f"{life.part.name} {reason}; restart {life.attempts.total} in {retry_at - now:.0f} s"
        )

    def _end_lives(self) -> None:
        for life in self._lives.values():
            if life.state not in ("finished", "failed"):
                life.state, life.detail = "stopped", ""


def tail_of(path: Path, *, lines: int, max_bytes: int = 2**20) -> list[str]:
    """Return the last lines of a log; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - max_bytes))
        return log.read().decode(errors="replace").splitlines()[-lines:]
    return []

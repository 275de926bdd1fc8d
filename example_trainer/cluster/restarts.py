"""The rules by which the supervisors of all placements start parts again and end a run; pure.

    waiting ──► starting ──► running ──► finished (exit code 0 of an environment or the trainer)
       ▲                        │
       └── restarting ◄─────────┴──► failed (invalid settings, or no attempts left)

The run has finished with its trainer, and has failed with the first part that has. A part whose
settings are invalid (exit code 2) is not started again, unless a part that it needs failed during
its life: an engine that does not answer looks like an invalid address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from example_trainer.cluster.parts import Part, RestartPolicy
from example_trainer.cluster.placement import PartState, PartStatus, RunState, RunStatus

INVALID_SETTINGS = 2
"""Exit code of our programs for settings that can never work."""


class Attempts:
    """Counts the restarts of one part against its policy."""

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
class PartLife:
    """State of one part; times are those of one monotonic clock."""

    part: Part
    attempts: Attempts
    state: PartState = "waiting"
    since: float = 0.0
    """Time of the last start."""
    answered: float = 0.0
    """Time of the last sign of life."""
    retry_at: float = float("-inf")
    """Time of the next start, after a failure."""
    detail: str = ""

    @property
    def is_live(self) -> bool:
        """Whether its program should run."""
        return self.state in ("starting", "running")

    def is_due(self, now: float) -> bool:
        """Whether it waits for other parts only, its back-off being over."""
        if self.state == "restarting" and now >= self.retry_at:
            self.state = "waiting"
        return self.state == "waiting"

    def begin(self, now: float) -> None:
        """Record the start of its program."""
        self.state, self.since, self.answered = "starting", now, now

    def answer(self, now: float) -> None:
        """Record a sign of life, with which a part that was starting runs."""
        self.state, self.answered = "running", now


class RunLives:
    """The parts of one run and its outcome.

    Args:
        parts: The parts, in the order of their start.
        start_limit_s: Seconds after which a part that does not answer after its start has failed.
    """

    def __init__(self, parts: Sequence[Part], *, start_limit_s: float) -> None:
        self.lives = {part.name: PartLife(part, Attempts(part.restarts)) for part in parts}
        self.state: RunState = "running"
        self.reason = ""
        self._start_limit_s = start_limit_s

    def status(self) -> RunStatus:
        parts = tuple(
            PartStatus(name, life.state, life.attempts.total, life.detail)
            for name, life in self.lives.items()
        )
        return RunStatus(self.state, parts, self.reason)

    def has_its_needs(self, life: PartLife) -> bool:
        """Whether the parts that have to be ready before its start run."""
        return all(self.lives[name].state == "running" for name in life.part.after)

    def silence(self, life: PartLife, now: float) -> str | None:
        """Return the reason of a failure if a part has not answered for too long."""
        is_starting = life.state == "starting"
        limit_s = self._start_limit_s if is_starting else life.part.restarts.unresponsive_s
        if now - life.answered < limit_s:
            return None
        return f"{'was not ready' if is_starting else 'did not answer'} for {limit_s:g} s"

    def is_final(self, life: PartLife, code: int | None, answers: Callable[[str], bool]) -> bool:
        """Whether a part that ended with `code` is not to be started again.

        `answers` asks a server for its health: its end may not have been noticed yet.
        """
        if code != INVALID_SETTINGS:
            return False
        needed = [self.lives[name] for name in life.part.after]
        if any(each.state != "running" or each.since > life.since for each in needed):
            return False
        return all(answers(each.part.ready_url) for each in needed if each.part.ready_url)

    def finish(self, life: PartLife) -> None:
        """Record that a part has done its work; with the trainer, the run has."""
        life.state, life.detail = "finished", ""
        if life.part.role == "trainer":
            self.end("finished")

    def fail(
        self, life: PartLife, now: float, reason: str, *, is_final: bool = False, cause: str = ""
    ) -> float | None:
        """Record a failure; with the last attempt, the run fails.

        Args:
            life: The part.
            now: The time.
            reason: Why it failed, for the state of the part.
            is_final: Whether it is not to be started again.
            cause: The reason for that of the run; empty: part and `reason`.

        Returns:
            The time of the restart; None without one.
        """
        life.detail = reason
        retry_at = None if is_final else life.attempts.after_failure(now)
        if retry_at is not None:
            life.state, life.retry_at = "restarting", retry_at
        else:
            life.state = "failed"
            self.end("failed", cause or f"{life.part.name}: {reason}")
        return retry_at

    def end(self, state: RunState, reason: str = "") -> None:
        """Set the outcome of the run; the first one counts."""
        if self.state == "running":
            self.reason, self.state = reason, state

    def stop(self) -> None:
        """Record that every part which has not ended was ended with the run."""
        for life in self.lives.values():
            if life.state not in ("finished", "failed"):
                life.state, life.detail = "stopped", ""


def may_finish(part: Part) -> bool:
    """Whether exit code 0 means that the part has done its work; servers never have."""
    return part.role in ("environment", "trainer")

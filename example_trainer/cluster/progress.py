"""Lines about the progress of a run, from the metrics or the log of its trainer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from atroposlib.utils.text import inert_line
from example_trainer.cluster.supervision import tail_of
from example_trainer.launch.report import BATCH_REWARD, count_steps, read_rewards

_LOOK_S = 2.0
INTERVAL_S = 60.0
"""Seconds between two lines about steps, except the first and the last step."""
QUIET_S = 60.0
"""Seconds without a step until a line says so; the time doubles after each line."""
_LOG_CHARACTERS = 300


class StepLines:
    """Returns a line about the last step now and then, and about a trainer that makes none.

    Args:
        metrics_path: Metrics of the trainer; may not exist yet.
        log_path: Its log; while there is none, the trainer is not expected to make steps.
        num_steps: Steps of the whole run.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        metrics_path: Path,
        log_path: Path,
        *,
        num_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics_path = metrics_path
        self._log_path = log_path
        self._num_steps = num_steps
        self._clock = clock
        self._steps = 0
        with contextlib.suppress(OSError, ValueError):
            self._steps = count_steps(metrics_path)  # of an earlier start of the run
        self._since = clock()
        self._quiet_s = QUIET_S
        self._next_look = self._next_line = self._since

    def next_line(self) -> str | None:
        """Return a line to show now, or None; cheap enough to be called several times a second."""
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        with contextlib.suppress(OSError, ValueError):  # a file that cannot be read ends no run
            steps = count_steps(self._metrics_path)
            if steps == self._steps:
                return self._quiet_line(now)
            self._steps, self._since, self._quiet_s = steps, now, QUIET_S
            return self._step_line(now)
        return None

    def _step_line(self, now: float) -> str | None:
        if now < self._next_line and self._steps < self._num_steps:
            return None
        self._next_line = now + INTERVAL_S
        text = f"step {self._steps} of {self._num_steps}"
        rewards = read_rewards(self._metrics_path, BATCH_REWARD)
        return f"{text}, {BATCH_REWARD.summary.format(rewards[-1].reward)}" if rewards else text

    def _quiet_line(self, now: float) -> str | None:
        if not self._log_path.is_file() or self._steps >= self._num_steps:
            self._since = now
        quiet_s = now - self._since
        if quiet_s < self._quiet_s:
            return None
        self._quiet_s *= 2
        return (
            f"no step for {quiet_s:.0f} s; the trainer's log ends with: {_end_of(self._log_path)}"
        )


class LogLines:
    """Returns the end of the log of another trainer now and then, if it has changed.

    Args:
        log_path: Its log; may not exist yet.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, log_path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log_path = log_path
        self._clock = clock
        self._shown = ""
        self._next_line = clock() + INTERVAL_S

    def next_line(self) -> str | None:
        """Return a line to show now, or None; cheap enough to be called several times a second."""
        if self._clock() < self._next_line:
            return None
        self._next_line = self._clock() + INTERVAL_S
        last = ""
        with contextlib.suppress(OSError, ValueError):
            last = _end_of(self._log_path)
        if last in ("", self._shown):
            return None
        self._shown = last
        return f"the trainer's log ends with: {last}"


def _end_of(log_path: Path) -> str:
    last = " ".join(tail_of(log_path, lines=1))
    return inert_line(last, max_characters=_LOG_CHARACTERS)

"""What a running environment looks like at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ErrorLine", "RunSnapshot"]

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class ErrorLine:
    """A warning or an error of the log."""

    time_s: float
    """When it came last, seconds since the epoch."""
    text: str
    """One line; may hold anything, what a model wrote included."""
    count: int = 1
    """How often it came."""
    is_error: bool = True
    """False for a warning."""


@dataclass(frozen=True)
class RunSnapshot:
    """A running environment at one moment.

    Example:
        RunSnapshot(name="gsm8k_0", activity="rolling out", elapsed_s=61.0, step=3, total_steps=10)
    """

    name: str
    """As registered."""
    activity: str
    """What it does, in a few words."""
    elapsed_s: float
    """Seconds since rollouts began."""
    step: int
    """Trainer steps done; groups made under `process`."""
    total_steps: int
    """Where the run ends; negative when it does not."""
    step_word: str = "step"
    """What a step is: `step` or `group`."""
    group_size: int = 1
    """Rollouts of a group."""
    groups_running: int = 0
    """Groups in the making."""
    most_groups_running: int | None = None
    """Groups that may be in the making; None where that is one."""
    groups_sending: int = 0
    """Finished groups that are on their way to the service."""
    oldest_rollout_s: float | None = None
    """Seconds the longest group in the making has taken; None when nothing runs."""
    groups_done: int = 0
    """Groups made, dropped ones included."""
    groups_per_s: float = 0.0
    """Of the last minute."""
    tokens_done: int = 0
    """Trained tokens of these groups."""
    tokens_per_s: float = 0.0
    """Of the last minute."""
    queue_groups: int | None = None
    """Groups waiting at the service; None without one."""
    queue_batches: float | None = None
    """The same in batches; None when the batch size is unknown."""
    staleness_mean: float | None = None
    """Trainer steps that went by while a group was made; None when nothing is known."""
    staleness_max: int | None = None
    """The most of the latest groups."""
    scores: tuple[float, ...] = ()
    """The latest scores, of dropped groups too."""
    drops: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Groups dropped, by reason."""
    failures: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Failed rollouts and hooks, by name."""
    stragglers: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Rollouts that took too long, by what became of them."""
    errors: tuple[ErrorLine, ...] = ()
    """The latest warnings and errors, oldest first."""

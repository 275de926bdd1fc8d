"""Decide how many rollouts may run, from what the service says and what the config allows.

Pure arithmetic: no clock, no network, no tasks. The letters of the formulas are

    B = batch_size, K = max_batches_offpolicy, G = group_size, M = largest group in the queue,
    a = min_batch_allocation, q = own groups in the queue.

Counts are groups unless the name says sequences; one worker makes one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "CapacityLimits",
    "QueueStatus",
    "crossed_boundary",
    "derived_batch_size",
    "failure_pause_s",
    "is_queue_full",
    "is_run_finished",
    "own_share_groups",
    "worker_limit",
]

UNKNOWN_BATCH_SIZE = -1
FAILURES_BEFORE_PAUSE = 16
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class QueueStatus:
    """What the service says about its queue, seen by one environment."""

    current_step: int
    """Trainer step."""
    queue_groups: int
    """Groups waiting in the whole queue, in units of the asker's groups."""
    own_queue_groups: int = 0
    """Groups of the asker waiting in the queue."""
    max_group_size: int = 1
    """Sequences in the largest group of the queue."""
    unallocated_fraction: float = 1.0
    """Share of a batch that no environment has reserved, 0 to 1."""
    groups_to_start: int | None = None
    """Groups the service lets the asker have in the making, running ones included; None: any."""

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any], *, unreported_groups: int = 0) -> QueueStatus:
        """Read a `/status-env` reply; keys an older service lacks take neutral values.

        Args:
            reply: decoded reply.
            unreported_groups: groups accepted by the service after it took this picture; they
                count as queued, so that a stale picture never starts too many rollouts.
        """
        status = cls(
            current_step=int(reply["current_step"]),
            queue_groups=int(reply["queue_size"]),
            own_queue_groups=int(reply.get("self_queue_size", 0)),
            max_group_size=int(reply.get("max_group_size", 1)),
            unallocated_fraction=float(reply.get("unallocated_fraction", 1.0)),
            groups_to_start=reply.get("groups_to_start"),
        )
        if status.groups_to_start is not None:
            left = max(0, int(status.groups_to_start) - unreported_groups)
            status = replace(status, groups_to_start=left)
        return replace(
            status,
            queue_groups=status.queue_groups + unreported_groups,
            own_queue_groups=status.own_queue_groups + unreported_groups,
        )


@dataclass(frozen=True)
class CapacityLimits:
    """The part of an environment's config that bounds its rollouts."""

    group_size: int
    """Sequences per group."""
    batch_size: int
    """Sequences per batch; -1 when the trainer has not said."""
    max_batches_offpolicy: int
    """Batches the environment may run ahead of the trainer; 0 or less lifts the limit."""
    max_workers: int
    """Rollouts at once, whatever the queue."""
    total_steps: int = -1
    """Trainer steps of the run; negative when unknown."""
    min_batch_allocation: float | None = None
    """Share of each batch reserved for this environment; None reserves nothing."""


def crossed_boundary(*, old_step: int, new_step: int, interval: int) -> int | None:
    """Return the last multiple of `interval` passed on the way from old to new step, or None.

    Compares integer quotients, so a jump over several boundaries reports once and none is missed:
    interval 2 and a jump from 0 to 3 give 2. An interval of 0 or less never fires.
    """
    if interval <= 0 or new_step // interval <= old_step // interval:
        return None
    return new_step // interval * interval


def is_run_finished(*, current_step: int, total_steps: int) -> bool:
    """Tell whether the trainer has done its steps; a negative total never ends."""
    return 0 <= total_steps <= current_step


def derived_batch_size(
    *, batch_size: int, unallocated_fraction: float, min_batch_allocation: float | None
) -> int:
    """Return how many sequences of each batch this environment may fill; -1 when unknown.

    That is the unreserved part plus what this environment reserved itself: B = 16, half of it
    unallocated and a quarter its own give 12.
    """
    if batch_size == UNKNOWN_BATCH_SIZE:
        return UNKNOWN_BATCH_SIZE
    return int(batch_size * (unallocated_fraction + (min_batch_allocation or 0.0)))


def is_queue_full(status: QueueStatus, limits: CapacityLimits) -> bool:
    """Tell whether no rollout may start now because enough sequences wait for the trainer.

    The queue is full when it holds K batches, unless a reserved share is still unfilled:
    `ceil(a*B*K / M) * (M // G) - q > 0`. It also counts as full when the batch size is unknown,
    and when what is queued already takes the trainer past the end of the run.

    M counts at least G here. With smaller groups of others in the queue the formula would call
    an empty share filled, and batches that need this environment would never form.
    """
    if limits.batch_size == UNKNOWN_BATCH_SIZE:
        return True
    queued_sequences = status.queue_groups * limits.group_size
    if limits.total_steps >= 0:
        queued_steps = queued_sequences // limits.batch_size
        if status.current_step + queued_steps > limits.total_steps:
            return True
    if limits.max_batches_offpolicy <= 0:
        return False
    if queued_sequences < limits.max_batches_offpolicy * limits.batch_size:
        return False
    return not _has_unfilled_share(status, limits)


def _has_unfilled_share(status: QueueStatus, limits: CapacityLimits) -> bool:
    if limits.min_batch_allocation is None:
        return False
    largest = max(status.max_group_size, limits.group_size)
    packs = _reserved_packs(limits, pack_sequences=largest)
    return packs * (largest // limits.group_size) - status.own_queue_groups > 0


def _reserved_packs(limits: CapacityLimits, *, pack_sequences: int) -> int:
    reserved_sequences = (
        (limits.min_batch_allocation or 0.0) * limits.batch_size * limits.max_batches_offpolicy
    )
    return math.ceil(reserved_sequences / pack_sequences)


def own_share_groups(status: QueueStatus, limits: CapacityLimits) -> int:
    """Return how many groups the environment must make to fill its reserved share.

    `max(0, ceil(((ceil(a*B*K / M) + M // G) * M - q*G) / G))`: the reserved sequences in whole
    packs of M, some slack, less what already waits in the queue.

    With B = 16, K = 3, a = 0.25, M = 8, G = 2, q = 5: (2 + 4) * 8 = 48 sequences wanted, 10
    waiting, so 38 sequences or 19 groups.
    """
    if limits.min_batch_allocation is None:
        return 0
    packs = _reserved_packs(limits, pack_sequences=status.max_group_size)
    packs += status.max_group_size // limits.group_size
    missing_sequences = packs * status.max_group_size - status.own_queue_groups * limits.group_size
    return max(0, math.ceil(missing_sequences / limits.group_size))


def worker_limit(
    status: QueueStatus, limits: CapacityLimits, *, evaluation_ratio: float = 1.0
) -> int:
    """Return how many workers may run; running ones above it are left to finish.

    Args:
        status: the service's latest picture of the queue.
        limits: the environment's config.
        evaluation_ratio: share of the workers allowed by a running evaluation: 0 stops
            training, 1 leaves it alone.

    Returns:
        At least 0, at most `int(max_workers * evaluation_ratio)` and at most what the service
        lets start; within that, what keeps queue and running rollouts within K derived batches,
        or more to fill a reserved share.
    """
    most = int(limits.max_workers * evaluation_ratio)
    if status.groups_to_start is not None:
        most = min(most, status.groups_to_start)
    share = derived_batch_size(
        batch_size=limits.batch_size,
        unallocated_fraction=status.unallocated_fraction,
        min_batch_allocation=limits.min_batch_allocation,
    )
    if share == UNKNOWN_BATCH_SIZE:
        return 0
    if limits.max_batches_offpolicy <= 0:
        return max(0, most)
    allowed = limits.max_batches_offpolicy * share // limits.group_size - status.queue_groups
    allowed = max(allowed, own_share_groups(status, limits))
    return max(0, min(most, allowed))


def failure_pause_s(consecutive_failures: int) -> float:
    """Return how long to hold back new rollouts after so many failures in a row.

    Zero while failures are occasional. A broken inference server or reward function fails every
    rollout at once; without a pause the loop would spin and flood the log.
    """
    excess = consecutive_failures - FAILURES_BEFORE_PAUSE
    if excess < 0:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(excess, 16)))

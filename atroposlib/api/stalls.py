"""Why queued groups do not become a batch, told from the counters; pure."""

from __future__ import annotations

from typing import NamedTuple

from atroposlib.api.env_registry import EnvRegistry
from atroposlib.api.queue import GroupQueue

__all__ = ["Stall", "find_stalls"]


class Stall(NamedTuple):
    """Something that keeps queued groups from becoming a batch, or may."""

    reason: str
    """`queue/unpackable` or `allocation/unfilled`."""
    num_sequences: int
    """Sequences that are stuck, or that are missing."""
    message: str


def find_stalls(queue: GroupQueue, envs: EnvRegistry, *, batch_size: int) -> list[Stall]:
    """Name the sizes that cannot pack, and the minimum shares that nobody fills.

    Args:
        queue: the groups that wait.
        envs: the environments, with their minimum shares.
        batch_size: sequences per batch; shares are only missed once the queue holds that many.
    """
    found = []
    unpackable = queue.unpackable_sequences
    if unpackable:
        message = (
            f"{unpackable} sequences are in groups whose size does not divide the largest queued "
            f"group ({queue.largest_group}); they leave only where sizes happen to add up"
        )
        found.append(Stall("queue/unpackable", unpackable, message))
    if 0 < batch_size <= queue.num_sequences:
        found.extend(_unfilled_shares(queue, envs, batch_size))
    return found


def _unfilled_shares(queue: GroupQueue, envs: EnvRegistry, batch_size: int) -> list[Stall]:
    found = []
    for env_id, share in envs.minimums.items():
        env = envs.find(env_id)
        need = min(batch_size, int(batch_size * share))
        held = queue.sequences_by_env.get(env_id, 0)
        if env is None or held >= need:
            continue
        message = (
            f"environment {env_id} ({env.real_name}) reserves {need} sequences of each batch and "
            f"has {held} queued; no batch forms until it catches up or disconnects"
        )
        found.append(Stall("allocation/unfilled", need - held, message))
    return found

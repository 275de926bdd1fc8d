"""The queue from the perspective of one environment: weights, minimum shares, queue size; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

__all__ = [
    "MIN_ENV_WEIGHT",
    "EnvShare",
    "QueueView",
    "env_weight",
    "minimum_shares",
    "queue_view",
    "total_weight",
    "unallocated_fraction",
    "weight_share",
]

MIN_ENV_WEIGHT = 0.01
"""Minimum weight of an environment, so that none is starved completely."""


class EnvShare(Protocol):
    """The attributes of a registered environment that this page uses."""

    @property
    def env_id(self) -> int:
        """Registration id."""

    @property
    def max_token_length(self) -> int:
        """Longest trajectory of the environment, in tokens."""

    @property
    def weight(self) -> float:
        """Relative importance."""

    @property
    def min_batch_allocation(self) -> float | None:
        """Guaranteed share of each batch."""

    @property
    def is_connected(self) -> bool:
        """False after the environment disconnected."""


class QueueView(NamedTuple):
    """Queue sizes in units of one environment's groups."""

    queue_groups: int
    own_groups: int


def env_weight(env: EnvShare, envs: Iterable[EnvShare]) -> float:
    """Return the share of inference capacity of one environment, at least `MIN_ENV_WEIGHT`.

    Environments count by context length times weight. A disconnected one adds nothing to the total
    but still has a share. A total of 0 gives `MIN_ENV_WEIGHT`.
    """
    return weight_share(env, total_weight(envs))


def total_weight(envs: Iterable[EnvShare]) -> float:
    """Return context length times weight, summed over connected environments."""
    return sum(e.max_token_length * max(0.0, e.weight) for e in envs if e.is_connected)


def weight_share(env: EnvShare, total: float) -> float:
    """Return the share of one environment in a total, at least `MIN_ENV_WEIGHT`."""
    if total <= 0:
        return MIN_ENV_WEIGHT
    share = env.max_token_length * env.weight / total
    return max(MIN_ENV_WEIGHT, share) if math.isfinite(share) else MIN_ENV_WEIGHT


def minimum_shares(envs: Iterable[EnvShare]) -> dict[int, float]:
    """Return the guaranteed shares of connected environments, in order of registration."""
    return {
        env.env_id: env.min_batch_allocation
        for env in envs
        if env.is_connected and env.min_batch_allocation is not None
    }


def unallocated_fraction(minimums: Mapping[int, float]) -> float:
    """Return the part of a batch that no environment has reserved, 0 to 1."""
    return 1.0 - min(1.0, sum(minimums.values()))


def queue_view(
    env_id: int,
    sequences_by_env: Mapping[int | None, int],
    *,
    group_size: int,
    pack_size: int,
    batch_size: int,
    minimums: Mapping[int, float],
) -> QueueView:
    """Return the size of the queue in units of one environment.

    The sequences of every other sender count in whole packs, minus the share of the batch reserved
    for that sender: those are delivered from its own minimum.

    Args:
        env_id: the asking environment.
        sequences_by_env: queued sequences per sender.
        group_size: sequences per group of the asking environment, at least 1.
        pack_size: sequences in the largest queued group, at least 1.
        batch_size: sequences per batch.
        minimums: guaranteed shares of connected environments.
    """
    available = 0
    for other, num_sequences in sequences_by_env.items():
        if other == env_id:
            continue
        packed = -(-num_sequences // pack_size) * pack_size
        reserved = int(batch_size * minimums.get(other, 0.0)) if other is not None else 0
        available += max(0, packed - reserved)
    own = sequences_by_env.get(env_id, 0)
    return QueueView(queue_groups=(own + available) // group_size, own_groups=own // group_size)

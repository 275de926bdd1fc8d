"""The packing rules on queues of plain group dictionaries, for external tools and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.api.queue import oldest_combination, pack_exact, pack_with_minimums
from atroposlib.scored_data import num_sequences

__all__ = [
    "find_groups_summing_to_target",
    "grab_batch_with_minimum_allocations",
    "grab_exact_from_heterogeneous_queue",
]

Group = dict[str, Any]


def grab_exact_from_heterogeneous_queue(
    queue: list[Group], batch_size: int
) -> tuple[list[Group] | None, list[Group]]:
    """Take groups that hold exactly `batch_size` sequences, in whole packs of the largest size.

    `queue` has the oldest groups first and is not modified.

    Returns:
        The batch and a new list of the other groups; without a batch None and `queue` itself.
    """
    sizes = [num_sequences(group) for group in queue]
    if not sizes or sum(sizes) < batch_size:
        return None, queue
    return _split(queue, pack_exact(sizes, largest=max(sizes), batch_size=batch_size))


def find_groups_summing_to_target(
    buffer: Sequence[Mapping[str, Any]], target_size: int
) -> list[int]:
    """Find groups that together hold exactly `target_size` sequences.

    `buffer` has the oldest groups first, which are preferred: a group is left out only if no
    combination contains it.

    Returns:
        Ascending indices; empty if no combination exists.
    """
    return oldest_combination([num_sequences(group) for group in buffer], target_size)


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: Sequence[Mapping[str, Any]]
) -> tuple[list[Group] | None, list[Group]]:
    """Take a batch in which connected environments get their guaranteed share.

    Groups without `env_id` are taken only if the others leave room. `env_configs` has the keys
    `registered_id`, `connected` and `min_batch_allocation` for each environment.

    Returns:
        As `grab_exact_from_heterogeneous_queue`; the batch starts with guaranteed shares.
    """
    if not queue:
        return None, queue
    minimums = {
        env["registered_id"]: env["min_batch_allocation"]
        for env in env_configs
        if env.get("connected", False) and env.get("min_batch_allocation") is not None
    }
    if not minimums:
        return grab_exact_from_heterogeneous_queue(queue, batch_size)
    groups = [(num_sequences(group), group.get("env_id")) for group in queue]
    taken = pack_with_minimums(
        groups,
        largest=max(size for size, _ in groups),
        batch_size=batch_size,
        minimums=minimums,
        ownerless_last=True,
    )
    return _split(queue, taken)


def _split(queue: list[Group], taken: list[int] | None) -> tuple[list[Group] | None, list[Group]]:
    if taken is None:
        return None, queue
    positions = set(taken)
    rest = [group for i, group in enumerate(queue) if i not in positions]
    return [queue[i] for i in taken], rest

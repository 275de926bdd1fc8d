"""Looking at the groups of a run without taking any; pure.

A look costs a bounded number of groups however long the queue is: `list_groups` stops after
`_MAX_SCANNED` and says where to go on. Positions move as batches leave, so a listing that is
continued may miss or repeat groups at its seams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.run_state import RunState

__all__ = ["GroupFilter", "GroupPage", "GroupState", "describe_group", "find_group", "list_groups"]

_MAX_SCANNED = 10_000


class GroupState(str, Enum):
    """Where a group is."""

    QUEUED = "queued"
    """Waits for a batch; position 0 came first."""
    BUFFERED = "buffered"
    """Waits for others to add up to its environment's group size."""
    IN_FLIGHT = "in_flight"
    """Part of a batch that is formed and not acknowledged."""
    PAST = "past"
    """Was delivered lately; position 0 left last."""


class GroupFilter(NamedTuple):
    """Which groups to show; None lets all pass."""

    env_id: int | None = None
    min_score: float | None = None
    """Groups with at least one score this high or higher."""
    max_score: float | None = None
    """Groups with at least one score this low or lower."""

    def accepts(self, group: QueuedGroup) -> bool:
        """Whether a group is wanted."""
        return (
            (self.env_id is None or group.env_id == self.env_id)
            and (self.min_score is None or group.max_score >= self.min_score)
            and (self.max_score is None or group.min_score <= self.max_score)
        )


class GroupPage(NamedTuple):
    """A stretch of a listing."""

    groups: list[dict[str, Any]]
    total: int | None
    """All groups in this state; None when a filter makes counting them a walk."""
    next_offset: int | None
    """Where to go on; None at the end."""


def list_groups(
    state: RunState,
    where: GroupState,
    wanted: GroupFilter,
    *,
    offset: int,
    limit: int,
    now: float,
) -> GroupPage:
    """Describe up to `limit` groups from a position on, in order.

    Args:
        state: the run.
        where: which groups to look at.
        wanted: which of them to describe.
        offset: position of the first one to look at.
        limit: the most to describe.
        now: Unix time, for their ages.
    """
    is_filtered = wanted != GroupFilter()
    total = _count(state, where)
    seen = _window(state, where, offset, _MAX_SCANNED if is_filtered else limit)
    found: list[dict[str, Any]] = []
    position = offset
    for position, group in enumerate(seen, start=offset):
        if wanted.accepts(group):
            found.append({"position": position, **describe_group(state, group, where, now=now)})
            if len(found) == limit:
                break
    following = position + 1 if seen else offset
    return GroupPage(
        groups=found,
        total=None if is_filtered else total,
        next_offset=following if following < total else None,
    )


def find_group(state: RunState, group_id: int) -> tuple[QueuedGroup, GroupState] | None:
    """Return a group with where it is; None when it is nowhere."""
    queued, past = state.queue.get(group_id), state.past.get(group_id)
    if queued is not None:
        return queued, GroupState.QUEUED
    if past is not None:
        return past, GroupState.PAST
    for where in (GroupState.IN_FLIGHT, GroupState.BUFFERED):
        for group in _walk(state, where):
            if group.group_id == group_id:
                return group, where
    return None


def describe_group(
    state: RunState, group: QueuedGroup, where: GroupState, *, now: float
) -> dict[str, Any]:
    """Return what is known of a group besides its tokens."""
    env = state.envs.find(group.env_id)
    return {
        "id": group.group_id,
        "state": where.value,
        "env_id": group.env_id,
        "env_name": None if env is None else env.real_name,
        "num_sequences": group.num_sequences,
        "num_tokens": group.num_tokens,
        "num_bytes": group.num_bytes,
        "lane": group.lane,
        "policy_version": group.known_version,
        "staleness": state.staleness_of(group),
        "received_at": group.received_at,
        "age_s": max(0.0, now - group.received_at),
        "min_score": group.min_score,
        "max_score": group.max_score,
    }


def _window(state: RunState, where: GroupState, offset: int, length: int) -> Sequence[QueuedGroup]:
    if where is GroupState.QUEUED:
        return state.queue.window(offset, length)
    return list(islice(_walk(state, where), offset, offset + length))


def _walk(state: RunState, where: GroupState) -> Iterable[QueuedGroup]:
    if where is GroupState.BUFFERED:
        return (group for env in state.envs for group in env.buffer)
    if where is GroupState.IN_FLIGHT:
        return (group for handout in state.delivery.pending() for group in handout.groups)
    return reversed(list(state.past))


def _count(state: RunState, where: GroupState) -> int:
    if where is GroupState.QUEUED:
        return len(state.queue)
    if where is GroupState.BUFFERED:
        return sum(len(env.buffer) for env in state.envs)
    if where is GroupState.IN_FLIGHT:
        return sum(len(handout.groups) for handout in state.delivery.pending())
    return len(state.past)

"""The service as one environment sees it: the answer of `/status-env`; pure."""

from __future__ import annotations

from typing import NamedTuple

from atroposlib.api.admission import RunLimits, room_for
from atroposlib.api.allocation import weight_share
from atroposlib.api.env_registry import EnvRecord
from atroposlib.api.run_state import RunState

__all__ = ["EnvView", "env_view"]


class EnvView(NamedTuple):
    """What one environment needs to decide how much to produce."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    groups_to_start: int | None = None
    """Groups of its size it may have in the making; None when nothing bounds them."""


def env_view(state: RunState, env: EnvRecord, limits: RunLimits) -> EnvView:
    """Return what one environment is told, in units of the largest group it has queued.

    Args:
        state: the run.
        env: the asking environment.
        limits: what bounds the groups it may start.
    """
    minimums = state.envs.minimums
    pack_size = max(1, state.queue.largest_group)
    group_size = max(env.largest_group, state.queue.largest_group_of(env.env_id))
    view = state.queue.view_of(
        env.env_id, group_size=group_size, batch_size=state.batch_size, minimums=minimums
    )
    weight = weight_share(env, state.envs.total_weight)
    return EnvView(
        current_step=state.step,
        queue_size=view.queue_groups,
        unallocated_fraction=state.envs.unallocated_fraction,
        self_queue_size=view.own_groups,
        max_group_size=pack_size,
        env_weight=weight,
        groups_to_start=_groups_to_start(state, limits, weight=weight, group_size=group_size),
    )


def _groups_to_start(
    state: RunState, limits: RunLimits, *, weight: float, group_size: int
) -> int | None:
    """Share the room among environments; where there is any, each may start at least one group.

    Rounding shares down to nothing would let a run stand still in which many environments share
    little room.
    """
    room = room_for(
        limits,
        waiting=state.waiting,
        pending_sequences=state.delivery.num_sequences,
        batch_size=state.batch_size,
    )
    if room is None:
        return None
    return max(1, int(room * min(1.0, weight)) // group_size) if room > 0 else 0

"""The environments of a run as `/envs` lists them; pure."""

from __future__ import annotations

from itertools import islice
from typing import Any

from atroposlib.api.run_state import RunState

__all__ = ["describe_envs"]


def describe_envs(state: RunState, *, offset: int, limit: int, now: float) -> dict[str, Any]:
    """Describe up to `limit` environments from a position on, in order of registration.

    Args:
        state: the run.
        offset: id of the first environment.
        limit: the most to describe.
        now: Unix time, for how long they have been silent.
    """
    described = [
        {
            "env_id": env.env_id,
            "name": env.real_name,
            "is_connected": env.is_connected,
            "is_expired": env.is_expired,
            "registered_at": env.last_update,
            "last_seen": env.last_seen,
            "silent_s": max(0.0, now - env.last_seen),
            "queued_sequences": state.queue.sequences_by_env.get(env.env_id, 0),
            "buffered_sequences": state.envs.buffered_sequences_of(env.env_id),
            "weight": env.weight,
            "group_size": env.group_size,
            "min_batch_allocation": env.min_batch_allocation,
            "max_token_length": env.max_token_length,
        }
        for env in islice(state.envs, offset, offset + limit)
    ]
    following = offset + len(described)
    next_offset = following if described and following < len(state.envs) else None
    return {"envs": described, "total": len(state.envs), "next_offset": next_offset}

"""A scored group from what agents left behind in their sessions; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atroposlib.envs.server_handling.turn_matching import SequenceNode
from atroposlib.envs.server_handling.weight_versions import FROM_TEXT
from atroposlib.scored_data import ScoredDataGroup

__all__ = ["AgentTrajectory", "group_of_agents"]


class AgentTrajectory(NamedTuple):
    """What one agent sampled for an item, and what came of it."""

    nodes: list[SequenceNode]
    """Its sequences. One conversation is one; sub-agents and rewritten histories add more."""
    score: float
    """The score of each of its sequences."""


def group_of_agents(trajectories: Sequence[AgentTrajectory]) -> ScoredDataGroup | None:
    """Put the agents of one item together: a row per sequence, with the score of its agent.

    `group_overrides` names the number of rows where it is not the number of agents. Sequences made
    from a server's text mark the group, which then has no logprobs.

    Args:
        trajectories: [G] one per agent.

    Returns:
        The group, or None when an agent sampled nothing.
    """
    if not trajectories or not all(trajectory.nodes for trajectory in trajectories):
        return None
    rows = [(node, score) for nodes, score in trajectories for node in nodes]
    group: ScoredDataGroup = {
        "tokens": [node.tokens for node, _ in rows],
        "masks": [node.masked_tokens for node, _ in rows],
        "scores": [score for _, score in rows],
        "inference_logprobs": [node.logprobs for node, _ in rows],
    }
    if any((node.metadata or {}).get(FROM_TEXT) for node, _ in rows):
        group["inference_logprobs"] = None
        group["tokenized_from_text"] = True
    if len(rows) != len(trajectories):
        group["group_overrides"] = {"group_size": len(rows)}
    return group

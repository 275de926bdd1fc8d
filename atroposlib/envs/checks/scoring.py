"""Whether scores tell good answers from bad ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.admission import wrong_number
from atroposlib.envs.checks.script import Role
from atroposlib.scored_data import IGNORE_INDEX

__all__ = ["ScoredReply", "equal_scores", "scored_replies", "too_good"]


class ScoredReply(NamedTuple):
    """What one trajectory was worth."""

    role: Role
    score: float
    is_muted: bool
    """Whether it cannot move the policy."""


def scored_replies(group: Mapping[str, Any], roles: Sequence[Role | None]) -> list[ScoredReply]:
    """Return the worth of each trajectory whose role is known and whose score is a finite number.

    Where all scores of a group are equal and it has token-level advantages, the mean over the
    trained tokens is the worth: such an environment says it all in the advantages.

    Args:
        group: [G] trajectories.
        roles: [G] who answered, None where that cannot be told.
    """
    scores = list(group["scores"])
    advantages = group.get("advantages")
    if not advantages or any(score != scores[0] for score in scores):
        advantages = [None] * len(roles)
    overrides = group.get("overrides") or [None] * len(roles)
    found = []
    for role, score, advantage, override, mask in zip(
        roles, scores, advantages, overrides, group["masks"], strict=False
    ):
        trained = [i for i, label in enumerate(mask) if label != IGNORE_INDEX]
        if isinstance(advantage, list | tuple) and len(advantage) == len(mask) and trained:
            score = sum(advantage[i] for i in trained) / len(trained)
        is_muted = not trained or bool((override or {}).get("set_advantage_to_zero"))
        if role is not None and wrong_number("", [score]) is None and math.isfinite(score):
            found.append(ScoredReply(role, float(score), is_muted))
    return found


def equal_scores(replies: Sequence[ScoredReply]) -> str | None:
    """Return what all answers score, gold and others, or None when they differ."""
    scores = {reply.score for reply in replies}
    roles = {reply.role for reply in replies}
    if len(scores) > 1 or "gold" not in roles or len(roles) < 2:
        return None
    others = ", ".join(sorted(role for role in roles if role != "gold"))
    return f"every answer scores {scores.pop():g}: gold, {others}"


def too_good(
    replies: Sequence[ScoredReply], roles: Sequence[Role], *, unless_muted: bool = False
) -> str | None:
    """Return which of the answers scores at least as much as the gold one, or None.

    Args:
        replies: all answers to one item.
        roles: those that must score less than gold.
        unless_muted: let an answer pass that cannot move the policy.
    """
    gold = [reply.score for reply in replies if reply.role == "gold"]
    for reply in replies:
        muted = unless_muted and reply.is_muted
        if gold and reply.role in roles and reply.score >= min(gold) and not muted:
            return f"the {NAMES[reply.role]} scores {reply.score:g}, the gold answer {min(gold):g}"
    return None


NAMES: dict[Role, str] = {
    "gold": "gold answer",
    "empty": "empty answer",
    "garbage": "meaningless answer",
    "truncated": "first half of the gold answer, cut by the token budget,",
    "unclosed": "gold answer inside a thought that was cut by the token budget",
}

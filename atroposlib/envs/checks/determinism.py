"""Whether two runs of an environment do the same. Pure.

Rollouts of a group may ask in any order, so both sides are compared as sorted collections.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.checks.rehearsal import Rehearsal

__all__ = ["Trace", "changed_score", "difference", "trace_of"]

CONTEXT = 40


class Trace(NamedTuple):
    """What one run asked and what it made of the answers."""

    prompts: list[str]
    trajectories: list[tuple[str, str]]
    """Tokens, and score; as text, so that NaN equals itself."""


def trace_of(rehearsals: Sequence[Rehearsal]) -> Trace:
    """Return the trace of some items."""
    prompts = sorted(sampled.prompt for r in rehearsals for sampled in r.sampled)
    groups = [group for rehearsal in rehearsals for group in rehearsal.groups]
    trajectories = [row for group in groups for row in _rows(group)]
    return Trace(prompts, sorted(trajectories))


def _rows(group: Any) -> list[tuple[str, str]]:
    try:
        pairs = zip(group["tokens"], group["scores"], strict=False)
        return [(json.dumps(tokens, default=str), repr(float(score))) for tokens, score in pairs]
    except (TypeError, KeyError, ValueError):
        return []  # the check of the shape says what is wrong with it


def difference(first: Trace, second: Trace) -> str | None:
    """Return what the second run did otherwise, or None."""
    if len(first.prompts) != len(second.prompts):
        return f"{len(first.prompts)} prompts in the first run, {len(second.prompts)} in the second"
    for one, other in zip(first.prompts, second.prompts, strict=True):
        if one != other:
            return f"the prompts differ: {_apart(one, other)}"
    if first.trajectories == second.trajectories:
        return None
    scores = [sorted(score for _, score in trace.trajectories) for trace in (first, second)]
    if scores[0] != scores[1]:
        shown = [", ".join(f"{float(score):g}" for score in row) for row in scores]
        return f"the scores differ: {shown[0]} in the first run, {shown[1]} in the second"
    return "the same prompts and replies gave other tokens or scores to the trajectories"


def changed_score(one: Trace, other: Trace) -> str | None:
    """Return how the score of the same answer changed between two runs, or None.

    Only trajectories that both runs have are compared: prompts may differ under another seed.
    """
    scores = _scores_by_tokens(one), _scores_by_tokens(other)
    for tokens in sorted(scores[0].keys() & scores[1].keys()):
        first, second = scores[0][tokens], scores[1][tokens]
        if len(first) == len(second) and first != second:
            shown = [", ".join(f"{float(score):g}" for score in row) for row in (first, second)]
            return f"the same answer scores {shown[0]} under one seed and {shown[1]} under another"
    return None


def _scores_by_tokens(trace: Trace) -> dict[str, list[str]]:
    scores: dict[str, list[str]] = {}
    for tokens, score in trace.trajectories:  # sorted, and so are the scores of equal tokens
        scores.setdefault(tokens, []).append(score)
    return scores


def _apart(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - CONTEXT // 2)
    return f"{one[start : start + CONTEXT]!r} and {other[start : start + CONTEXT]!r}"

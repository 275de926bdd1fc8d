"""Rolling out items of a staged environment the way the base class does, and keeping the trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from atroposlib.envs.checks.call_site import pending_method
from atroposlib.envs.checks.script import Role, Script, make_script
from atroposlib.envs.checks.scripted_model import SampledReply
from atroposlib.envs.checks.stage import Stage
from atroposlib.envs.hooks import settle
from atroposlib.envs.rollouts import as_pair
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.utils.plain_json import to_plain

__all__ = [
    "COLLECTING",
    "SCORE_METHODS",
    "SCORING",
    "Rehearsal",
    "StepTimeoutError",
    "next_item",
    "rehearse",
    "roll_out",
    "within_limit",
]

COLLECTING = ("postprocess_histories", "collect_trajectories", "collect_trajectory")
"""Hooks a finding about a group points at: the first that the author wrote."""

SCORE_METHODS = ("score", "_score", "compute_score", "reward", "compute_reward", "grade")
"""What methods that score one answer are commonly called."""

SCORING = (*SCORE_METHODS, *COLLECTING)
"""Methods a finding about scores points at: the first that the author wrote."""

STEP_LIMIT_S = 60.0
MAX_BACKLOG_ROUNDS = 20

FALLBACKS: Sequence[Sequence[Role]] = ((), ("gold", "empty", "garbage"), ("gold", "garbage"))
"""Who answers, until a group comes: some environments give up groups with certain answers."""

Result = TypeVar("Result")


class Rehearsal(NamedTuple):
    """One item rolled out against a script."""

    groups: list[Any]
    """Groups as the environment gave them, arrays as lists; None entries left out."""
    sampled: list[SampledReply]
    num_first_requests: int
    """Requests that were open together before the first was answered."""
    script: Script
    num_score_timeouts: int = 0
    """Calls of the score pool that were ended because their time was up, and gave a default."""


class StepTimeoutError(TimeoutError):
    """A step of the environment that did not end in time.

    Attributes:
        where: the line of the author it waited at, None where that cannot be told.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


async def within_limit(step: Awaitable[Result], *, limit_s: float = STEP_LIMIT_S) -> Result:
    """Wait for a step of the environment, at most a minute.

    Raises:
        StepTimeoutError: the step takes longer; it says so where it was scoring.
    """
    task = asyncio.ensure_future(step)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
        scoring = pending_method(SCORE_METHODS)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    late = f"did not end within {limit_s:g} s"
    if scoring is None:
        raise StepTimeoutError(late)
    method, where = scoring
    raise StepTimeoutError(f"scoring timed out: {method} {late}", where)


async def next_item(env: Any) -> Any:
    """Return the environment's next item."""
    return await within_limit(settle(env.get_next_item()))


async def roll_out(env: Any, item: Any) -> list[Any]:
    """Collect and postprocess the groups of an item, its backlog included."""
    groups: list[Any] = []
    backlog = [item]
    for _ in range(MAX_BACKLOG_ROUNDS):
        if not backlog or groups:
            break
        collected, later = as_pair(await settle(env.collect_trajectories(backlog.pop(0))))
        backlog += later
        if collected:
            collected = await settle(env.postprocess_histories(collected))
        found = collected if isinstance(collected, list) else [collected]
        groups += [_plain(group) for group in found if group is not None]
    return groups


async def rehearse(stage: Stage, item: Any) -> Rehearsal:
    """Roll out an item against good and bad answers mixed.

    When the environment makes no group of them, the answers it may refuse are left out by turns.
    """
    gold = await settle(stage.env.check_gold_answer(item))
    num_before = _num_score_timeouts(stage.env)
    rehearsal = Rehearsal([], [], 0, make_script(gold))
    for roles in FALLBACKS if gold else FALLBACKS[:1]:
        stage.model.start(make_script(gold, roles=roles))
        groups = await within_limit(roll_out(stage.env, item))
        rehearsal = Rehearsal(
            groups,
            list(stage.model.sampled),
            stage.model.most_in_flight,
            make_script(gold, roles=roles),
            _num_score_timeouts(stage.env) - num_before,
        )
        if groups:
            break
    return rehearsal


def _num_score_timeouts(env: Any) -> int:
    pool = env._opened_score_pool()
    return 0 if pool is None else int(pool.num_timeouts)


def _plain(group: Any) -> Any:
    if not isinstance(group, Mapping):
        return group
    plain = dict(group)
    for field in GROUP_FIELDS:
        try:
            plain[field.name] = to_plain(plain.get(field.name))
        except TypeError:
            continue  # the check of the shape says what is wrong with it
    if isinstance(plain.get("inference_logprobs"), list) and not plain["inference_logprobs"]:
        plain["inference_logprobs"] = None  # how some environments say that they have none
    return plain

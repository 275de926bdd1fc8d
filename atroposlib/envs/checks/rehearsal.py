"""Rolling out items of a staged environment the way the base class does, and keeping the trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from atroposlib.envs.checks.script import Role, Script, make_script
from atroposlib.envs.checks.scripted_model import SampledReply
from atroposlib.envs.checks.stage import Stage
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.group_assembly import as_pair
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.utils.plain_json import to_plain

__all__ = [
    "COLLECTING",
    "SCORING",
    "Rehearsal",
    "next_item",
    "rehearse",
    "roll_out",
    "within_limit",
]

COLLECTING = ("postprocess_histories", "collect_trajectories", "collect_trajectory")
"""Hooks a finding about a group points at: the first that the author wrote."""

SCORING = ("score", "_score", "compute_score", "reward", "compute_reward", "grade", *COLLECTING)
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


async def within_limit(step: Awaitable[Result]) -> Result:
    """Wait for a step of the environment, at most a minute.

    Raises:
        TimeoutError: the step takes longer.
    """
    try:
        return await asyncio.wait_for(step, STEP_LIMIT_S)
    except asyncio.TimeoutError as error:
        raise TimeoutError(f"did not end within {STEP_LIMIT_S:g} s") from error


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
    rehearsal = Rehearsal([], [], 0, make_script(gold))
    for roles in FALLBACKS if gold else FALLBACKS[:1]:
        stage.model.start(make_script(gold, roles=roles))
        groups = await within_limit(roll_out(stage.env, item))
        rehearsal = Rehearsal(
            groups,
            list(stage.model.sampled),
            stage.model.most_in_flight,
            make_script(gold, roles=roles),
        )
        if groups:
            break
    return rehearsal


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

"""Turn the results of G single rollouts into one group.

collect(item) x G, at the same time
    -> every result a whole trajectory: one merged group
    -> something else, and the environment scores later: the list of results that are not None
    -> a result is None: no group
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from atroposlib.envs.stragglers import StragglerRule, run_group
from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, merge_items

__all__ = ["as_pair", "assemble_group", "gather_rollouts"]

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 500
REQUIRED = tuple(field.name for field in GROUP_FIELDS if field.required)


async def gather_rollouts(
    collect: Callable[[Any], Awaitable[Any]],
    item: Any,
    *,
    group_size: int,
    rule: StragglerRule = StragglerRule(),  # noqa: B008 - frozen
    count_straggler: Callable[[str], None] = lambda _: None,
) -> tuple[list[Any], list[Any]]:
    """Roll out one item `group_size` times at the same time.

    All rollouts finish before one that raised fails the group, so nothing runs on unowned.

    Args:
        collect: one rollout; returns `(result, backlog)`, a bare result, or None.
        item: passed to every rollout as it is.
        group_size: rollouts to make.
        rule: what happens to rollouts that lag behind.
        count_straggler: told what happened to each of them.

    Returns:
        [G] results, fewer when stragglers were left out, and all backlog items in rollout order.

    Raises:
        StragglerError: the group was given up for its stragglers.
        Exception: the first one a rollout raised; more than one are counted in the log.
    """
    outcomes = await run_group(
        lambda: collect(item), group_size=group_size, rule=rule, count=count_straggler
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(errors) > 1:
        names = Counter(type(error).__name__ for error in errors)
        logger.warning(
            "%d rollouts of one group failed: %s; the first: %s",
            len(errors),
            dict(names),
            str(errors[0])[:MAX_CHARACTERS],
        )
    if errors:
        if isinstance(errors[0], asyncio.CancelledError):
            # Passed on as it is, it would look as if this whole group had been cancelled.
            raise RuntimeError("a rollout was cancelled by its own environment") from errors[0]
        raise errors[0]
    pairs = [as_pair(outcome) for outcome in outcomes]
    backlog = [later for _, items in pairs for later in items]
    return [result for result, _ in pairs], backlog


def as_pair(outcome: Any) -> tuple[Any, list[Any]]:
    """Split what a collecting hook returned into result and backlog; both may be left out."""
    if isinstance(outcome, tuple) and len(outcome) == 2:
        result, backlog = outcome
        return result, list(backlog or [])
    return outcome, []


def assemble_group(results: list[Any], *, is_scored_later: bool) -> Any:
    """Merge the trajectories of one item.

    Args:
        results: [G] what the rollouts returned.
        is_scored_later: the environment overrides `postprocess_histories` and may build the
            group there, out of results of any kind.

    Returns:
        The merged group; or the results that are not None, for `postprocess_histories`; or None
        when a rollout gave nothing.

    Raises:
        GroupError: a result is no trajectory and nobody builds the group later.
    """
    if results and all(_is_trajectory(result) for result in results):
        group, partial_fields = merge_items(results)
        if partial_fields:
            names = ", ".join(partial_fields)
            logger.warning("dropped fields that only some rollouts of the group have: %s", names)
        return group
    given = [result for result in results if result is not None]
    if is_scored_later:
        return given
    for position, result in enumerate(results):
        if result is not None and not _is_trajectory(result):
            raise GroupError(_describe(position, result))
    return None


def _is_trajectory(result: Any) -> bool:
    return isinstance(result, Mapping) and all(result.get(name) is not None for name in REQUIRED)


def _describe(position: int, result: Any) -> str:
    if isinstance(result, Mapping):
        missing = [name for name in REQUIRED if result.get(name) is None]
        if missing == ["scores"] and "scores" in result:
            return (
                f"scores[{position}] is None; expected a number, the score of result {position} "
                "of collect_trajectory"
            )
        what = f"has no {', '.join(missing)}"
    else:
        what = f"is a {type(result).__name__}"
    return (
        f"result {position} of collect_trajectory {what}; return a mapping with tokens, masks and "
        "scores, or override postprocess_histories to build the group from the results"
    )

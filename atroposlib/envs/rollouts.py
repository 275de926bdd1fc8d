"""Turn the results of G single rollouts into one group.

collect(item) x G, at the same time
    -> every result a whole trajectory: one merged group
    -> something else, and the environment scores later: the list of results that are not None
    -> a result is None: no group

Run the rollouts of one group at the same time, and deal with those that lag behind.

    WAIT     start x G ──────────────────────────────► [G] outcomes
    RETRY    a rollout past its time is started again, up to N times; then its group is dropped
    SHRINK   at the time, and once enough are done: the rest is ended, the group goes without it;
             its size divides G, so that services that put groups of one sender together can
    GIVE_UP  at the time: the group is given up

Invariant: every task that is started here has ended, or was told to and is named in the log, when
the group's outcome is known; also when the group itself is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.config import BaseEnvConfig, StragglerPolicyEnum
from atroposlib.errors import GroupError, InferenceError
from atroposlib.scored_data import GROUP_FIELDS, merge_items

__all__ = [
    "StragglerError",
    "StragglerRule",
    "as_pair",
    "assemble_group",
    "gather_rollouts",
    "run_group",
]

ENDING_S = 5.0
"""How long a cancelled rollout may take to end before it is left behind."""


class StragglerError(InferenceError, TimeoutError):
    """A group was given up because rollouts of it took too long."""


@dataclass(frozen=True)
class StragglerRule:
    """What happens to rollouts that take longer than others can wait."""

    policy: StragglerPolicyEnum = StragglerPolicyEnum.WAIT
    timeout_s: float = 0.0
    """Seconds one rollout may take before it is a straggler; 0 or less: none ever is."""
    retries: int = 0
    """How often a straggler is started again before its group is dropped."""
    min_group_size: int = 2
    """Fewest trajectories a shrunk group may have."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig) -> StragglerRule:
        """Read the rule from an environment's settings."""
        return cls(
            policy=config.straggler_policy,
            timeout_s=config.straggler_timeout_s,
            retries=config.straggler_retries,
            min_group_size=config.min_group_size,
        )

    def shrunk_sizes(self, group_size: int) -> list[int]:
        """Return the sizes a group of G may shrink to, the smallest first."""
        return [n for n in range(max(1, self.min_group_size), group_size) if group_size % n == 0]

    @property
    def is_waiting(self) -> bool:
        """Whether every rollout is waited for, however long it takes."""
        return self.policy == StragglerPolicyEnum.WAIT or self.timeout_s <= 0


async def run_group(
    start: Callable[[], Awaitable[Any]],
    *,
    group_size: int,
    rule: StragglerRule,
    count: Callable[[str], None] = lambda _: None,
) -> list[Any]:
    """Run `start()` a number of times at the same time.

    Cancelling is safe and ends every rollout.

    Args:
        start: one rollout.
        group_size: [G] rollouts.
        rule: what happens to stragglers.
        count: told `retried`, `left_out` or `given_up` for each straggler.

    Returns:
        [G] what each rollout returned or, as a value, raised; a divisor of G of them under SHRINK.

    Raises:
        StragglerError: the group was given up.
    """
    if rule.is_waiting:
        return await asyncio.gather(*(start() for _ in range(group_size)), return_exceptions=True)
    if rule.policy == StragglerPolicyEnum.RETRY:
        return await _run_with_retries(start, group_size, rule, count)
    sizes = rule.shrunk_sizes(group_size)
    if rule.policy == StragglerPolicyEnum.SHRINK and not sizes:
        return await asyncio.gather(*(start() for _ in range(group_size)), return_exceptions=True)
    rollouts = [asyncio.ensure_future(start()) for _ in range(group_size)]
    try:
        _, late = await asyncio.wait(rollouts, timeout=rule.timeout_s)
        if late and rule.policy == StragglerPolicyEnum.GIVE_UP:
            _count_all(count, "given_up", late)
            raise _given_up(f"{len(late)} of {group_size} rollouts took more than", rule)
        while late and group_size - len(late) < sizes[0]:
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(rollouts)
    outcomes = [_outcome(rollout) for rollout in rollouts if rollout not in late]
    if not late or any(isinstance(outcome, BaseException) for outcome in outcomes):
        return outcomes
    kept = max(size for size in sizes if size <= len(outcomes))
    _count_all(count, "left_out", range(group_size - kept))
    return outcomes[:kept]


async def _run_with_retries(
    start: Callable[[], Awaitable[Any]],
    group_size: int,
    rule: StragglerRule,
    count: Callable[[str], None],
) -> list[Any]:
    members = [
        asyncio.create_task(_run_until_in_time(start, rule, count)) for _ in range(group_size)
    ]
    try:
        late: set[Any] = set(members)
        while late:
            done, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            for member in done:
                error = None if member.cancelled() else member.exception()
                if isinstance(error, StragglerError):
                    raise error
    finally:
        await _end(members)
    return [_outcome(member) for member in members]


async def _run_until_in_time(
    start: Callable[[], Awaitable[Any]], rule: StragglerRule, count: Callable[[str], None]
) -> Any:
    """Begin a rollout again until it ends in time, at most `retries` times."""
    for tries_left in range(rule.retries, -1, -1):
        rollout = asyncio.ensure_future(start())
        try:
            await asyncio.wait({rollout}, timeout=rule.timeout_s)
            if rollout.done():
                return rollout.result()
        finally:
            await _end([rollout])
        count("retried" if tries_left else "given_up")
    raise _given_up(f"a rollout took {rule.retries + 1} times more than", rule)


def _given_up(what: str, rule: StragglerRule) -> StragglerError:
    limit = math.floor(rule.timeout_s * 1000) / 1000
    return StragglerError(f"{what} straggler_timeout_s = {limit:g} s; the group is given up")


def _count_all(count: Callable[[str], None], name: str, rollouts: Iterable[object]) -> None:
    for _ in rollouts:
        count(name)


def _outcome(rollout: asyncio.Future[Any]) -> Any:
    if rollout.cancelled():
        return asyncio.CancelledError()
    return rollout.exception() or rollout.result()


async def _end(rollouts: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait for it; what does not obey is named in the log."""
    running = {rollout for rollout in rollouts if not rollout.done()}
    for rollout in running:
        rollout.cancel()
    if not running:
        return
    _, stuck = await asyncio.wait(running, timeout=ENDING_S)
    for rollout in stuck:
        logger.error("a rollout ignores its cancellation: %s", rollout)


logger = logging.getLogger(__name__)

MAX_CHARACTERS = 500
REQUIRED = tuple(field.name for field in GROUP_FIELDS if field.required)


async def gather_rollouts(
    collect: Callable[[Any], Awaitable[Any]],
    item: Any,
    *,
    group_size: int,
    rule: StragglerRule = StragglerRule(),
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
        GroupError: a result is not a trajectory and `build_group` is not overridden.
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

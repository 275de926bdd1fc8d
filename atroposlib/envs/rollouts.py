"""From the rollouts of one item to a delivered group.

`gather_rollouts` runs the G rollouts of an item concurrently. The straggler policy selects what
happens to rollouts that exceed their time limit:

    WAIT     wait for all G outcomes
    RETRY    restart the rollout, up to N times; then drop the group
    SHRINK   once enough others are done, cancel it and send the group without it; the size of the
             group divides G, so that the service can combine groups of one environment
    GIVE_UP  drop the group

Invariant: when the outcome of a group is known, or the group is cancelled, all its tasks have
ended; the log names a task that ignores its cancellation.

`UnfinishedGroups` counts the finished rollouts of groups that wait for slower ones, so that others
can start in their place.

`assemble_group` merges trajectories into one group. Other results are returned as a list that
the environment scores later; a result of None means that there is no group.

`check_signal`, `check_lengths` and `Vocabulary` are the pure rules of admission. Each reason to
drop a group is the name of a counter, `drops/<reason>` in the metrics.

`GroupDelivery` is a member of every environment. It holds the JSON Lines writer and the number of
groups sent, and calls `complete_groups`, `add_rollouts_for_wandb` and `_send_scored_data_to_api`
on its environment, so that overrides apply.

    groups -> signal and size -> lengths -> vocabulary -> messages -> table -> JSONL -> service
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from numbers import Real
from typing import Any, NamedTuple, Protocol

from atroposlib.envs.config import BaseEnvConfig, StragglerPolicyEnum
from atroposlib.envs.reporting import GroupWriter, Reporter
from atroposlib.envs.server_handling.server_baseline import TOKEN_VERSIONS, SampledVersions
from atroposlib.envs.service_session import EnvSession
from atroposlib.errors import GroupError, InferenceError, NoDataError, TrajectoryApiError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    ScoredDataGroup,
    check_group,
    merge_items,
    wrong_number,
)
from atroposlib.type_definitions import Item
from atroposlib.utils.aio import SideThread, decode_long, settle
from atroposlib.utils.json_text import single_number, to_plain
from atroposlib.utils.text import is_milestone
from atroposlib.utils.tracing import TraceSpan, child_span, current_span, entered

__all__ = [
    "INCOMPLETE",
    "Admission",
    "GroupDelivery",
    "StragglerError",
    "StragglerRule",
    "UnfinishedGroups",
    "Vocabulary",
    "annotate_groups",
    "as_pair",
    "assemble_group",
    "check_lengths",
    "check_signal",
    "completion_lengths",
    "gather_rollouts",
    "run_group",
    "settings_without_effect",
]

logger = logging.getLogger(__name__)

ENDING_S = 5.0
"""Seconds to wait for cancelled rollouts."""


class StragglerError(InferenceError, TimeoutError):
    """A group was dropped because its rollouts took too long."""


@dataclass(frozen=True)
class StragglerRule:
    """Treatment of rollouts that exceed a time limit; see `BaseEnvConfig`."""

    policy: StragglerPolicyEnum = StragglerPolicyEnum.WAIT
    timeout_s: float = 0.0
    """Time limit of one rollout in seconds; 0 or less: no limit."""
    retries: int = 0
    """Number of restarts before the group is dropped."""
    min_group_size: int = 2
    """Minimum number of trajectories of a shrunk group."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig) -> StragglerRule:
        return cls(
            policy=config.straggler_policy,
            timeout_s=config.straggler_timeout_s,
            retries=config.straggler_retries,
            min_group_size=config.min_group_size,
        )

    def shrunk_sizes(self, group_size: int) -> list[int]:
        """Return the sizes to which a group of G may shrink, smallest first."""
        return [n for n in range(max(1, self.min_group_size), group_size) if group_size % n == 0]

    @property
    def is_waiting(self) -> bool:
        """Whether rollouts have no time limit."""
        return self.policy == StragglerPolicyEnum.WAIT or self.timeout_s <= 0


def settings_without_effect(config: BaseEnvConfig) -> list[str]:
    """Return a message for each setting of rollouts that others deprive of its effect."""
    rule, found = StragglerRule.from_config(config), []
    if config.max_num_workers == 0:
        found.append("max_num_workers is 0: `serve` starts no rollout; -1 is the default")
    if rule.policy == StragglerPolicyEnum.WAIT and rule.timeout_s > 0:
        found.append("straggler_timeout_s has no effect: straggler_policy is WAIT")
    if rule.policy in (StragglerPolicyEnum.SHRINK, StragglerPolicyEnum.GIVE_UP):
        name = rule.policy.value
        if rule.timeout_s <= 0:
            found.append(f"straggler_policy {name} has no effect: straggler_timeout_s is not set")
        elif rule.policy == StragglerPolicyEnum.SHRINK and not rule.shrunk_sizes(config.group_size):
            found.append(
                f"straggler_policy SHRINK has no effect: no number from min_group_size "
                f"({rule.min_group_size}) on divides group_size ({config.group_size}), as the size "
                "of a shrunk group must"
            )
    return found


async def run_group(
    start: Callable[[], Awaitable[Any]],
    *,
    group_size: int,
    rule: StragglerRule,
    count: Callable[[str], None] = lambda _: None,
) -> list[Any]:
    """Run `start()` G times concurrently. Cancelling is safe and cancels every rollout.

    Args:
        start: one rollout.
        group_size: G.
        rule: treatment of stragglers.
        count: called with `retried`, `left_out` or `given_up` for each straggler.

    Returns:
        [G] results or exceptions of the rollouts; under SHRINK, a divisor of G of them.

    Raises:
        StragglerError: the group was dropped.
    """
    sizes = rule.shrunk_sizes(group_size)
    if rule.is_waiting or (rule.policy == StragglerPolicyEnum.SHRINK and not sizes):
        return await asyncio.gather(*(start() for _ in range(group_size)), return_exceptions=True)
    if rule.policy == StragglerPolicyEnum.RETRY:
        return await _run_with_retries(start, group_size, rule, count)
    rollouts = [asyncio.ensure_future(start()) for _ in range(group_size)]
    try:
        _, late = await asyncio.wait(rollouts, timeout=rule.timeout_s)
        if late and rule.policy == StragglerPolicyEnum.GIVE_UP:
            for _ in late:
                count("given_up")
            raise _given_up(f"{len(late)} of {group_size} rollouts took more than", rule)
        while late and group_size - len(late) < sizes[0]:
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(rollouts)
    outcomes = [_outcome(rollout) for rollout in rollouts if rollout not in late]
    if not late or any(isinstance(outcome, BaseException) for outcome in outcomes):
        return outcomes
    kept = max(size for size in sizes if size <= len(outcomes))
    for _ in range(group_size - kept):
        count("left_out")
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


def _outcome(rollout: asyncio.Future[Any]) -> Any:
    if rollout.cancelled():
        return asyncio.CancelledError()
    return rollout.exception() or rollout.result()


async def _end(rollouts: Iterable[asyncio.Future[Any]]) -> None:
    running = {rollout for rollout in rollouts if not rollout.done()}
    for rollout in running:
        rollout.cancel()
    if not running:
        return
    _, stuck = await asyncio.wait(running, timeout=ENDING_S)
    for rollout in stuck:
        logger.error("a rollout ignores its cancellation: %s", rollout)


class UnfinishedGroups:
    """The finished rollouts of groups that wait for slower ones.

    Only groups made by `gather_rollouts` in the context of `counting` are counted. One request for
    all completions of a group finishes as a whole.

    Args:
        on_finished: called when a rollout has finished, before its group.
        add_durations: called once per group with the seconds of its rollouts, first of those whose
            results are used, then of those that were lost.
        now: clock, seconds.

    Attributes:
        num_finished: number of such rollouts now.
    """

    def __init__(
        self,
        *,
        on_finished: Callable[[], None] = lambda: None,
        add_durations: Callable[[Sequence[float], Sequence[float]], None] = lambda *_: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_finished = 0
        self._on_finished = on_finished
        self._add_durations = add_durations
        self._now = now

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the groups that are made in this context and in tasks started in it."""
        token = _COUNTING.set(self)
        try:
            yield
        finally:
            _COUNTING.reset(token)

    async def track(
        self,
        start: Callable[[], Awaitable[Any]],
        run: Callable[[Callable[[], Awaitable[Any]]], Awaitable[list[Any]]],
    ) -> list[Any]:
        """Await `run(start)`, the rollouts of one group, and count those that finish."""
        finished: list[float] = []
        lost: list[float] = []
        is_over = False

        async def counted() -> Any:
            began_at, ended = self._now(), lost
            try:
                result = await start()
                ended = finished
                return result
            finally:
                if not is_over:  # else it has ignored its cancellation
                    ended.append(self._now() - began_at)
                    self.num_finished += ended is finished
                    self._on_finished()

        is_used = False
        try:
            outcomes = await run(counted)
            is_used = not any(isinstance(outcome, BaseException) for outcome in outcomes)
            return outcomes
        finally:
            is_over = True
            self.num_finished -= len(finished)
            self._add_durations(*((finished, lost) if is_used else ((), (*finished, *lost))))


_COUNTING: ContextVar[UnfinishedGroups] = ContextVar("unfinished_groups")

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
    """Roll out one item G times concurrently; an exception is raised after all have ended.

    Args:
        collect: one rollout; returns `(result, backlog)`, a bare result, or None.
        item: passed to every rollout.
        group_size: G.
        rule: treatment of stragglers.
        count_straggler: called with the outcome of each straggler.

    Returns:
        [G] results, fewer without stragglers, and all backlog items in rollout order.

    Raises:
        StragglerError: the group was dropped because of its stragglers.
        Exception: the first exception of a rollout; the log counts further ones.
    """
    indices = count()

    async def roll_out() -> Any:
        with child_span("rl.rollout", {"rl.rollout.index": next(indices)}) as span:
            outcome = await collect(item)
            result = as_pair(outcome)[0]
            if span.is_recording and _is_trajectory(result):
                span.set({"rl.reward": result["scores"]})
            return outcome

    unfinished = _COUNTING.get(None) or UnfinishedGroups()
    outcomes = await unfinished.track(
        roll_out,
        lambda start: run_group(start, group_size=group_size, rule=rule, count=count_straggler),
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
            # Raised unchanged, it would look like a cancellation of the whole group.
            raise RuntimeError("a rollout was cancelled by its own environment") from errors[0]
        raise errors[0]
    pairs = [as_pair(outcome) for outcome in outcomes]
    backlog = [later for _, items in pairs for later in items]
    return [result for result, _ in pairs], backlog


def as_pair(outcome: Any) -> tuple[Any, list[Any]]:
    """Split the return value of a collecting hook into result and backlog; both are optional."""
    if isinstance(outcome, tuple) and len(outcome) == 2:
        result, backlog = outcome
        if backlog and (isinstance(backlog, str | Mapping) or not isinstance(backlog, Iterable)):
            raise GroupError(
                f"a rollout returned {backlog!r:.60} as second value; expected a list "
                "of items to roll out next, such as []"
            )
        return result, list(backlog or [])
    return outcome, []


def assemble_group(results: list[Any], *, is_scored_later: bool) -> Any:
    """Merge the trajectories of one item.

    Args:
        results: [G] results of the rollouts.
        is_scored_later: Whether the environment overrides `postprocess_histories`, which may build
            the group from results of any type.

    Returns:
        The merged group; or the results that are not None, for `postprocess_histories`; or None
        if a result is None.

    Raises:
        GroupError: a result is not a trajectory and `postprocess_histories` is not overridden.
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


class Admission(NamedTuple):
    """Decision whether a group is used."""

    reason: str | None = None
    """Reason to drop the group, as a counter name; None if it is used."""
    detail: str = ""
    """Description of the problem, for the log."""

    @property
    def is_accepted(self) -> bool:
        return self.reason is None


ACCEPTED = Admission()

_REQUIRED = {"tokens": "a list of lists", "masks": "a list of lists", "scores": "a list of numbers"}


def check_signal(
    group: Any, *, group_size: int, scores_must_differ: bool, smallest_size: int | None = None
) -> Admission:
    """Check that a group is well-formed, of the right size, and carries a training signal.

    Args:
        group: a value that an environment returned as a group.
        group_size: expected G; `group_overrides["group_size"]` overrides it.
        scores_must_differ: Whether to drop groups of two or more trajectories with equal scores.
        smallest_size: minimum G of a group without stragglers; None requires all trajectories.

    Returns:
        Accepted, or a drop for `malformed`, `wrong_size` or `scores_equal`.
    """
    if not isinstance(group, Mapping):
        return Admission("malformed", f"a group is a mapping, not a {type(group).__name__}")
    for name, wanted in _REQUIRED.items():
        value = group.get(name)
        if value is not None and not isinstance(value, list | tuple):
            return Admission("malformed", f"{name}: expected {wanted}, not {type(value).__name__}")
    overrides = group.get("group_overrides") or {}
    if not isinstance(overrides, Mapping):
        return Admission("malformed", f"group_overrides: expected a mapping, got {overrides!r}")
    expected: Any = overrides.get("group_size")
    expected = group_size if expected is None else expected
    is_number = isinstance(expected, Real)  # those of NumPy too
    if not is_number:
        detail = f"group_overrides['group_size']: expected a number, got {expected!r:.60}"
        return Admission("malformed", detail)
    tokens = group.get("tokens")
    smallest = expected if smallest_size is None else min(smallest_size, expected)
    if tokens is not None and not smallest <= len(tokens) <= expected:
        return Admission("wrong_size", f"{len(tokens)} trajectories, expected {expected}")
    try:
        check_group(group)
    except GroupError as error:
        return Admission("malformed", str(error))
    except TypeError as error:
        return Admission("malformed", _wrong_row_of(group) or str(error))
    scores = group["scores"]
    if scores_must_differ and len(scores) > 1 and all(s == scores[0] for s in scores):
        return Admission("scores_equal", f"all {len(scores)} scores are {scores[0]}")
    return ACCEPTED


def _wrong_row_of(group: Mapping[str, Any]) -> str | None:
    """Return a message about the first trajectory that has a number or None for a list."""
    for name in ("tokens", *(field.name for field in GROUP_FIELDS if field.aligned)):
        rows = group.get(name)
        for i, row in enumerate(rows if isinstance(rows, list | tuple) else ()):
            if row is None or isinstance(row, Real):
                return f"{name}[{i}] is {row}; expected a list with one entry per token"
    return None


def check_lengths(tokens: Sequence[Sequence[int]], *, max_token_len: int) -> Admission:
    """Check that every trajectory is shorter than the trainer's limit.

    Args:
        tokens: [G][L] token ids.
        max_token_len: smallest length that is too long; 0 or less removes the limit.

    Returns:
        Accepted, or a drop for `too_long`.
    """
    longest = max((len(sequence) for sequence in tokens), default=0)
    if max_token_len > 0 and longest >= max_token_len:
        detail = f"{longest} tokens in the longest trajectory, the trainer takes fewer than"
        return Admission("too_long", f"{detail} {max_token_len}")
    return ACCEPTED


class Vocabulary:
    """The token ids of a tokenizer, looked up once; one without `len()` accepts every id."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._num_ids = _num_ids(tokenizer)
        self._is_exact = False

    def check(self, tokens: Sequence[Sequence[int]]) -> Admission:
        """Check [G][L] token ids; return Accepted, or a drop for `outside_vocabulary`."""
        for i, sequence in enumerate(tokens):
            if len(sequence) == 0 or not self._num_ids:
                continue
            try:
                low, high = int(min(sequence)), int(max(sequence) + 0)
            except (TypeError, ValueError):
                text = wrong_number(f"tokens[{i}]", sequence)
                return Admission("malformed", text or f"tokens[{i}]: expected integers")
            if high >= self._num_ids and not self._is_exact:
                # If ids have gaps, the largest exceeds their number; finding it is slow.
                self._num_ids = max(self._num_ids, _largest_id(self.tokenizer) + 1)
                self._is_exact = True
            if low < 0 or high >= self._num_ids:
                wrong = low if low < 0 else high
                return Admission(
                    "outside_vocabulary",
                    f"tokens[{i}] holds the id {wrong}, the environment's tokenizer knows 0 to "
                    f"{self._num_ids - 1}; environment, engine and trainer must use one tokenizer",
                )
        return ACCEPTED


def _num_ids(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except Exception:  # noqa: BLE001 -- authors use tokenizers of every kind
        return 0


def _largest_id(tokenizer: Any) -> int:
    try:
        return int(max(tokenizer.get_vocab().values()))
    except Exception:  # noqa: BLE001 -- as above
        return -1


def wrong_label(group: Mapping[str, Any]) -> str | None:
    """Describe the first mask that is neither `IGNORE_INDEX` nor its token; None: there is none."""
    for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if mask != token and mask != IGNORE_INDEX:
                return f"masks[{i}][{t}] is {mask}; expected {IGNORE_INDEX} or the token, {token}"
    return None


def completion_lengths(masks: Sequence[Sequence[int]]) -> list[int]:
    """Return [G] numbers of trained tokens."""
    return [
        len(mask) - mask.count(IGNORE_INDEX)
        if isinstance(mask, list | tuple)
        else sum(1 for label in mask if label != IGNORE_INDEX)
        for mask in masks
    ]


UNUSABLE = ("malformed", "wrong_size", "not_encodable", "outside_vocabulary", "refused_by_service")
"""Reasons that are errors of the environment."""
INCOMPLETE = "incomplete"
"""Reason of groups with rollouts that returned None."""
NUM_UNUSABLE_AT_START = 100
"""Number of groups, the first of a process, whose errors end `serve` if none is usable."""
NUM_LABELS_CHECKED = 100
"""Number of groups, the first of a process, whose masks are compared with their tokens."""
NUM_DROPS_LOGGED = 10
"""Number of drops for one reason that are all logged as warnings; later only some are."""
ALWAYS_EQUAL = (
    ", every group: `check` shows the scores of good and bad answers; with temperature 0, all "
    "answers to an item are equal"
)
DEFAULTED_FIELDS = (
    "ref_logprobs",
    "overrides",
    "group_overrides",
    "distill_token_ids",
    "distill_logprobs",
)
"""Set to None if missing."""


class DeliveringEnv(Protocol):
    """Attributes and methods of an environment that `GroupDelivery` uses."""

    config: BaseEnvConfig
    tokenizer: Any
    max_token_len: int
    service_session: EnvSession | None

    async def complete_groups(self, groups: list[ScoredDataGroup], /) -> list[ScoredDataGroup]: ...
    async def add_rollouts_for_wandb(
        self, scored_data: ScoredDataGroup, item: Item | None, /
    ) -> None: ...
    async def _send_scored_data_to_api(
        self, scored_data: ScoredDataGroup | list[ScoredDataGroup], /
    ) -> None: ...


class GroupDelivery:
    """Admits, records and sends the groups of one environment.

    Args:
        env: The environment.
        reporter: Counts groups and drops.
        side_thread: Thread in which long groups are read, so that other rollouts continue.

    Attributes:
        jsonl_writer: Writer of admitted groups, or None.
        items_sent_this_step: Groups sent since metrics were last logged.
    """

    def __init__(self, env: DeliveringEnv, reporter: Reporter, side_thread: SideThread) -> None:
        self.items_sent_this_step = 0
        self.jsonl_writer: GroupWriter | None = None
        self._env = env
        self._reporter = reporter
        self._side_thread = side_thread
        self._vocabulary: Vocabulary | None = None
        self._has_usable_groups = False
        self._last_unusable = ACCEPTED
        self._num_labels_to_check = NUM_LABELS_CHECKED
        if env.config.data_path_to_save_groups is not None:
            self.jsonl_writer = GroupWriter(env.config.data_path_to_save_groups)
            env.config.data_path_to_save_groups = str(self.jsonl_writer.path)

    async def deliver(
        self,
        scored_data: ScoredDataGroup | list[ScoredDataGroup | None],
        item: Item | None,
        *,
        is_sent: bool,
        limits_length: bool,
    ) -> None:
        """Implement `BaseEnv.handle_send_to_api`."""
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        admitted = [
            group
            for group in groups
            if group is not None and await self._admit_group(group, limit_length=limits_length)
        ]
        admitted = await self._env.complete_groups(admitted)
        with ExitStack() as spans:
            for span in [_group_span(group) for group in admitted]:
                spans.enter_context(entered(span))
            admitted = [
                group for group in admitted if await self._record_group(group, item, is_sent)
            ]
            if is_sent and admitted:
                self.items_sent_this_step += len(admitted)
                num_unusable = self.num_unusable_groups()
                await self._env._send_scored_data_to_api(
                    admitted if isinstance(scored_data, list) else admitted[0]
                )
                self._has_usable_groups |= self.num_unusable_groups() == num_unusable

    def close(self) -> None:
        """Close the file of saved groups, if there is one; an error is only logged."""
        if self.jsonl_writer is None:
            return
        try:
            self.jsonl_writer.close()
        except OSError as error:
            logger.error("%s is not complete: %s", self.jsonl_writer.path, error.strerror)

    async def _admit_group(self, group: Any, *, limit_length: bool) -> bool:
        """Check one group; return whether it is admitted."""
        _make_plain(group)
        config = self._env.config
        is_shrinking = config.straggler_policy == StragglerPolicyEnum.SHRINK
        # In a thread, here and below: reading a long group would block other rollouts.
        admission = await self._side_thread.run(
            check_signal,
            group,
            group_size=config.group_size,
            scores_must_differ=config.ensure_scores_are_not_same,
            smallest_size=config.min_group_size if is_shrinking else None,
        )
        is_well_formed = admission.reason in (None, "scores_equal")
        lengths = (
            await self._side_thread.run(completion_lengths, group["masks"])
            if is_well_formed
            else []
        )
        if is_well_formed and self._num_labels_to_check:
            self._num_labels_to_check -= 1
            if wrong := await self._side_thread.run(wrong_label, group):
                self._num_labels_to_check = 0
                logger.warning(
                    "%s. Groups are sent as they are; trainers reject them, or train other tokens",
                    wrong,
                )
        self._reporter.run_figures.add_group(group, num_tokens=sum(lengths))
        if is_well_formed:
            self._reporter.reward_parts_since_log.add(group.get("reward_parts"))
        if admission.is_accepted:
            for name in DEFAULTED_FIELDS:
                group.setdefault(name, None)
            self._reporter.completion_lengths.extend(lengths)
            if limit_length:
                admission = check_lengths(group["tokens"], max_token_len=self._env.max_token_len)
        if admission.is_accepted:
            if self._vocabulary is None or self._vocabulary.tokenizer is not self._env.tokenizer:
                self._vocabulary = Vocabulary(self._env.tokenizer)
            admission = await self._side_thread.run(self._vocabulary.check, group["tokens"])
        if lengths:
            self._reporter.length_bias.add_group(lengths, reason=admission.reason)
        if not admission.is_accepted:
            self._drop_group(admission)
            return False
        return True

    async def _record_group(self, group: ScoredDataGroup, item: Item | None, is_sent: bool) -> bool:
        """Add an admitted group to the table and the file; return whether it can be sent.

        Raises:
            OSError: the file cannot be written, and the group is not sent.
        """
        if self._env.config.include_messages and not group.get("messages"):
            group["messages"] = [
                [{"role": "user", "content": await decode_long(self._env.tokenizer, tokens)}]
                for tokens in group["tokens"]
            ]
        if group.get("tokenized_from_text"):
            self._reporter.note_counts["tokenized_from_text"] += 1
        await settle(self._env.add_rollouts_for_wandb(group, item))
        if self.jsonl_writer is None:
            return True
        try:
            await self._side_thread.run(self.jsonl_writer.write, group)
        except GroupError as error:
            self._drop_group(Admission("not_encodable", str(error)))
            return False
        except OSError as error:
            if not is_sent:
                raise
            self._reporter.failure_counts[type(error).__name__] += 1
            self._reporter.errors.log("a group is sent, but not saved", error)
        return True

    def num_unusable_groups(self) -> int:
        """Return the number of groups dropped because of errors of the environment."""
        return sum(self._reporter.drop_counts[reason] for reason in UNUSABLE)

    def is_unusable(self, collected: Any, *, before: int) -> bool:
        """Whether all groups of a rollout were dropped because of errors of the environment.

        Args:
            collected: a delivered group, or a list of groups and Nones.
            before: `num_unusable_groups` before the delivery.
        """
        groups = collected if isinstance(collected, list) else [collected]
        num_groups = sum(group is not None for group in groups)
        return 0 < num_groups <= self.num_unusable_groups() - before

    def error_of_first_groups(self) -> NoDataError | None:
        """Return the error of an environment whose first groups are all dropped for its errors."""
        count = self.num_unusable_groups()
        if self._has_usable_groups or count < NUM_UNUSABLE_AT_START:
            return None
        reason, detail = self._last_unusable
        return NoDataError(
            f"all of the first {count} groups were dropped, the last one as {reason}: {detail}; "
            "the subcommand `check` finds such errors before a run"
        )

    def drop_incomplete_group(self, num_missing: int, *, num_rollouts: int) -> None:
        """Log and count a group some of whose rollouts, but not all, returned None."""
        detail = f"collect_trajectory returned None for {num_missing} of {num_rollouts} rollouts"
        self._drop_group(Admission(INCOMPLETE, detail))

    def _drop_group(self, admission: Admission, *, num_groups: int = 1) -> None:
        if admission.reason in UNUSABLE:
            self._last_unusable = admission
        self._reporter.drop_counts[str(admission.reason)] += num_groups
        count = self._reporter.drop_counts[str(admission.reason)]
        is_shown = count < NUM_DROPS_LOGGED or is_milestone(count, added=num_groups)
        is_equal = admission.reason == "scores_equal"
        is_every_group = count == self._reporter.run_figures.num_groups
        logger.log(
            logging.WARNING if is_shown else logging.DEBUG,
            "group dropped (%s): %s%s%s",
            admission.reason,
            admission.detail,
            f"; {count} so far" if count >= NUM_DROPS_LOGGED else "",
            ALWAYS_EQUAL if is_equal and is_every_group and count >= NUM_DROPS_LOGGED else "",
        )

    async def send(
        self, scored_data: ScoredDataGroup | list[ScoredDataGroup], *, key: str | None = None
    ) -> None:
        """Send one group, or several in one request; log and count a rejection.

        `key` is the idempotency key of a delivery that another process may have made.
        """
        if self._env.service_session is None:
            raise RuntimeError("groups can only be sent while serving; there is no registration")
        num_groups = len(scored_data) if isinstance(scored_data, list) else 1
        named = {} if key is None else {"key": key}
        try:
            await self._env.service_session.send(scored_data, **named)
        except TrajectoryApiError as error:
            self._drop_group(Admission("refused_by_service", str(error)), num_groups=num_groups)
        except (GroupError, TypeError) as error:
            self._drop_group(Admission("not_encodable", str(error)), num_groups=num_groups)


def _group_span(group: ScoredDataGroup) -> TraceSpan:
    """Begin the span of an admitted group, whose position is stored with the group."""
    item_span = current_span()
    if not item_span.is_recording:
        return item_span
    scores = [float(score) for score in group["scores"]]
    span = item_span.begin(
        "rl.group",
        {
            "rl.group.size": len(scores),
            "rl.group.tokens": sum(map(len, group["tokens"])),
            "rl.rewards": scores,
            "rl.policy.version": group.get("policy_version"),
        },
    )
    group["traceparent"] = span.traceparent
    return span


def annotate_groups(
    groups: Any, sampled: SampledVersions, *, policy_version: int | None = None
) -> None:
    """Add to the groups of a rollout, in place, how their tokens were sampled.

    Fields that a group already has are kept. Groups whose tokens were made from a server's text are
    marked `tokenized_from_text` and lose their logprobs. Where only some groups of a rollout have
    such tokens, they are those without a logprob for a trained token.

    Args:
        groups: result of a rollout: a group or a list of groups and Nones.
        sampled: record of the rollout.
        policy_version: oldest version of the weights that sampled the tokens; None if unknown.
    """
    for group in groups if isinstance(groups, list) else [groups]:
        if not isinstance(group, MutableMapping):
            continue
        if policy_version is not None:
            group.setdefault("policy_version", policy_version)
        if group.get("finish_reasons") is None:
            # Tokens of another type are reported at admission.
            with suppress(TypeError, ValueError):
                reasons = sampled.finish_reasons(_rows_of(group, "tokens"))
                group.update({} if reasons is None else {"finish_reasons": reasons})
        if group.get(TOKEN_VERSIONS) is None:
            with suppress(TypeError, ValueError):
                runs = sampled.token_versions(_rows_of(group, "tokens"))
                group.update({} if runs is None else {TOKEN_VERSIONS: runs})
        if sampled.has_text and _lacks_logprobs(group):
            group.update(inference_logprobs=None, tokenized_from_text=True)


def _lacks_logprobs(group: Mapping[str, Any]) -> bool:
    rows = _rows_of(group, "inference_logprobs")
    if len(rows) == 0:
        return True
    return any(
        logprob > 0 and mask != IGNORE_INDEX
        for masks, row in zip(_rows_of(group, "masks"), rows, strict=False)
        for mask, logprob in zip(masks, row, strict=False)
    )


def _rows_of(group: Mapping[str, Any], name: str) -> Any:
    rows = group.get(name)
    return () if rows is None else rows  # arrays have no truth value


def _make_plain(group: Any) -> None:
    """Convert arrays to lists, scores to numbers, and empty optional rows to None, in place."""
    if not isinstance(group, MutableMapping):
        return
    for field in GROUP_FIELDS:
        value = group.get(field.name)
        if field.aligned and not field.required and isinstance(value, list) and not value:
            group[field.name] = None
        if value is not None and not isinstance(value, list | tuple | dict | int | str):
            try:
                group[field.name] = to_plain(value)
            except TypeError:
                continue  # reported when the group is encoded
    scores = group.get("scores")
    if isinstance(scores, list | tuple):
        group["scores"] = [single_number(score) for score in scores]

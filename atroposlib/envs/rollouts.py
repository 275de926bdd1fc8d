"""From the rollouts of one item to a delivered group.

`gather_rollouts` runs the G rollouts of an item at the same time. The straggler policy decides what
happens to rollouts that take longer than the others:

    WAIT     start x G ──────────────────────────────► [G] outcomes
    RETRY    a rollout past its time is started again, up to N times; then its group is dropped
    SHRINK   at the time, and once enough are done: the rest is ended, the group goes without it;
             its size divides G, so that services that put groups of one sender together can
    GIVE_UP  at the time: the group is given up

Invariant: every task that is started here has ended, or was told to and is named in the log, when
the outcome of the group is known; also when the group itself is cancelled.

`assemble_group` merges whole trajectories into one group. Other results are returned as a list that
the environment scores later; a result of None means that there is no group.

`check_signal`, `check_lengths` and `Vocabulary` decide whether a group is used. These are pure
rules, and each reason is the name of a counter, `drops/<reason>` in the metrics.

`Delivery` is a member of every environment. It holds the JSON Lines writer and the number of
groups sent, and calls `complete_groups`, `add_rollouts_for_wandb` and `_send_scored_data_to_api`
on its environment, so that overrides take part.

    groups -> signal and size -> lengths -> vocabulary -> messages -> table -> JSONL -> service
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from atroposlib.envs.config import BaseEnvConfig, StragglerPolicyEnum
from atroposlib.envs.reporting import Reporter
from atroposlib.envs.server_handling.server_baseline import SampledVersions
from atroposlib.envs.service_session import EnvSession
from atroposlib.errors import GroupError, InferenceError, TrajectoryApiError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    ScoredDataGroup,
    check_group,
    merge_items,
)
from atroposlib.type_definitions import Item
from atroposlib.utils.aio import SideThread, decode_long, settle
from atroposlib.utils.json_text import encode_mapping, to_plain
from atroposlib.utils.text import is_milestone

__all__ = [
    "Admission",
    "Delivery",
    "GroupWriter",
    "StragglerError",
    "StragglerRule",
    "Vocabulary",
    "as_pair",
    "assemble_group",
    "check_lengths",
    "check_signal",
    "completion_lengths",
    "gather_rollouts",
    "mark_tokenized_from_text",
    "run_group",
    "stamp_finish_reasons",
    "stamp_policy_version",
    "wrong_number",
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


class Admission(NamedTuple):
    """The answer to whether a group is used."""

    reason: str | None = None
    """Why it is dropped, as a counter name; None when it is used."""
    detail: str = ""
    """What is wrong with it, for the log."""

    @property
    def is_accepted(self) -> bool:
        """Whether the group is used."""
        return self.reason is None


ACCEPTED = Admission()

_REQUIRED = {"tokens": "a list of lists", "masks": "a list of lists", "scores": "a list of numbers"}


def check_signal(
    group: Any, *, group_size: int, scores_must_differ: bool, smallest_size: int | None = None
) -> Admission:
    """Check that a group is well-formed, of the right size, and carries a training signal.

    Args:
        group: what an environment returned as a group; may be anything.
        group_size: [G] trajectories expected; `group_overrides["group_size"]` goes before it.
        scores_must_differ: drop groups of two or more trajectories with one and the same score.
        smallest_size: fewest trajectories of a group that lost stragglers; None: none may.

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
    expected = overrides.get("group_size", group_size)
    tokens = group.get("tokens")
    smallest = expected if smallest_size is None else min(smallest_size, expected)
    if tokens is not None and not smallest <= len(tokens) <= expected:
        return Admission("wrong_size", f"{len(tokens)} trajectories, expected {expected}")
    try:
        check_group(group)
    except GroupError as error:
        return Admission("malformed", str(error))
    except TypeError as error:
        return Admission("malformed", _wrong_number_of(group) or str(error))
    scores = group["scores"]
    if scores_must_differ and len(scores) > 1 and all(s == scores[0] for s in scores):
        return Admission("scores_equal", f"all {len(scores)} scores are {scores[0]}")
    return ACCEPTED


def wrong_number(path: str, values: Sequence[Any]) -> str | None:
    """Return the error of the first value that is not a number, or None.

    For example `scores[0] is 'right'; expected a number`.

    NumPy's numbers and tensors of one element are numbers; texts are not, whatever they spell.
    """
    for i, value in enumerate(values):
        try:
            math.isfinite(value)
        except (TypeError, ValueError):
            return f"{path}[{i}] is {value!r:.60}; expected a number"
    return None


def _wrong_number_of(group: Mapping[str, Any]) -> str | None:
    """Look at the fields whose numbers `check_group` adds up."""
    wrong = wrong_number("scores", group["scores"])
    rows = group.get("inference_logprobs")
    if wrong or not isinstance(rows, list | tuple):
        return wrong
    found = (
        wrong_number(f"inference_logprobs[{i}]", row)
        for i, row in enumerate(rows)
        if isinstance(row, list | tuple)
    )
    return next((text for text in found if text), None)


def check_lengths(tokens: Sequence[Sequence[int]], *, max_token_len: int) -> Admission:
    """Check that every trajectory is shorter than the trainer's limit.

    Args:
        tokens: [G][L] token ids.
        max_token_len: the first length that is refused; 0 or less lifts the limit.

    Returns:
        Accepted, or a drop for `too_long`.
    """
    longest = max((len(sequence) for sequence in tokens), default=0)
    if max_token_len > 0 and longest >= max_token_len:
        detail = f"{longest} tokens in the longest trajectory, the trainer takes fewer than"
        return Admission("too_long", f"{detail} {max_token_len}")
    return ACCEPTED


class Vocabulary:
    """The token ids a tokenizer knows, looked up once.

    Args:
        tokenizer: of the environment. One that does not say what it knows is asked nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._num_ids = _num_ids(tokenizer)
        self._is_exact = False

    def check(self, tokens: Sequence[Sequence[int]]) -> Admission:
        """Check that every token is one of the tokenizer.

        Args:
            tokens: [G][L] token ids.

        Returns:
            Accepted, or a drop for `outside_vocabulary`.
        """
        for i, sequence in enumerate(tokens):
            if len(sequence) == 0 or not self._num_ids:
                continue
            low, high = min(sequence), max(sequence)
            if high >= self._num_ids and not self._is_exact:
                # Where ids have gaps the largest is beyond their number; to find it takes long.
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
    """Return how many ids a tokenizer says it has, 0 when it says nothing."""
    try:
        return len(tokenizer)
    except Exception:  # noqa: BLE001 -- authors bring tokenizers of every kind
        return 0


def _largest_id(tokenizer: Any) -> int:
    try:
        return int(max(tokenizer.get_vocab().values()))
    except Exception:  # noqa: BLE001 -- as above
        return -1


def completion_lengths(masks: Sequence[Sequence[int]]) -> list[int]:
    """Return [G] how many tokens of each trajectory are trained on."""
    return [
        len(mask) - mask.count(IGNORE_INDEX)
        if isinstance(mask, list | tuple)
        else sum(1 for label in mask if label != IGNORE_INDEX)
        for mask in masks
    ]


class GroupWriter:
    """Appends groups to a new JSON Lines file, one flushed line each.

    An existing file is never overwritten: `_1`, `_2`, ... is added to the stem of the path asked
    for. A killed process loses nothing it has written. Safe to call from several threads.

    Args:
        path: where to write; missing parent folders are created.

    Attributes:
        path: the file really written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._file = _create_free(Path(path))
        self._lock = threading.Lock()

    def write(self, group: Mapping[str, Any]) -> None:
        """Add a group as one line and flush it.

        Args:
            group: NumPy numbers and arrays are converted.

        Raises:
            GroupError: a value has no JSON form or is not finite; the message names its key.
                Nothing is written then.
        """
        try:
            line = encode_mapping(group)
        except ValueError as error:
            raise GroupError(f"the group cannot be written to {self.path}: {error}") from error
        with self._lock:  # one group stays one line
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


def _create_free(wanted: Path) -> tuple[Path, TextIO]:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, attempt = wanted, 0
    while True:
        try:
            # Mode "x" makes the choice of a name atomic among processes.
            return path, path.open("x", encoding="utf-8")
        except FileExistsError:
            attempt += 1
            path = wanted.with_name(f"{wanted.stem}_{attempt}{wanted.suffix}")


UNUSABLE = ("malformed", "wrong_size", "not_encodable", "outside_vocabulary")
"""Reasons that lie in the environment's code."""
NUM_DROPS_TOLD = 10
"""Drops for one reason that are told each; later ones ever more rarely."""
DEFAULTED_FIELDS = (
    "ref_logprobs",
    "overrides",
    "group_overrides",
    "distill_token_ids",
    "distill_logprobs",
)
"""Set to None when an environment leaves them out."""


class DeliveringEnv(Protocol):
    """What delivery reads and calls on its environment."""

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


class Delivery:
    """Admits, records and sends the groups of one environment.

    Args:
        env: The environment whose groups these are.
        reporter: Counts groups and what happened to them.
        side_thread: Reads long groups without holding up other rollouts.

    Attributes:
        jsonl_writer: Where admitted groups are saved, or None.
        items_sent_this_step: Groups sent since metrics were last logged.
    """

    def __init__(self, env: DeliveringEnv, reporter: Reporter, side_thread: SideThread) -> None:
        self.items_sent_this_step = 0
        self.jsonl_writer: GroupWriter | None = None
        self._env = env
        self._reporter = reporter
        self._side_thread = side_thread
        self._vocabulary: Vocabulary | None = None
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
        """Admit, record and send groups; see `BaseEnv.handle_send_to_api`."""
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        admitted = [
            group
            for group in groups
            if group is not None and await self._admit_group(group, limit_length=limits_length)
        ]
        admitted = await self._env.complete_groups(admitted)
        admitted = [group for group in admitted if await self._record_group(group, item)]
        if is_sent and admitted:
            self.items_sent_this_step += len(admitted)
            await self._env._send_scored_data_to_api(
                admitted if isinstance(scored_data, list) else admitted[0]
            )

    def close(self) -> None:
        """Close the file of saved groups, if there is one."""
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()

    async def _admit_group(self, group: Any, *, limit_length: bool) -> bool:
        """Check one group; tell whether it goes on."""
        _make_plain(group)
        # In a thread, here and below: reading a long group takes longer than others can wait.
        admission = await self._side_thread.run(
            check_signal,
            group,
            group_size=self._env.config.group_size,
            scores_must_differ=self._env.config.ensure_scores_are_not_same,
            smallest_size=self._smallest_group(),
        )
        is_well_formed = admission.reason in (None, "scores_equal")
        lengths = (
            await self._side_thread.run(completion_lengths, group["masks"])
            if is_well_formed
            else []
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
            vocabulary = self._vocabulary_now()
            admission = await self._side_thread.run(vocabulary.check, group["tokens"])
        if not admission.is_accepted:
            self._drop_group(admission)
            return False
        return True

    async def _record_group(self, group: ScoredDataGroup, item: Item | None) -> bool:
        """Keep an admitted group for the table and the file; tell whether it goes on."""
        if self._env.config.include_messages and not group.get("messages"):
            group["messages"] = [
                [{"role": "user", "content": await decode_long(self._env.tokenizer, tokens)}]
                for tokens in group["tokens"]
            ]
        if group.get("tokenized_from_text"):
            self._reporter.note_counts["tokenized_from_text"] += 1
        await settle(self._env.add_rollouts_for_wandb(group, item))
        return await self._save_group(group)

    def _vocabulary_now(self) -> Vocabulary:
        if self._vocabulary is None or self._vocabulary.tokenizer is not self._env.tokenizer:
            self._vocabulary = Vocabulary(self._env.tokenizer)
        return self._vocabulary

    def _smallest_group(self) -> int | None:
        is_shrinking = self._env.config.straggler_policy == StragglerPolicyEnum.SHRINK
        return self._env.config.min_group_size if is_shrinking else None

    async def _save_group(self, group: ScoredDataGroup) -> bool:
        if self.jsonl_writer is None:
            return True
        try:
            await self._side_thread.run(self.jsonl_writer.write, group)
        except GroupError as error:
            self._drop_group(Admission("not_encodable", str(error)))
            return False
        return True

    def num_unusable_groups(self) -> int:
        """Return how many groups were dropped so far because they were unusable."""
        return sum(self._reporter.drop_counts[reason] for reason in UNUSABLE)

    def is_unusable(self, collected: Any, *, before: int) -> bool:
        """Whether of what a rollout gave every group was dropped as unusable.

        Args:
            collected: a group, or a list of groups and Nones; it has been handled.
            before: `num_unusable_groups` before that.
        """
        groups = collected if isinstance(collected, list) else [collected]
        num_groups = sum(group is not None for group in groups)
        return 0 < num_groups <= self.num_unusable_groups() - before

    def _drop_group(self, admission: Admission, *, num_groups: int = 1) -> None:
        self._reporter.drop_counts[str(admission.reason)] += num_groups
        count = self._reporter.drop_counts[str(admission.reason)]
        is_told = count < NUM_DROPS_TOLD or is_milestone(count, added=num_groups)
        logger.log(
            logging.WARNING if is_told else logging.DEBUG,
            "group dropped (%s): %s%s",
            admission.reason,
            admission.detail,
            f"; {count} so far" if count >= NUM_DROPS_TOLD else "",
        )

    async def send(self, scored_data: ScoredDataGroup | list[ScoredDataGroup]) -> None:
        """Send one group, or several in one request; a refusal is logged and counted."""
        if self._env.service_session is None:
            raise RuntimeError("groups can only be sent while serving; there is no registration")
        num_groups = len(scored_data) if isinstance(scored_data, list) else 1
        try:
            await self._env.service_session.send(scored_data)
        except TrajectoryApiError as error:
            self._drop_group(Admission("refused_by_service", str(error)), num_groups=num_groups)
        except (GroupError, TypeError) as error:
            self._drop_group(Admission("not_encodable", str(error)), num_groups=num_groups)


def stamp_policy_version(groups: Any, version: int | None) -> None:
    """Write into finished groups, in place, under which weights they were sampled.

    Args:
        groups: what a rollout returned: a group or a list of groups and Nones.
        version: the oldest version its tokens were sampled under, from the engine where that
            names its weights, else what the service called the policy when they were asked for;
            for a rollout that recorded no tokens, when it started. None if unknown. A group
            that names its version keeps it.
    """
    if version is None:
        return
    for group in groups if isinstance(groups, list) else [groups]:
        if isinstance(group, MutableMapping):
            group.setdefault("policy_version", version)


def stamp_finish_reasons(groups: Any, sampled: SampledVersions) -> None:
    """Write into finished groups, in place, why the engine ended each trajectory's last completion.

    Args:
        groups: what a rollout returned: a group or a list of groups and Nones. A group that has
            the field keeps it; one whose tokens were changed after sampling gets none.
        sampled: what the rollout recorded.
    """
    for group in groups if isinstance(groups, list) else [groups]:
        if isinstance(group, MutableMapping) and group.get("finish_reasons") is None:
            try:
                reasons = sampled.finish_reasons(group.get("tokens") or ())
            except (TypeError, ValueError):
                continue  # not rows of tokens: admission says what is wrong with them
            if reasons is not None:
                group["finish_reasons"] = reasons


def mark_tokenized_from_text(groups: Any, *, has_text: bool) -> None:
    """Mark finished groups whose tokens were made from a server's text, in place.

    A group with such tokens carries no logprobs, since they are unknown. Which groups of a rollout
    they are follows from the logprobs, which are missing where such a token is trained; all
    of them where an environment sends no logprobs.

    Args:
        groups: what a rollout returned: a group or a list of groups and Nones.
        has_text: whether the rollout made tokens from text at all.
    """
    if not has_text:
        return
    for group in groups if isinstance(groups, list) else [groups]:
        if isinstance(group, MutableMapping) and _lacks_logprobs(group):
            group["inference_logprobs"] = None
            group["tokenized_from_text"] = True


def _lacks_logprobs(group: Mapping[str, Any]) -> bool:
    rows = group.get("inference_logprobs")
    if rows is None or len(rows) == 0:
        return True
    return any(
        logprob > 0 and mask != IGNORE_INDEX
        for masks, row in zip(group.get("masks") or (), rows, strict=False)
        for mask, logprob in zip(masks, row, strict=False)
    )


def _make_plain(group: Any) -> None:
    """Turn whole fields that are NumPy arrays into lists, in place.

    An empty list in the place of logprobs that were never filled becomes None.
    """
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
                continue  # encoding the group reports what is wrong with it

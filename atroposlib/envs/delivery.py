"""Admission, recording and sending of finished groups.

`Delivery` is a member of every environment. It holds the JSON Lines writer and the number of
groups sent, and calls `complete_groups`, `add_rollouts_for_wandb` and `_send_scored_data_to_api`
on its environment, so that overrides take part. Every dropped group is counted under a reason.

    groups -> signal and size -> lengths -> vocabulary -> messages -> table -> JSONL -> service
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from atroposlib.envs.admission import (
    Admission,
    Vocabulary,
    check_lengths,
    check_signal,
    completion_lengths,
)
from atroposlib.envs.config import BaseEnvConfig, StragglerPolicyEnum
from atroposlib.envs.hooks import settle
from atroposlib.envs.reporting import Reporter
from atroposlib.envs.server_handling.server_baseline import SampledVersions
from atroposlib.envs.service_session import EnvSession
from atroposlib.errors import GroupError, TrajectoryApiError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.aio import SideThread, decode_long
from atroposlib.utils.json_text import encode_mapping, to_plain
from atroposlib.utils.text import is_milestone

__all__ = [
    "Delivery",
    "GroupWriter",
    "mark_tokenized_from_text",
    "stamp_finish_reasons",
    "stamp_policy_version",
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


logger = logging.getLogger(__name__)

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

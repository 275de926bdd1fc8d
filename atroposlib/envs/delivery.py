"""The way of a group out of an environment: admitted, recorded, sent, or dropped and counted.

groups -> signal and size -> lengths -> messages -> table of rollouts -> JSONL -> service

Writing groups to a JSON Lines file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

from atroposlib.envs.admission import (
    Admission,
    Vocabulary,
    check_lengths,
    check_signal,
    completion_lengths,
)
from atroposlib.envs.config import StragglerPolicyEnum
from atroposlib.envs.hooks import settle
from atroposlib.envs.reporting import ReportingEnv
from atroposlib.envs.server_handling.server_baseline import SampledVersions
from atroposlib.envs.service_session import EnvSession
from atroposlib.errors import GroupError, TrajectoryApiError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, ScoredDataGroup
from atroposlib.type_definitions import Item
from atroposlib.utils.aio import SideThread, decode_long
from atroposlib.utils.json_text import encode_mapping, to_plain
from atroposlib.utils.text import is_milestone

__all__ = [
    "DeliveringEnv",
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


class DeliveringEnv(ReportingEnv):
    """The delivering half of an environment.

    Attributes:
        service_session: connection to the service while serving, otherwise None.
        jsonl_writer: where admitted groups are saved, or None.
        items_sent_this_step: groups sent since metrics were last logged.
    """

    service_session: EnvSession | None
    jsonl_writer: GroupWriter | None
    items_sent_this_step: int
    _side_thread: SideThread
    _vocabulary: Vocabulary | None = None

    async def handle_send_to_api(
        self,
        scored_data: ScoredDataGroup | list[ScoredDataGroup | None],
        item: Item | None = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Admit, record and send groups; called for everything a rollout returned.

        A group that is not admitted is logged and counted under its reason. Admitted groups are
        changed in place: missing optional fields become None, NumPy arrays become lists, and
        `messages` is filled under `include_messages`.

        Args:
            scored_data: one group, or a list of groups and Nones (sent in one request).
            item: what the groups were made from; passed on to `add_rollouts_for_wandb`.
            do_send_to_api: False only records, as `process` does.
            abort_on_any_max_length_exceeded: drop groups with a trajectory that is too long for
                the trainer.
        """
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        admitted = [
            group
            for group in groups
            if group is not None
            and await self._admit_group(group, limit_length=abort_on_any_max_length_exceeded)
        ]
        admitted = await self.complete_groups(admitted)
        admitted = [group for group in admitted if await self._record_group(group, item)]
        if do_send_to_api and admitted:
            self.items_sent_this_step += len(admitted)
            await self._send_scored_data_to_api(
                admitted if isinstance(scored_data, list) else admitted[0]
            )

    async def complete_groups(self, groups: list[ScoredDataGroup]) -> list[ScoredDataGroup]:
        """Add to admitted groups what costs too much for dropped ones; the default adds nothing."""
        return groups

    async def _admit_group(self, group: Any, *, limit_length: bool) -> bool:
        """Check one group; tell whether it goes on."""
        _make_plain(group)
        # In a thread, here and below: reading a long group takes longer than others can wait.
        admission = await self._side_thread.run(
            check_signal,
            group,
            group_size=self.config.group_size,
            scores_must_differ=self.config.ensure_scores_are_not_same,
            smallest_size=self._smallest_group(),
        )
        is_well_formed = admission.reason in (None, "scores_equal")
        lengths = (
            await self._side_thread.run(completion_lengths, group["masks"])
            if is_well_formed
            else []
        )
        self.run_figures.add_group(group, num_tokens=sum(lengths))
        if is_well_formed:
            self.reward_parts_since_log.add(group.get("reward_parts"))
        if admission.is_accepted:
            for name in DEFAULTED_FIELDS:
                group.setdefault(name, None)
            self.completion_lengths.extend(lengths)
            if limit_length:
                admission = check_lengths(group["tokens"], max_token_len=self.max_token_len)
        if admission.is_accepted:
            vocabulary = self._vocabulary_now()
            admission = await self._side_thread.run(vocabulary.check, group["tokens"])
        if not admission.is_accepted:
            self._drop_group(admission)
            return False
        return True

    async def _record_group(self, group: ScoredDataGroup, item: Item | None) -> bool:
        """Keep an admitted group for the table and the file; tell whether it goes on."""
        if self.config.include_messages and not group.get("messages"):
            group["messages"] = [
                [{"role": "user", "content": await decode_long(self.tokenizer, tokens)}]
                for tokens in group["tokens"]
            ]
        if group.get("tokenized_from_text"):
            self.note_counts["tokenized_from_text"] += 1
        await settle(self.add_rollouts_for_wandb(group, item))
        return await self._save_group(group)

    def _vocabulary_now(self) -> Vocabulary:
        if self._vocabulary is None or self._vocabulary.tokenizer is not self.tokenizer:
            self._vocabulary = Vocabulary(self.tokenizer)
        return self._vocabulary

    def _smallest_group(self) -> int | None:
        is_shrinking = self.config.straggler_policy == StragglerPolicyEnum.SHRINK
        return self.config.min_group_size if is_shrinking else None

    async def _save_group(self, group: ScoredDataGroup) -> bool:
        if self.jsonl_writer is None:
            return True
        try:
            await self._side_thread.run(self.jsonl_writer.write, group)
        except GroupError as error:
            self._drop_group(Admission("not_encodable", str(error)))
            return False
        return True

    def _num_unusable_groups(self) -> int:
        """Return how many groups were dropped so far because nobody could use them."""
        return sum(self.drop_counts[reason] for reason in UNUSABLE)

    def _is_unusable(self, collected: Any, *, before: int) -> bool:
        """Whether of what a rollout gave every group was dropped as unusable.

        Args:
            collected: a group, or a list of groups and Nones; it has been handled.
            before: `_num_unusable_groups` before that.
        """
        groups = collected if isinstance(collected, list) else [collected]
        num_groups = sum(group is not None for group in groups)
        return 0 < num_groups <= self._num_unusable_groups() - before

    def _drop_group(self, admission: Admission, *, num_groups: int = 1) -> None:
        self.drop_counts[str(admission.reason)] += num_groups
        count = self.drop_counts[str(admission.reason)]
        is_told = count < NUM_DROPS_TOLD or is_milestone(count, added=num_groups)
        logger.log(
            logging.WARNING if is_told else logging.DEBUG,
            "group dropped (%s): %s%s",
            admission.reason,
            admission.detail,
            f"; {count} so far" if count >= NUM_DROPS_TOLD else "",
        )

    async def _send_scored_data_to_api(
        self, scored_data: ScoredDataGroup | list[ScoredDataGroup]
    ) -> None:
        """Send one group, or several in one request; a refusal is logged and counted."""
        if self.service_session is None:
            raise RuntimeError("groups can only be sent while serving; there is no registration")
        num_groups = len(scored_data) if isinstance(scored_data, list) else 1
        try:
            await self.service_session.send(scored_data)
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
            for a rollout that recorded no tokens, when it started. None when nobody says. A group
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

    A group with such tokens carries no logprobs: nobody knows those of its tokens. Which groups of
    a rollout they are is told by the logprobs, which have none where such a token is trained; all
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
                continue  # whoever encodes the group says what is wrong with it

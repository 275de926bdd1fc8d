"""Batches of the service as the data classes of other trainers: the rules that all of them share.

    batches() ─► LeasedBatch ─► groups_of_rows ─► data class of one trainer

| module | trainer | what it makes |
|---|---|---|
| `trl` | TRL, asynchronous | `RolloutSample`, from a worker with its `RolloutWorkerProtocol` |
| `verl` | verl | `DataProto` |
| `skyrl` | SkyRL | `GeneratorOutput`, from a generator with its `GeneratorInterface` |

Each field of a group is carried over, or rejected by name with a `GroupError`; a field is left out
only if the caller lists it in `ignored_fields`. This package imports none of the trainers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import (
    IGNORE_INDEX,
    MASKED_LOGPROB,
    check_group,
    has_placeholder_tokens,
    has_zeroed_advantage,
    is_demonstration,
    num_sequences,
    temperature_of,
)

__all__ = ["FaceRules", "TrainerRow", "groups_of_rows"]

_UNUSABLE_FIELDS = ("images", "ref_logprobs", "distill_token_ids", "distill_logprobs")
_KNOWN_OVERRIDES = {"set_advantage_to_zero", "temperature", "sft"}
_KNOWN_GROUP_OVERRIDES = {
    "temperature", "group_size", "sft", "skip_teacher_top_k", "teacher_top_k"
}  # fmt: skip


@dataclass(frozen=True)
class FaceRules:
    """Limits of one trainer, and choices of the caller."""

    trainer: str
    """Name in error messages."""
    temperature: float | None = None
    """Sampling temperature that the trainer assumes; None accepts any."""
    group_size: int | None = None
    """Trajectories that each group must have; None accepts any number."""
    takes_advantages: bool = False
    """Whether advantages of the environment reach the loss."""
    needs_logprobs: bool = False
    """Whether each trajectory needs the logprobs of the policy that sampled it."""
    allow_tokenized_from_text: bool = False
    """Whether groups are accepted whose tokens were made from text."""
    ignored_fields: Collection[str] = ()
    """Optional fields that are left out instead of rejected."""


@dataclass(frozen=True)
class TrainerRow:
    """One trajectory, checked, with the fields of its group that concern it.

    A prompt ends at the first trained token. `[1, 2, 7, 9, 8]` with the masks
    `[-100, -100, 7, -100, 8]` has the prompt `[1, 2]` and the response `[7, 9, 8]`, whose token 9
    was inserted by the environment between two turns.
    """

    tokens: list[int]
    """[L] ids."""
    is_trained: list[int]
    """[L] 1 where the token is trained on, else 0."""
    logprobs: list[float] | None
    """[L] logprobs of the policy that sampled, 0.0 where not trained; None if unknown."""
    score: float
    advantages: list[float] | None
    """[L] advantages that the environment has set, 0.0 where not trained; None if it has not."""
    has_zeroed_advantage: bool
    """Whether an override sets its advantage to zero."""
    num_prompt_tokens: int
    policy_version: int | None
    """Version of the weights that sampled it; None if unknown."""
    finish_reason: str | None
    messages: list[Any]
    reward_parts: dict[str, float]

    @property
    def response(self) -> slice:
        """Positions of the response."""
        return slice(self.num_prompt_tokens, None)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.is_trained)


def groups_of_rows(batch: LeasedBatch, rules: FaceRules) -> Iterator[list[TrainerRow]]:
    """Yield the rows of each group of a batch.

    Raises:
        GroupError, ConfigError: a group cannot be carried over; the message names group and field.
    """
    for i, group in enumerate(batch.groups):
        try:
            yield _rows_of(group, rules)
        except (GroupError, ConfigError) as error:
            raise type(error)(f"group {i}: {error}") from error


def _rows_of(group: Mapping[str, Any], rules: FaceRules) -> list[TrainerRow]:
    check_group(group)
    _check_masks(group)
    _refuse_unusable(group, rules)
    size = num_sequences(group)
    if rules.group_size not in (None, size):
        raise ConfigError(
            f"{size} trajectories, {rules.trainer} expects {rules.group_size}: set the "
            "environment's group_size to the same, and send whole groups"
        )
    logprobs = group.get("inference_logprobs") or None
    if "inference_logprobs" in rules.ignored_fields and not rules.needs_logprobs:
        logprobs = None
    if logprobs is None and rules.needs_logprobs:
        raise GroupError(
            f"inference_logprobs: missing, and {rules.trainer} needs them; sample from a server "
            "that returns token ids and logprobs (--openai.server_type vllm or sglang)"
        )
    if logprobs is not None:
        _refuse_unknown_logprobs(logprobs, group["masks"], rules)
    advantages = _advantage_rows(group, rules)
    messages, parts, reasons = (
        _per_trajectory(group, name, size)
        for name in ("messages", "reward_parts", "finish_reasons")
    )
    return [
        TrainerRow(
            tokens=list(tokens),
            is_trained=[int(label != IGNORE_INDEX) for label in masks],
            logprobs=None if logprobs is None else _where_trained(logprobs[i], masks),
            score=float(group["scores"][i]),
            advantages=None if advantages is None else _where_trained(advantages[i], masks),
            has_zeroed_advantage=has_zeroed_advantage(group, i),
            num_prompt_tokens=_prompt_length(masks),
            policy_version=group.get("policy_version"),
            finish_reason=reasons[i],
            messages=_messages_of(messages[i]),
            reward_parts=dict(parts[i] or {}),
        )
        for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True))
    ]


def _messages_of(conversation: Any) -> list[Any]:
    """Return the messages of a trajectory; earlier environments send its text."""
    return [conversation] if isinstance(conversation, str) else list(conversation or ())


def _refuse_unknown_logprobs(
    logprobs: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], rules: FaceRules
) -> None:
    """Reject placeholders at trained tokens, which a trainer would use as logprobs."""
    for i, (values, labels) in enumerate(zip(logprobs, masks, strict=True)):
        for t, (value, label) in enumerate(zip(values, labels, strict=True)):
            if label != IGNORE_INDEX and value == MASKED_LOGPROB:
                remedy = "mask it in the environment"
                if not rules.needs_logprobs:
                    remedy += ", or train without logprobs: ignored_fields=['inference_logprobs']"
                raise GroupError(
                    f"inference_logprobs[{i}][{t}]: {MASKED_LOGPROB:g}, unknown, at a trained "
                    f"token, and {rules.trainer} takes it for a logprob; {remedy}"
                )


def _where_trained(values: Sequence[float], masks: Sequence[int]) -> list[float]:
    return [
        float(value) if label != IGNORE_INDEX else 0.0
        for value, label in zip(values, masks, strict=True)
    ]


def _prompt_length(masks: Sequence[int]) -> int:
    """Return the index of the first trained token; 1 if there is none."""
    untrained = itertools.takewhile(lambda label: label == IGNORE_INDEX, masks)
    length = sum(1 for _ in untrained)
    return 1 if length == len(masks) else length


def _per_trajectory(group: Mapping[str, Any], name: str, size: int) -> list[Any]:
    values = group.get(name)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        return [None] * size
    _check_count(name, values, size)
    return list(values)


def _check_count(path: str, values: Sequence[Any], expected: int) -> None:
    if len(values) != expected:
        raise GroupError(f"{path}: {len(values)} entries, tokens has {expected}")


def _check_masks(group: Mapping[str, Any]) -> None:
    """Check that masks hold the trained token, and that a prompt is in front of it."""
    for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        if len(tokens) < 2 or masks[0] != IGNORE_INDEX:
            raise GroupError(
                f"masks[{i}]: a trajectory needs a prompt of at least one token in front of the "
                "first trained token"
            )
        for t, (token, label) in enumerate(zip(tokens, masks, strict=True)):
            if token < 0:
                raise GroupError(f"tokens[{i}][{t}]: {token} is not a token id")
            if label not in (token, IGNORE_INDEX):
                raise GroupError(
                    f"masks[{i}][{t}]: {label}; expected the token, {token}, where it is trained "
                    f"and {IGNORE_INDEX} elsewhere"
                )


def _refuse_unusable(group: Mapping[str, Any], rules: FaceRules) -> None:
    for name in _UNUSABLE_FIELDS:
        if group.get(name) and name not in rules.ignored_fields:
            raise GroupError(
                f"{name}: not supported by {rules.trainer}; leave it out in the environment, or "
                f"train without it: ignored_fields=[{name!r}]"
            )
    tokens = group["tokens"]
    if any(map(has_placeholder_tokens, tokens)):
        raise ConfigError(
            "a group contains placeholder tokens; start the environment without "
            "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
        )
    if group.get("tokenized_from_text") and not rules.allow_tokenized_from_text:
        raise ConfigError(
            "a group is tokenized_from_text: its server reported no token ids, so a policy "
            "gradient has neither the sampled tokens nor their logprobs. Sample with "
            "--openai.server_type vllm or sglang"
        )
    _check_overrides(group, rules)
    for i in range(len(tokens)):
        is_overruled = has_zeroed_advantage(group, i) and not rules.takes_advantages
        if is_overruled and "set_advantage_to_zero" not in rules.ignored_fields:
            raise GroupError(
                f"overrides[{i}].set_advantage_to_zero: {rules.trainer} computes advantages from "
                "the scores; leave it out in the environment, or train without it: "
                "ignored_fields=['set_advantage_to_zero']"
            )
        if is_demonstration(group, i):
            raise GroupError(f"sft of trajectory {i}: {rules.trainer} has no likelihood loss here")
        sampled_at = temperature_of(group, i)
        if rules.temperature is not None and sampled_at != rules.temperature:
            raise ConfigError(
                f"sampled at temperature {sampled_at:g}, that of {rules.trainer} is "
                f"{rules.temperature:g}: they must be the same"
            )


def _check_overrides(group: Mapping[str, Any], rules: FaceRules) -> None:
    overrides = group.get("overrides")
    of_group = group.get("group_overrides")
    if overrides is not None and (
        not isinstance(overrides, Sequence) or isinstance(overrides, str)
    ):
        raise GroupError("overrides: expected a list with one object per trajectory")
    if overrides:
        _check_count("overrides", overrides, num_sequences(group))
    named = [(f"overrides[{i}]", one, _KNOWN_OVERRIDES) for i, one in enumerate(overrides or ())]
    for path, switches, known in [*named, ("group_overrides", of_group, _KNOWN_GROUP_OVERRIDES)]:
        if switches is not None and not isinstance(switches, Mapping):
            raise GroupError(f"{path}: expected an object, got {switches!r:.40}")
        for key, value in (switches or {}).items():
            if value and key not in known and key not in rules.ignored_fields:
                raise GroupError(
                    f"{path}.{key}: not supported by {rules.trainer}; leave it out in the "
                    f"environment, or train without it: ignored_fields=[{key!r}]"
                )


def _advantage_rows(group: Mapping[str, Any], rules: FaceRules) -> list[list[float]] | None:
    """Return the [G][L] advantages of the environment, None if it sets none."""
    given = None if "advantages" in rules.ignored_fields else group.get("advantages") or None
    if given is None:
        return None
    if not rules.takes_advantages:
        raise GroupError(
            f"advantages: {rules.trainer} computes its own from the scores; leave them out in the "
            "environment, or train without them: ignored_fields=['advantages']"
        )
    _check_count("advantages", given, num_sequences(group))
    rows: list[list[float]] = []
    for i, (values, ids) in enumerate(zip(given, group["tokens"], strict=True)):
        # Earlier environments send one number per trajectory.
        row = [values] * len(ids) if isinstance(values, (int, float)) else values
        if not isinstance(row, Sequence) or len(row) != len(ids):
            raise GroupError(f"advantages[{i}]: expected {len(ids)} numbers, as tokens[{i}] has")
        for t, value in enumerate(row):
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise GroupError(f"advantages[{i}][{t}]: {value!r:.40} is not a finite number")
        rows.append([float(value) for value in row])
    return rows

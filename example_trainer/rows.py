"""Rows: convert the trajectories of scored groups to the inputs of the loss.

    group [G][L] --(check, advantages, overrides, temperature, truncation)--> G rows [L]

Each field of a group is used here or rejected by name, with a `GroupError` that gives its path;
later code does not validate again. `scored_data.check_group` checks the lengths of trajectories,
but not the optional fields, which the service forwards as they are. Pure. Shifting and padding
happen in `batch`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    MAX_SCORE,
    check_group,
    has_placeholder_tokens,
    has_zeroed_advantage,
    is_demonstration,
    temperature_of,
)
from example_trainer.images import TEXT_ONLY, AlignedImages, ImageSupport
from example_trainer.loss import PADDED_TEACHER_ID

_OPTIONAL = tuple(field.name for field in GROUP_FIELDS if not field.required)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def drop_unfilled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with None for empty optional fields: lists of nulls and empty lists.

    In `token_versions`, nulls are kept: these trajectories are of unknown versions.
    """
    kept = {"token_versions"} if group.get("token_versions") else set()
    return {
        name: None if name in _OPTIONAL and name not in kept and _is_unfilled(value) else value
        for name, value in group.items()
    }


def _is_unfilled(value: Any) -> bool:
    return isinstance(value, list) and all(
        entry is None or (isinstance(entry, list) and not entry) for entry in value
    )


def check_tokens(group: Mapping[str, Any], *, vocabulary: int | None) -> None:
    """Check that token ids are valid, and that a mask is `IGNORE_INDEX` or the trained token.

    A mask of zeros and ones would otherwise train the model to predict the tokens 0 and 1.
    """
    for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        _check_ids(f"tokens[{i}]", tokens, vocabulary)
        for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if mask != token and mask != IGNORE_INDEX:
                raise GroupError(
                    f"masks[{i}][{t}]: {mask}; expected the token, {token}, where it is trained "
                    f"and {IGNORE_INDEX} elsewhere"
                )


def _check_ids(path: str, tokens: Sequence[int], vocabulary: int | None) -> None:
    if len(tokens) and min(tokens) < 0:
        t = next(t for t, token in enumerate(tokens) if token < 0)
        raise GroupError(f"{path}[{t}]: {tokens[t]} is not a token id")
    if len(tokens) and vocabulary is not None and max(tokens) >= vocabulary:
        t = next(t for t, token in enumerate(tokens) if token >= vocabulary)
        raise GroupError(
            f"{path}[{t}]: id {tokens[t]}, the model's vocabulary has {vocabulary} entries; "
            "environment and trainer must use one tokenizer"
        )


def check_switches(group: Mapping[str, Any]) -> None:
    """Check the shapes of `overrides`, `group_overrides`, `generation_params`, `finish_reasons`."""
    for name in ("generation_params", "group_overrides"):
        _check_mapping(name, group.get(name))
    tokens = group["tokens"]
    reasons = group.get("finish_reasons")
    if reasons is not None:
        remedy = "; each trajectory needs one, null where it is unknown"
        _check_length("finish_reasons", reasons, "tokens", tokens, remedy)
    overrides = group.get("overrides")
    if overrides is None:
        return
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        raise GroupError("overrides: expected a list with one object per trajectory")
    remedy = "; each trajectory needs one, {} for no override"
    _check_length("overrides", overrides, "tokens", tokens, remedy)
    for i, override in enumerate(overrides):
        _check_mapping(f"overrides[{i}]", override)


def _check_length(
    path: str, values: Sequence[Any], other: str, others: Sequence[Any], remedy: str = ""
) -> None:
    if len(values) != len(others):
        raise GroupError(f"{path}: {len(values)} entries, {other} has {len(others)}{remedy}")


def _check_mapping(path: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise GroupError(f"{path}: expected an object, got {value!r:.40}")
    for name in _SAMPLING:
        if value.get(name) is not None:
            _check_number(f"{path}.{name}", value[name])


def check_numbers(path: str, values: Sequence[Any]) -> None:
    """Check that all values of one row are numbers in the range of float32."""
    # Faster than the loop below, which finds the invalid value.
    try:
        if not len(values) or (
            math.isfinite(sum(values)) and max(values) <= MAX_SCORE and min(values) >= -MAX_SCORE
        ):
            return
    except (TypeError, OverflowError):
        pass
    for t, value in enumerate(values):
        _check_number(f"{path}[{t}]", value)


def _check_number(path: str, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise GroupError(f"{path}: {value!r:.40} is not a finite number")
    if not -MAX_SCORE <= value <= MAX_SCORE:  # also for integers outside the range of floats
        is_finite = isinstance(value, int) or math.isfinite(value)
        reason = f"is beyond ±{MAX_SCORE:g}" if is_finite else "is not a finite number"
        raise GroupError(f"{path}: {value!r:.40} {reason}")


def check_teacher_ids(path: str, ids: Sequence[int], *, vocabulary: int | None) -> None:
    """Check that the teacher's tokens at one position are in the vocabulary, or padding."""
    if len(ids) and vocabulary is not None and max(ids) >= vocabulary:
        raise GroupError(
            f"{path}: id {max(ids)}, the model's vocabulary has {vocabulary} entries; teacher and "
            "student must use one tokenizer"
        )
    if len(ids) and min(ids) < PADDED_TEACHER_ID:
        raise GroupError(
            f"{path}: {min(ids)} is neither a token id nor {PADDED_TEACHER_ID}, the padding"
        )


_SUPPORTED_OVERRIDES = {"set_advantage_to_zero", "temperature", "sft"}
# The last two are settings of the environment's own teacher and have no effect here.
_SUPPORTED_GROUP_OVERRIDES = {
    "temperature", "group_size", "sft", "skip_teacher_top_k", "teacher_top_k"
}  # fmt: skip
# Groups also have a `policy_version`, from which staleness is computed.
_KNOWN_FIELDS = {field.name for field in GROUP_FIELDS} | {"policy_version"}
_REMEDY = "leave it out in the environment, or train without it: --unsupported-fields ignore"


def refuse_unsupported(
    group: Mapping[str, Any],
    *,
    uses_reference: bool,
    uses_teacher: bool,
    images: ImageSupport = TEXT_ONLY,
) -> None:
    """Reject fields and overrides that the loss does not use under these settings."""
    unused = {} if images.reader is not None else {"images": images.obstacle}
    if not uses_teacher:
        reason = "distillation is off; set --distill-coef"
        unused |= {"distill_token_ids": reason, "distill_logprobs": reason}
    if not uses_reference:
        unused["ref_logprobs"] = "the KL penalty is off; set --kl-coef"
    for field, reason in unused.items():
        if group.get(field):
            raise GroupError(f"{field}: {reason}; {_REMEDY}")
    for i, override in enumerate(group.get("overrides") or ()):
        for key, value in (override or {}).items():
            if value and key not in _SUPPORTED_OVERRIDES:
                raise GroupError(f"overrides[{i}].{key}: not supported by this trainer; {_REMEDY}")
    for key, value in (group.get("group_overrides") or {}).items():
        if value and key not in _SUPPORTED_GROUP_OVERRIDES:
            raise GroupError(f"group_overrides.{key}: not supported by this trainer; {_REMEDY}")


def refuse_unsampled(
    group: Mapping[str, Any], are_sft: Sequence[bool], *, uses_rewards: bool, allow: bool
) -> None:
    """Reject tokens that no model sampled, unless they are trained without a policy gradient.

    `are_sft` [G] marks demonstrations; `uses_rewards` is whether the policy loss is used.

    Raises:
        ConfigError: rather than `GroupError`, since every group of the environment is affected.
    """
    if any(map(has_placeholder_tokens, group["tokens"])):
        raise ConfigError(
            "a group contains placeholder tokens; start the environment without "
            "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
        )
    if not group.get("tokenized_from_text") or not uses_rewards or allow:
        return
    if any(not sft and not has_zeroed_advantage(group, i) for i, sft in enumerate(are_sft)):
        raise ConfigError(
            "a group is tokenized_from_text: its server reported no token ids, so a policy "
            "gradient has neither the sampled tokens nor their logprobs. Sample with "
            "--openai.server_type vllm or sglang, export the groups for SFT or DPO, or train on "
            "them as they are with --allow-tokenized-from-text"
        )


def unknown_fields(group: Mapping[str, Any]) -> set[str]:
    """Return the filled fields of a group that the trainer does not read."""
    return {name for name, value in group.items() if value and name not in _KNOWN_FIELDS}


def is_truncated_by_engine(group: Mapping[str, Any], i: int) -> bool:
    """Return whether the engine truncated the last completion of trajectory i.

    The engine's finish reason decides. In a group without finish reasons, a completion of
    `generation_params.max_tokens` tokens counts as truncated.
    """
    reasons = group.get("finish_reasons") or ()
    if i < len(reasons) and reasons[i] is not None:
        return bool(reasons[i] == "length")
    limit = (group.get("generation_params") or {}).get("max_tokens")
    if not isinstance(limit, int) or limit <= 0:
        return False
    from_last = itertools.dropwhile(
        lambda label: label == IGNORE_INDEX, reversed(group["masks"][i])
    )
    return sum(1 for _ in itertools.takewhile(lambda la: la != IGNORE_INDEX, from_last)) >= limit


def version_runs_of(group: Mapping[str, Any], i: int) -> Sequence[Sequence[int | None]]:
    """Return the policy versions of trajectory i as runs that cover its tokens.

    A group without `token_versions` was sampled with its `policy_version`.

    Raises:
        GroupError: the runs cover another number of tokens.
    """
    num_tokens = len(group["tokens"][i])
    by_trajectory = group.get("token_versions")
    if not by_trajectory:
        return [(group.get("policy_version"), num_tokens)]
    _check_length("token_versions", by_trajectory, "tokens", group["tokens"])
    runs: Sequence[Sequence[int | None]] = by_trajectory[i] or [(None, num_tokens)]
    covered = sum(length or 0 for _, length in runs)
    if covered != num_tokens:
        raise GroupError(
            f"token_versions[{i}]: runs of {covered} tokens, tokens[{i}] has {num_tokens}"
        )
    return runs


def mask_old_tokens(
    labels: Sequence[int], runs: Sequence[Sequence[int | None]], oldest_version: int
) -> Sequence[int]:
    """Return [L] labels without those of tokens sampled by a version before `oldest_version`."""
    masked: list[int] = []
    for version, length in runs:
        end = min(len(labels), len(masked) + (length or 0))
        is_old = version is not None and version < oldest_version
        own = labels[len(masked) : end]
        masked += [IGNORE_INDEX] * len(own) if is_old else own
    return masked


def is_partially_sampled(group: Mapping[str, Any]) -> bool:
    """Return whether the engine sampled from a part of the vocabulary (top-p, top-k, min-p)."""
    params = group.get("generation_params") or {}
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return (
        (top_p is not None and top_p < 1)
        or (top_k is not None and top_k > 0)
        or (min_p is not None and min_p > 0)
    )


def float_rows(group: Mapping[str, Any], field: str) -> Sequence[Sequence[float]] | None:
    """Return an optional [G][L] field of finite numbers, None if it is absent."""
    rows: Sequence[Sequence[float]] | None = group.get(field) or None
    if rows is not None:
        _check_lengths(field, rows, group["tokens"])
        for i, row in enumerate(rows):
            check_numbers(f"{field}[{i}]", row)
    return rows


def teacher_row(
    group: Mapping[str, Any], i: int, *, vocabulary: int | None
) -> tuple[Sequence[Sequence[int]] | None, Sequence[Sequence[float]] | None]:
    """Return the teacher's [L][K] ids and logprobs for trajectory i, None without a teacher."""
    ids, logprobs = group.get("distill_token_ids"), group.get("distill_logprobs")
    if not ids and not logprobs:
        return None, None
    if not ids or not logprobs:
        missing = "distill_logprobs" if ids else "distill_token_ids"
        raise GroupError(f"{missing}: missing; distillation needs ids and logprobs")
    _check_lengths("distill_token_ids", ids, group["tokens"])
    _check_lengths("distill_logprobs", logprobs, group["tokens"])
    for t, (id_row, logprob_row) in enumerate(zip(ids[i], logprobs[i], strict=True)):
        ids_path, path = f"distill_token_ids[{i}][{t}]", f"distill_logprobs[{i}][{t}]"
        _check_length(path, logprob_row, ids_path, id_row)
        check_teacher_ids(ids_path, id_row, vocabulary=vocabulary)
        check_numbers(path, logprob_row)
    return ids[i], logprobs[i]


def _check_lengths(field: str, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> None:
    _check_length(field, rows, "tokens", tokens)
    for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
        _check_length(f"{field}[{i}]", row, f"tokens[{i}]", ids)


def group_advantages(
    scores: Sequence[float], *, std: Literal["sample", "population", "none"], eps: float
) -> list[float]:
    """Turn the [G] scores of one group into [G] advantages, `(score - mean) / (deviation + eps)`.

    `sample` with 1e-6 equals verl, with 1e-4 TRL; `population` with 0 equals the earlier Atropos
    trainer; `none` subtracts the mean only, as Dr.GRPO does. A group whose scores are all equal
    yields zeros. A group of one keeps its score, since there is no other to compare it with.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1; Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783, for `none`.
    """
    if len(scores) == 1:
        return [float(scores[0])]
    if min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    centered = [score - mean for score in scores]
    if std == "none":
        return centered
    degrees = len(scores) - 1 if std == "sample" else len(scores)
    deviation = math.sqrt(math.fsum(c * c for c in centered) / degrees)
    return [c / (deviation + eps) for c in centered]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty, from -1 to 0, that DAPO's overlong shaping adds to a score.

    It is 0 up to `max_tokens - buffer_tokens`, falls linearly to -1 at `max_tokens`, and stays -1.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
    """
    if num_tokens >= max_tokens:
        return -1.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0


@dataclass(frozen=True)
class RowRules:
    """Settings of the conversion of groups to rows."""

    seq_len: int
    """Maximum length of a row in tokens; longer ones are truncated."""
    advantage_std: Literal["sample", "population", "none"] = "population"
    advantage_eps: float = 1e-8
    unsupported_fields: Literal["refuse", "ignore"] = "refuse"
    allow_tokenized_from_text: bool = False
    """Whether the policy loss accepts tokens that were made from text."""
    vocabulary: int | None = None
    """Size of the model's vocabulary; None: unknown."""
    overlong_max_tokens: int | None = None
    """Trained tokens at which the score loses 1; None: no penalty."""
    overlong_buffer_tokens: int = 0
    truncated_completions: Literal["train", "mask"] = "train"
    oldest_version: int | None = None
    """Tokens that an earlier policy version sampled are masked; None: none are."""
    uses_rewards: bool = True
    """Whether the policy loss is used; without it every advantage is 0."""
    uses_reference: bool = False
    """Whether the loss has a KL penalty."""
    scores_reference: bool = False
    """Whether the trainer computes the `ref_logprobs` that a group does not contain."""
    uses_teacher: bool = False
    """Whether the loss has a distillation term."""
    images: ImageSupport = TEXT_ONLY
    """Whether and how images are read."""


@dataclass(frozen=True)
class Row:
    """One trajectory of L tokens, unshifted."""

    tokens: Sequence[int]
    """[L] token ids."""
    labels: Sequence[int]
    """[L] the token id where trained, `IGNORE_INDEX` elsewhere."""
    advantages: Sequence[float]
    """[L] multiplier of each token's loss."""
    inference_logprobs: Sequence[float] | None
    """[L] logprobs of the engine that sampled, None if the group has none."""
    temperature: float
    """Sampling temperature, above 0."""
    is_truncated: bool = False
    """Whether tokens were truncated to `seq_len`."""
    is_partially_sampled: bool = False
    """Whether the engine sampled from a part of the vocabulary; its logprobs are then not
    comparable with the trainer's."""
    is_sft: bool = False
    """Whether it is a demonstration, trained by likelihood."""
    ref_logprobs: Sequence[float] | None = None
    """[L] logprobs of a reference model."""
    distill_token_ids: Sequence[Sequence[int]] | None = None
    """[L][K] the teacher's top tokens at each position; K may differ and be 0."""
    distill_logprobs: Sequence[Sequence[float]] | None = None
    """[L][K] the teacher's logprobs of these tokens."""
    images: AlignedImages | None = None
    """Images among the tokens; None without any."""


def rows_from_group(group: Mapping[str, Any], rules: RowRules, *, name: str = "group") -> list[Row]:
    """Convert one scored group, as the service delivers it, to [G] rows.

    Advantages are the group's token-level `advantages` if it has them, else they are computed from
    its scores. They are zero without a policy loss, and under
    `overrides[i].set_advantage_to_zero`. Trajectories marked `sft` have no advantage, and their
    scores do not enter those of the others. Errors refer to the group by `name`.

    Raises:
        GroupError: the group is malformed, or uses a feature that this trainer does not support.
        ConfigError: its tokens were not sampled by a model, which holds for its whole environment.
    """
    try:
        group = drop_unfilled(group)
        check_group(group)
        check_tokens(group, vocabulary=rules.vocabulary)
        check_switches(group)
        if rules.unsupported_fields == "refuse":
            refuse_unsupported(
                group,
                uses_reference=rules.uses_reference,
                uses_teacher=rules.uses_teacher,
                images=rules.images,
            )
        group, images = _read_images(group, rules)
        are_sft = [is_demonstration(group, i) for i in range(len(group["tokens"]))]
        refuse_unsampled(
            group, are_sft, uses_rewards=rules.uses_rewards, allow=rules.allow_tokenized_from_text
        )
        advantages = _token_advantages(group, rules, are_sft)
        reference = float_rows(group, "ref_logprobs") if rules.uses_reference else None
        needs_reference = rules.uses_reference and not rules.scores_reference
        if needs_reference and reference is None and not all(are_sft):
            raise GroupError(
                "ref_logprobs: missing; the KL penalty needs them. Let the environment send "
                "them, set --reference-model, or set --kl-coef 0"
            )
        return [
            _row(
                group,
                i,
                rules,
                advantages[i],
                reference[i] if reference else None,
                is_sft=is_sft,
                images=images[i],
            )
            for i, is_sft in enumerate(are_sft)
        ]
    except GroupError as error:
        raise GroupError(f"{name}: {error}") from error
    except ArithmeticError as error:
        raise GroupError(f"{name}: arithmetic with its numbers fails: {error}") from error


def _read_images(
    group: Mapping[str, Any], rules: RowRules
) -> tuple[Mapping[str, Any], Sequence[AlignedImages | None]]:
    """Return the group with all tokens of its images, and the images [G] of its trajectories."""
    if rules.images.reader is None:
        return group, [None] * len(group["tokens"])
    return rules.images.reader.read(group, requires_tokens=rules.unsupported_fields == "refuse")


def _row(
    group: Mapping[str, Any],
    i: int,
    rules: RowRules,
    advantages: Sequence[float],
    ref_logprobs: Sequence[float] | None,
    *,
    is_sft: bool,
    images: AlignedImages | None = None,
) -> Row:
    length = rules.seq_len if images is None else images.fitting_length(rules.seq_len)
    keep = slice(0, length)
    tokens, labels = group["tokens"][i], group["masks"][i][keep]
    # An image at the end is left out as well, but has no trained tokens.
    is_truncated = len(tokens) > rules.seq_len
    may_mask = rules.truncated_completions == "mask" and not is_sft
    if may_mask and (is_truncated or is_truncated_by_engine(group, i)):
        labels = [IGNORE_INDEX] * len(labels)
    if rules.oldest_version is not None and not is_sft:
        labels = mask_old_tokens(labels, version_runs_of(group, i), rules.oldest_version)
    logprobs = group.get("inference_logprobs")
    ids, teacher = (
        teacher_row(group, i, vocabulary=rules.vocabulary) if rules.uses_teacher else (None, None)
    )
    return Row(
        tokens=tokens[keep],
        labels=labels,
        advantages=advantages[keep],
        inference_logprobs=None if logprobs is None else logprobs[i][keep],
        temperature=1.0 if is_sft else temperature_of(group, i),  # it was not sampled
        is_truncated=is_truncated,
        is_partially_sampled=is_partially_sampled(group),
        is_sft=is_sft,
        ref_logprobs=None if ref_logprobs is None else ref_logprobs[keep],
        distill_token_ids=None if ids is None else ids[keep],
        distill_logprobs=None if teacher is None else teacher[keep],
        images=None if images is None else images.first_tokens(length),
    )


def _token_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[list[float]]:
    """Return [G][L] advantages; those of demonstrations are zero, whatever the group contains."""
    if not rules.uses_rewards:
        return [[0.0] * len(tokens) for tokens in group["tokens"]]
    given = group.get("advantages")
    if given is None:
        given = _score_advantages(group, rules, are_sft)
    _check_length("advantages", given, "tokens", group["tokens"])
    result = []
    for i, (value, tokens) in enumerate(zip(given, group["tokens"], strict=True)):
        if are_sft[i] or has_zeroed_advantage(group, i):
            result.append([0.0] * len(tokens))
            continue
        # Environments of May 2025 send one number per trajectory.
        row = [float(value)] * len(tokens) if isinstance(value, (int, float)) else list(value)
        _check_length(f"advantages[{i}]", row, f"tokens[{i}]", tokens)
        check_numbers(f"advantages[{i}]", row)
        result.append(row)
    return result


def _score_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[float]:
    """Return [G] advantages, computed from the scores of the sampled trajectories."""
    sampled = [i for i, is_sft in enumerate(are_sft) if not is_sft]
    scores = [float(group["scores"][i]) for i in sampled]
    if rules.overlong_max_tokens is not None:
        scores = [
            score
            + overlong_penalty(
                sum(label != IGNORE_INDEX for label in group["masks"][i]),
                max_tokens=rules.overlong_max_tokens,
                buffer_tokens=rules.overlong_buffer_tokens,
            )
            for i, score in zip(sampled, scores, strict=True)
        ]
    result = [0.0] * len(are_sft)
    if sampled:
        advantages = group_advantages(scores, std=rules.advantage_std, eps=rules.advantage_eps)
        for i, advantage in zip(sampled, advantages, strict=True):
            result[i] = advantage
    return result

"""Rows: convert the trajectories of scored groups to the inputs of the loss.

    group [G][L] --(check, advantages, overrides, temperature, truncation)--> G rows [L]

Each field of a group is used here or rejected by name, with a `GroupError` that gives its path;
later code does not validate again. `scored_data.check_group` checks what every group needs; the
service forwards the optional fields as they are. Pure. Shifting and padding happen in `batch`.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from typing_extensions import assert_never

from atroposlib.errors import AtroposError, ConfigError, GroupError
from atroposlib.scored_data import (
    GROUP_FIELDS,
    IGNORE_INDEX,
    MASKED_LOGPROB,
    MAX_SCORE,
    check_group,
    has_placeholder_tokens,
    has_zeroed_advantage,
    is_demonstration,
    temperature_of,
)
from atroposlib.wire.json_format import check_opaque
from example_trainer.images import TEXT_ONLY, AlignedImages, ImageSupport
from example_trainer.loss import PADDED_TEACHER_ID

Group = Mapping[str, Any]
VersionRuns = Sequence[Sequence[int | None]]


class AdvantageFunctionError(AtroposError, TypeError):
    """A result of `advantage_fn` that no group can have; it ends the run."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"advantage_fn: {reason}")


class GroupScores(NamedTuple):
    """Argument of `advantage_fn`: the sampled trajectories of a group, without demonstrations."""

    scores: list[float]
    """[G] the environment's, with the penalty of `overlong_max_tokens`."""
    lengths: list[int]
    """[G] trained tokens."""
    indices: list[int]
    """[G] positions in the group."""
    group: Group
    """All fields, as the service delivered them."""


@dataclass(frozen=True)
class RowRules:
    """Settings of the conversion of groups to rows."""

    seq_len: int
    """Maximum length of a row in tokens; longer ones are truncated."""
    advantage_std: Literal["sample", "population", "none"] = "population"
    advantage_eps: float = 1e-8
    advantage_fn: Callable[[GroupScores], Any] | None = None
    """Returns [G] advantages, or [G][L]; None: those of `group_advantages`."""
    unsupported_fields: Literal["refuse", "ignore"] = "refuse"
    allow_tokenized_from_text: bool = False
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
    """Whether the engine sampled from a part of the vocabulary, by top-p, top-k or min-p; its
    logprobs are then not comparable with the trainer's."""
    is_sft: bool = False
    """Whether it is a demonstration, trained by likelihood."""
    ref_logprobs: Sequence[float] | None = None
    """[L] logprobs of a reference model."""
    distill_token_ids: Sequence[Sequence[int]] | None = None
    """[L][K] the teacher's top tokens at each position; K may differ and be 0."""
    distill_logprobs: Sequence[Sequence[float]] | None = None
    """[L][K] the teacher's logprobs of these tokens."""
    images: AlignedImages | None = None


def rows_from_group(group: Group, rules: RowRules, *, name: str = "group") -> list[Row]:
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
        group = _without_unfilled(group)
        _check(group, rules)
        images: Sequence[AlignedImages | None] = [None] * len(group["tokens"])
        if rules.images.reader is not None:
            group, images = rules.images.reader.read(
                group, requires_tokens=rules.unsupported_fields == "refuse"
            )
        are_sft = [is_demonstration(group, i) for i in range(len(group["tokens"]))]
        refuse_unsampled(
            group, are_sft, uses_rewards=rules.uses_rewards, allow=rules.allow_tokenized_from_text
        )
        advantages = _token_advantages(group, rules, are_sft)
        if group.get("inference_logprobs") is not None:
            _check_logprobs(group, "inference_logprobs")
        reference = _reference(group) if rules.uses_reference else None
        needs_reference = rules.uses_reference and not rules.scores_reference
        if needs_reference and reference is None and not all(are_sft):
            raise GroupError(
                "ref_logprobs: missing; the KL penalty needs them. Let the environment send "
                "them, set --reference-model, or set --kl-coef 0"
            )
        if rules.uses_teacher:
            _check_teacher(group, rules.vocabulary)
        return [
            _row(group, i, rules, advantages[i], is_sft=are_sft[i], images=images[i])
            for i in range(len(are_sft))
        ]
    except GroupError as error:
        raise GroupError(f"{name}: {error}") from error
    except ArithmeticError as error:
        raise GroupError(f"{name}: arithmetic with its numbers fails: {error}") from error
    except RecursionError as error:
        raise GroupError(f"{name}: a value is nested too deeply") from error


def _row(
    group: Group,
    i: int,
    rules: RowRules,
    advantages: Sequence[float],
    *,
    is_sft: bool,
    images: AlignedImages | None,
) -> Row:
    length = rules.seq_len if images is None else images.fitting_length(rules.seq_len)

    def kept(field: str, *, is_used: bool = True) -> Any:
        rows = group.get(field) if is_used else None
        return rows[i][:length] if rows else None

    labels = kept("masks")
    # An image at the end is left out as well, but has no trained tokens.
    is_truncated = len(group["tokens"][i]) > rules.seq_len
    may_mask = rules.truncated_completions == "mask" and not is_sft
    if may_mask and (is_truncated or is_truncated_by_engine(group, i)):
        labels = [IGNORE_INDEX] * len(labels)
    if rules.oldest_version is not None and not is_sft:
        labels = mask_old_tokens(labels, version_runs_of(group, i), rules.oldest_version)
    params = group.get("generation_params") or {}
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return Row(
        tokens=kept("tokens"),
        labels=labels,
        advantages=advantages[:length],
        inference_logprobs=kept("inference_logprobs"),
        temperature=1.0 if is_sft else temperature_of(group, i),  # it was not sampled
        is_truncated=is_truncated,
        is_partially_sampled=(top_p is not None and top_p < 1)
        or (top_k is not None and top_k > 0)
        or (min_p is not None and min_p > 0),
        is_sft=is_sft,
        ref_logprobs=kept("ref_logprobs", is_used=rules.uses_reference),
        distill_token_ids=kept("distill_token_ids", is_used=rules.uses_teacher),
        distill_logprobs=kept("distill_logprobs", is_used=rules.uses_teacher),
        images=None if images is None else images.first_tokens(length),
    )


def _token_advantages(
    group: Group, rules: RowRules, are_sft: Sequence[bool]
) -> list[Sequence[float]]:
    """Return [G][L] advantages; those of demonstrations are zero, whatever the group contains."""
    tokens = group["tokens"]
    if not rules.uses_rewards:
        return [[0.0] * len(ids) for ids in tokens]
    given: Any = group.get("advantages")
    if given is None:
        given = _score_advantages(group, rules, are_sft)
    _check_list("advantages", given)
    _check_length("advantages", given, "tokens", tokens)
    result: list[Sequence[float]] = []
    for i, ids in enumerate(tokens):
        if are_sft[i] or has_zeroed_advantage(group, i):
            result.append([0.0] * len(ids))
            continue
        # Environments of May 2025 send one number per trajectory.
        is_one = isinstance(given[i], (int, float))
        if not is_one:
            _check_list(f"advantages[{i}]", given[i])
        result.append([float(given[i])] * len(ids) if is_one else list(given[i]))
        _check_length(f"advantages[{i}]", result[i], f"tokens[{i}]", ids)
        _check_numbers(f"advantages[{i}]", result[i], limit=MAX_ADVANTAGE)
    return result


def _score_advantages(group: Group, rules: RowRules, are_sft: Sequence[bool]) -> list[Any]:
    """Return [G] advantages, computed from the scores of the sampled trajectories."""
    indices = [i for i, is_sft in enumerate(are_sft) if not is_sft]
    scores = [float(group["scores"][i]) for i in indices]
    lengths: list[int] = []
    if rules.overlong_max_tokens is not None or rules.advantage_fn is not None:
        lengths = [sum(label != IGNORE_INDEX for label in group["masks"][i]) for i in indices]
    if rules.overlong_max_tokens is not None:
        limits = {"max_tokens": rules.overlong_max_tokens}
        limits["buffer_tokens"] = rules.overlong_buffer_tokens
        scores = [
            score + overlong_penalty(length, **limits)
            for score, length in zip(scores, lengths, strict=True)
        ]
    if rules.advantage_fn is None:
        advantages = group_advantages(scores, std=rules.advantage_std, eps=rules.advantage_eps)
    else:
        advantages = _listed(rules.advantage_fn(GroupScores(scores, lengths, indices, group)))
        if len(advantages) != len(scores):
            raise AdvantageFunctionError(
                f"{len(advantages)} advantages for {len(scores)} trajectories"
            )
    by_index = dict(zip(indices, advantages, strict=True))
    return [by_index.get(i, 0.0) for i in range(len(are_sft))]


def _listed(advantages: Any) -> list[Any]:
    """Return the result of `advantage_fn`, which may be a tensor or an array, as a list."""
    if hasattr(advantages, "tolist"):
        advantages = advantages.tolist()
    if not isinstance(advantages, (list, tuple)):
        raise AdvantageFunctionError(f"expected a list of advantages; got {advantages!r:.80}")
    listed = [a.tolist() if hasattr(a, "tolist") else a for a in advantages]
    for a in listed:
        if not isinstance(a, (int, float, list, tuple)):
            raise AdvantageFunctionError(f"expected numbers, or a list of them; got {a!r:.80}")
    return listed


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
    if len(set(scores)) < 2:
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    centered = [score - mean for score in scores]
    if std == "none":
        return centered
    if std == "sample":
        degrees = len(scores) - 1
    elif std == "population":
        degrees = len(scores)
    else:
        assert_never(std)
    deviation = math.sqrt(math.fsum(c * c for c in centered) / degrees)
    return [c / (deviation + eps) for c in centered]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty, from -1 to 0, that DAPO's overlong shaping adds to a score.

    It falls linearly over the `buffer_tokens` before `max_tokens`.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
    """
    if num_tokens >= max_tokens:
        return -1.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0


def is_truncated_by_engine(group: Group, i: int) -> bool:
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
    runs = itertools.groupby(reversed(group["masks"][i]), lambda label: label != IGNORE_INDEX)
    return next((len(list(run)) for is_trained, run in runs if is_trained), 0) >= limit


def version_runs_of(group: Group, i: int) -> VersionRuns:
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
    runs: VersionRuns = by_trajectory[i] or [(None, num_tokens)]
    covered = sum(length or 0 for _, length in runs)
    if covered != num_tokens:
        raise GroupError(
            f"token_versions[{i}]: runs of {covered} tokens, tokens[{i}] has {num_tokens}"
        )
    return runs


def mask_old_tokens(labels: Sequence[int], runs: VersionRuns, oldest_version: int) -> Sequence[int]:
    """Return [L] labels without those of tokens sampled by a version before `oldest_version`."""
    masked: list[int] = []
    for version, length in runs:
        own = labels[len(masked) : len(masked) + (length or 0)]
        is_old = version is not None and version < oldest_version
        masked += [IGNORE_INDEX] * len(own) if is_old else own
    return masked


_OPTIONAL = tuple(field.name for field in GROUP_FIELDS if not field.required)
# Groups also have a `policy_version`, from which staleness is computed.
_KNOWN_FIELDS = {field.name for field in GROUP_FIELDS} | {"policy_version"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
"""Range of temperatures: logits divided by them, and the gradient, remain finite in float32."""
MAX_ADVANTAGE = 1e6
"""Largest magnitude of an advantage; gradients remain finite in float32."""
MIN_LOGPROB, MAX_LOGPROB = -1e9, 0.1
"""Range of logprobs: squares of differences remain finite in float32; 0.1 is 0 and the rounding
error of engines in bfloat16."""
_SUPPORTED_OVERRIDES = {"set_advantage_to_zero", "temperature", "sft"}
# The last two are settings of the environment's own teacher and have no effect here.
_SUPPORTED_GROUP_OVERRIDES = {
    "temperature", "group_size", "sft", "skip_teacher_top_k", "teacher_top_k"
}  # fmt: skip
_REMEDY = "leave it out in the environment, or train without it: --unsupported-fields ignore"


def unknown_fields(group: Group) -> set[str]:
    """Return the filled fields of a group that the trainer does not read."""
    return {name for name, value in group.items() if value and name not in _KNOWN_FIELDS}


def refuse_unsampled(
    group: Group, are_sft: Sequence[bool], *, uses_rewards: bool, allow: bool
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


def _without_unfilled(group: Group) -> dict[str, Any]:
    """Return the group with None for optional lists of nulls and empty lists.

    In `token_versions`, nulls are kept: these trajectories are of unknown versions.
    """
    group = dict(group)
    for name in _OPTIONAL:
        value = group.get(name)
        is_unfilled = isinstance(value, list) and all(
            entry is None or (isinstance(entry, list) and not entry) for entry in value
        )
        if is_unfilled and not (value and name == "token_versions"):
            group[name] = None
    return group


def _check(group: Group, rules: RowRules) -> None:
    _check_types(group)
    check_group(group)
    _check_versions(group)
    for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        _check_ids(f"tokens[{i}]", tokens, rules.vocabulary)
        # A mask of zeros and ones would train the model to predict the tokens 0 and 1.
        for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if mask != token and mask != IGNORE_INDEX:
                raise GroupError(
                    f"masks[{i}][{t}]: {mask}; expected the token, {token}, where it is trained "
                    f"and {IGNORE_INDEX} elsewhere"
                )
    for name in ("generation_params", "group_overrides"):
        _check_switches(name, group.get(name))
    for name, nothing in (("finish_reasons", "null"), ("overrides", "{}")):
        values, rule = group.get(name), f"each trajectory needs one, {nothing} for none"
        if values is None:
            continue
        if not isinstance(values, (list, tuple)):
            raise GroupError(f"{name}: expected a list of entries; {rule}")
        _check_length(name, values, "tokens", group["tokens"], remedy=f"; {rule}")
    for i, override in enumerate(group.get("overrides") or ()):
        _check_switches(f"overrides[{i}]", override)
    if rules.unsupported_fields == "refuse":
        _refuse_unsupported(group, rules)


def _check_types(group: Group) -> None:
    """Check the types of the fields of every group; a JSON body may contain any."""
    for name in ("tokens", "masks", "scores", "inference_logprobs"):
        if group.get(name) is not None:
            _check_list(name, group[name])
    for name in ("tokens", "masks"):
        for i, row in enumerate(group.get(name) or ()):
            _check_entries(f"{name}[{i}]", row, numbers.Integral, "an integer")
    _check_entries("scores", group.get("scores") or (), numbers.Real, "a number")
    for i, row in enumerate(group.get("inference_logprobs") or ()):
        _check_entries(f"inference_logprobs[{i}]", row, numbers.Real, "a number")


def _check_versions(group: Group) -> None:
    version = group.get("policy_version")
    if version is not None and not (isinstance(version, int) and abs(version) < 2**63):
        raise GroupError(f"policy_version: expected an integer or null, got {version!r:.40}")
    runs = group.get("token_versions")
    if runs is not None:
        check_opaque("token_versions", runs, list(map(len, group["tokens"])))


def _refuse_unsupported(group: Group, rules: RowRules) -> None:
    """Reject fields and overrides that the loss does not use under these settings."""
    unused = {} if rules.images.reader is not None else {"images": rules.images.obstacle}
    if not rules.uses_teacher:
        reason = "distillation is off; set --distill-coef"
        unused |= {"distill_token_ids": reason, "distill_logprobs": reason}
    if not rules.uses_reference:
        unused["ref_logprobs"] = "the KL penalty is off; set --kl-coef"
    for field, reason in unused.items():
        if group.get(field):
            raise GroupError(f"{field}: {reason}; {_REMEDY}")
    places = [
        (f"overrides[{i}]", own, _SUPPORTED_OVERRIDES)
        for i, own in enumerate(group.get("overrides") or ())
    ]
    places.append(("group_overrides", group.get("group_overrides"), _SUPPORTED_GROUP_OVERRIDES))
    for path, switches, supported in places:
        for key, value in (switches or {}).items():
            if value and key not in supported:
                raise GroupError(f"{path}.{key}: not supported by this trainer; {_REMEDY}")


def _check_switches(path: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise GroupError(f"{path}: expected an object, got {value!r:.40}")
    for name in _SAMPLING:
        if value.get(name) is not None:
            _check_number(f"{path}.{name}", value[name])
    temperature = value.get("temperature") or 0.0
    # 0 and less stand for greedy decoding.
    if temperature > 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise GroupError(
            f"{path}.temperature: {temperature!r:.40}; expected 0 or a number from "
            f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )


def _check_teacher(group: Group, vocabulary: int | None) -> None:
    ids, logprobs = group.get("distill_token_ids"), group.get("distill_logprobs")
    if not ids and not logprobs:
        return
    if not ids or not logprobs:
        missing = "distill_logprobs" if ids else "distill_token_ids"
        raise GroupError(f"{missing}: missing; distillation needs ids and logprobs")
    for name, kind, noun in (
        ("distill_token_ids", numbers.Integral, "an integer"),
        ("distill_logprobs", numbers.Real, "a number"),
    ):
        _check_aligned(group, name)
        for i, row in enumerate(group[name]):
            _check_entries(f"{name}[{i}]", row, (list, tuple), "a list")
            _check_choices(f"{name}[{i}]", row, kind, noun)
    for i, t in ((i, t) for i, tokens in enumerate(group["tokens"]) for t in range(len(tokens))):
        path = f"distill_logprobs[{i}][{t}]"
        ids_path = f"distill_token_ids[{i}][{t}]"
        _check_length(path, logprobs[i][t], ids_path, ids[i][t])
        _check_ids(ids_path, ids[i][t], vocabulary, padding=PADDED_TEACHER_ID)
        _check_numbers(path, logprobs[i][t])


def _reference(group: Group) -> Sequence[Sequence[float]] | None:
    """Return the `ref_logprobs` [G][L] of a group, None if they are absent."""
    rows: Sequence[Sequence[float]] | None = group.get("ref_logprobs") or None
    if rows is not None:
        _check_aligned(group, "ref_logprobs")
        _check_logprobs(group, "ref_logprobs")
    return rows


def _check_logprobs(group: Group, field: str) -> None:
    """Check [G][L] logprobs; where nothing is trained, any number has no effect."""
    for i, row in enumerate(group[field]):
        path = f"{field}[{i}]"
        _check_numbers(path, row)
        # Faster than a loop over all tokens: only masked ones are outside the range.
        outside = [t for t, value in enumerate(row) if not MIN_LOGPROB <= value <= MAX_LOGPROB]
        for t in outside:
            if row[t] != MASKED_LOGPROB and group["masks"][i][t] != IGNORE_INDEX:
                raise GroupError(
                    f"{path}[{t}]: {row[t]!r:.40}; expected a logprob, at most 0 and at least "
                    f"{MIN_LOGPROB:g}, or {MASKED_LOGPROB:g} where it is unknown"
                )


def _check_aligned(group: Group, field: str) -> None:
    _check_list(field, group[field])
    for i, row in enumerate(group[field]):
        _check_list(f"{field}[{i}]", row)
    _check_length(field, group[field], "tokens", group["tokens"])
    for i, (row, ids) in enumerate(zip(group[field], group["tokens"], strict=True)):
        _check_length(f"{field}[{i}]", row, f"tokens[{i}]", ids)


def _check_list(path: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)):
        raise GroupError(f"{path}: expected a list, got {values!r:.40}")


Kinds = type | tuple[type, ...]


def _check_entries(path: str, values: Any, kind: Kinds, noun: str) -> None:
    _check_list(path, values)
    if _are_all(values, kind):
        return
    for t, value in enumerate(values):
        if not isinstance(value, kind):
            raise GroupError(f"{path}[{t}]: expected {noun}, got {value!r:.40}")


def _check_choices(path: str, row: Sequence[Sequence[Any]], kind: Kinds, noun: str) -> None:
    """Check the [L][K] entries of a row of lists."""
    if _are_all(itertools.chain.from_iterable(row), kind):
        return
    for t, values in enumerate(row):
        _check_entries(f"{path}[{t}]", values, kind, noun)


def _are_all(values: Iterable[Any], kind: Kinds) -> bool:
    # Values have few types; looking at each type once is faster than at each value.
    return all(issubclass(found, kind) for found in set(map(type, values)))


def _check_length(
    path: str, values: Sequence[Any], other: str, others: Sequence[Any], *, remedy: str = ""
) -> None:
    if len(values) != len(others):
        raise GroupError(f"{path}: {len(values)} entries, {other} has {len(others)}{remedy}")


def _check_ids(
    path: str, ids: Sequence[int], vocabulary: int | None, *, padding: int | None = None
) -> None:
    least, most = min(ids, default=0), max(ids, default=0)
    if least < (0 if padding is None else padding):
        if padding is not None:
            raise GroupError(f"{path}: {least} is neither a token id nor {padding}, the padding")
        raise GroupError(f"{path}[{list(ids).index(least)}]: {least} is not a token id")
    if vocabulary is not None and most >= vocabulary:
        who = "environment and trainer" if padding is None else "teacher and student"
        raise GroupError(
            f"{path}[{list(ids).index(most)}]: id {most}, the model's vocabulary has {vocabulary} "
            f"entries; {who} must use one tokenizer"
        )


def _check_numbers(path: str, values: Sequence[Any], *, limit: float = MAX_SCORE) -> None:
    # Faster than the loop below, which finds the invalid value.
    try:
        if not len(values) or (
            math.isfinite(sum(values)) and max(values) <= limit and min(values) >= -limit
        ):
            return
    except (TypeError, OverflowError):
        pass
    for t, value in enumerate(values):
        _check_number(f"{path}[{t}]", value, limit=limit)


def _check_number(path: str, value: Any, *, limit: float = MAX_SCORE) -> None:
    is_number = isinstance(value, (int, float))
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise GroupError(f"{path}: {value!r:.40} is not a finite number")
    if not -limit <= value <= limit:  # also integers outside the range of floats
        raise GroupError(f"{path}: {value!r:.40} is beyond ±{limit:g}")

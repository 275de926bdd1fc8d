"""Rows: the trajectories of scored groups, each with everything the loss needs of it.

    group [G][L] --(check, advantages, overrides, temperature, truncation)--> G rows [L]

Each field of a group is used here or rejected by name, with a `GroupError` that gives its path;
later code validates nothing again. `scored_data.check_group` has checked that trajectories line up,
but leaves optional fields loose, since the service passes them through. Pure; nothing is shifted or
padded here: that is `batch`.
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
)
from example_trainer.loss import PADDED_TEACHER_ID

_OPTIONAL = tuple(field.name for field in GROUP_FIELDS if not field.required)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def drop_unfilled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with None for each optional field that holds nothing at all.

    Some environments send an empty list, or nulls and empty lists, for what they did not fill.
    """
    return {
        name: None if name in _OPTIONAL and _is_unfilled(value) else value
        for name, value in group.items()
    }


def _is_unfilled(value: Any) -> bool:
    return isinstance(value, list) and all(
        entry is None or (isinstance(entry, list) and not entry) for entry in value
    )


def check_tokens(group: Mapping[str, Any], *, vocabulary: int | None) -> None:
    """Check that ids are ids, and that a mask is `IGNORE_INDEX` or the token where it is trained.

    A mask of zeros and ones would otherwise train the model to say the tokens 0 and 1.
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
    reasons = group.get("finish_reasons")
    if reasons is not None and len(reasons) != len(group["tokens"]):
        raise GroupError(
            f"finish_reasons: {len(reasons)} entries, tokens has {len(group['tokens'])}; each "
            "trajectory needs one, null where it is unknown"
        )
    overrides = group.get("overrides")
    if overrides is None:
        return
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        raise GroupError("overrides: expected a list with one object per trajectory")
    if len(overrides) != len(group["tokens"]):
        raise GroupError(
            f"overrides: {len(overrides)} entries, tokens has {len(group['tokens'])}; each "
            "trajectory needs one, {} where nothing is switched"
        )
    for i, override in enumerate(overrides):
        _check_mapping(f"overrides[{i}]", override)


def _check_mapping(path: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise GroupError(f"{path}: expected an object, got {value!r:.40}")
    for name in _SAMPLING:
        if value.get(name) is not None:
            _check_number(f"{path}.{name}", value[name])


def check_numbers(path: str, values: Sequence[Any]) -> None:
    """Check that all values of one row are numbers that a float of 32 bits holds, too."""
    # Faster than the loop that names the value.
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
    if not -MAX_SCORE <= value <= MAX_SCORE:  # also of an integer beyond all floats
        is_finite = isinstance(value, int) or math.isfinite(value)
        reason = f"is beyond ±{MAX_SCORE:g}" if is_finite else "is not a finite number"
        raise GroupError(f"{path}: {value!r:.40} {reason}")


def check_teacher_ids(path: str, ids: Sequence[int], *, vocabulary: int | None) -> None:
    """Check that the choices at one position are ids the model has, or padding."""
    if len(ids) and vocabulary is not None and max(ids) >= vocabulary:
        raise GroupError(
            f"{path}: id {max(ids)}, the model's vocabulary has {vocabulary} entries; teacher and "
            "student must use one tokenizer"
        )
    if len(ids) and min(ids) < PADDED_TEACHER_ID:
        raise GroupError(
            f"{path}: {min(ids)} is neither a token id nor {PADDED_TEACHER_ID}, which pads"
        )


_HONOURED_OVERRIDES = {"set_advantage_to_zero", "temperature", "sft"}
# The last two told the environment's own teacher what to do; nothing is left to honour here.
_HONOURED_GROUP_OVERRIDES = {
    "temperature", "group_size", "sft", "skip_teacher_top_k", "teacher_top_k"
}  # fmt: skip
# Stamped on every group, for the staleness of what was sampled.
_KNOWN_FIELDS = {field.name for field in GROUP_FIELDS} | {"policy_version"}
_REMEDY = "leave it out in the environment, or train without it: --unsupported-fields ignore"


def refuse_unsupported(
    group: Mapping[str, Any], *, uses_reference: bool, uses_teacher: bool
) -> None:
    """Refuse what the settings give the loss no use for."""
    unused = {"images": "this trainer is text only"}
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
            if value and key not in _HONOURED_OVERRIDES:
                raise GroupError(f"overrides[{i}].{key}: this trainer cannot honour it; {_REMEDY}")
    for key, value in (group.get("group_overrides") or {}).items():
        if value and key not in _HONOURED_GROUP_OVERRIDES:
            raise GroupError(f"group_overrides.{key}: this trainer cannot honour it; {_REMEDY}")


def refuse_unsampled(
    group: Mapping[str, Any], are_sft: Sequence[bool], *, uses_rewards: bool, allow: bool
) -> None:
    """Refuse tokens that no model sampled where a policy gradient would take them for its own.

    `are_sft` [G] are the demonstrations; `uses_rewards` says whether the policy loss takes part.

    Raises:
        ConfigError: every group of that environment is like that, so none is passed over.
    """
    if any(map(has_placeholder_tokens, group["tokens"])):
        raise ConfigError(
            "a group holds placeholder tokens; start the environment without "
            "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
        )
    if not group.get("tokenized_from_text") or not uses_rewards or allow:
        return
    is_policy = [not sft and not is_silenced(group, i) for i, sft in enumerate(are_sft)]
    if any(is_policy):
        raise ConfigError(
            "a group is tokenized_from_text: its server reported no token ids, so a policy "
            "gradient has neither the sampled tokens nor their logprobs. Sample from an engine "
            "with --openai.server_type vllm or sglang, export the groups for SFT or DPO, or train "
            "on them as they are with --allow-tokenized-from-text"
        )


def unknown_fields(group: Mapping[str, Any]) -> set[str]:
    """Return the filled fields of a group that are in no list of ours: they change nothing."""
    return {name for name, value in group.items() if value and name not in _KNOWN_FIELDS}


def is_demonstration(group: Mapping[str, Any], i: int) -> bool:
    """Tell whether trajectory i is trained by likelihood: its own `sft`, else the group's.

    Raises:
        GroupError: it is to be trained and silenced at once.
    """
    own = _override(group, i).get("sft")
    of_group = (group.get("group_overrides") or {}).get("sft")
    is_sft = bool(of_group if own is None else own)
    if is_sft and is_silenced(group, i):
        raise GroupError(
            f"overrides[{i}]: sft and set_advantage_to_zero exclude each other; a demonstration "
            "has no advantage. Mask its tokens to leave it out"
        )
    return is_sft


def is_silenced(group: Mapping[str, Any], i: int) -> bool:
    """Tell whether trajectory i gets no advantage, whatever its score."""
    return bool(_override(group, i).get("set_advantage_to_zero"))


def is_cut_by_engine(group: Mapping[str, Any], i: int) -> bool:
    """Tell whether the engine cut the last completion of trajectory i.

    The engine's own finish reason decides where the group carries it; else a completion counts as
    cut that is as long as `generation_params.max_tokens` lets the engine make one.
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


def samples_from_a_part(group: Mapping[str, Any]) -> bool:
    """Tell whether the engine drew from a part of the vocabulary only (top-p, top-k, min-p)."""
    params = group.get("generation_params") or {}
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return (
        (top_p is not None and top_p < 1)
        or (top_k is not None and top_k > 0)
        or (min_p is not None and min_p > 0)
    )


def float_rows(group: Mapping[str, Any], field: str) -> Sequence[Sequence[float]] | None:
    """Return an optional [G][L] field of finite numbers, None when it was never filled."""
    rows: Sequence[Sequence[float]] | None = group.get(field) or None
    if rows is not None:
        _check_lengths(field, rows, group["tokens"])
        for i, row in enumerate(rows):
            check_numbers(f"{field}[{i}]", row)
    return rows


def teacher_row(
    group: Mapping[str, Any], i: int, *, vocabulary: int | None
) -> tuple[Sequence[Sequence[int]] | None, Sequence[Sequence[float]] | None]:
    """Return [L][K] ids and logprobs of the teacher for trajectory i, None without a teacher."""
    ids, logprobs = group.get("distill_token_ids"), group.get("distill_logprobs")
    if not ids and not logprobs:
        return None, None
    if not ids or not logprobs:
        missing = "distill_logprobs" if ids else "distill_token_ids"
        raise GroupError(f"{missing}: missing; distillation needs ids and logprobs")
    _check_lengths("distill_token_ids", ids, group["tokens"])
    _check_lengths("distill_logprobs", logprobs, group["tokens"])
    for t, (id_row, logprob_row) in enumerate(zip(ids[i], logprobs[i], strict=True)):
        if len(id_row) != len(logprob_row):
            raise GroupError(
                f"distill_logprobs[{i}][{t}]: {len(logprob_row)} entries, "
                f"distill_token_ids[{i}][{t}] has {len(id_row)}"
            )
        check_teacher_ids(f"distill_token_ids[{i}][{t}]", id_row, vocabulary=vocabulary)
        check_numbers(f"distill_logprobs[{i}][{t}]", logprob_row)
    return ids[i], logprobs[i]


def temperature_of(group: Mapping[str, Any], i: int) -> float:
    """Return the sampling temperature of trajectory i, 1 where unknown or greedy."""
    for source in (
        _override(group, i),
        group.get("generation_params") or {},
        group.get("group_overrides") or {},
    ):
        value = source.get("temperature")
        if value is not None:
            # Greedy decoding has no distribution to divide by.
            return float(value) if float(value) > 0 else 1.0
    return 1.0


def _override(group: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    overrides = group.get("overrides") or []
    return (overrides[i] or {}) if i < len(overrides) else {}


def _check_lengths(field: str, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> None:
    if len(rows) != len(tokens):
        raise GroupError(f"{field}: {len(rows)} entries, tokens has {len(tokens)}")
    for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
        if len(row) != len(ids):
            raise GroupError(f"{field}[{i}]: {len(row)} entries, tokens[{i}] has {len(ids)}")


def group_advantages(
    scores: Sequence[float], *, std: Literal["sample", "population", "none"], eps: float
) -> list[float]:
    """Centre the scores of one group and divide them by their deviation.

    `(score - mean) / (deviation + eps)`. `sample` with 1e-6 is verl's number, with 1e-4 TRL's;
    `population` with 0 the earlier Atropos trainer's; `none` is Dr.GRPO's, the mean baseline
    alone. A group whose scores are all equal yields zeros: it carries no signal. A group of one
    keeps its raw score, because it has no siblings to be compared with.

    Args:
        scores: [G] one finite score per trajectory.
        std: Which deviation divides.
        eps: Added to the deviation.

    Returns:
        [G] advantages, in the order of `scores`.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1; Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783, for `none`.
    """
    if len(scores) == 1:
        return [float(scores[0])]
    if min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    centred = [score - mean for score in scores]
    if std == "none":
        return centred
    degrees = len(scores) - 1 if std == "sample" else len(scores)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / degrees)
    return [c / (deviation + eps) for c in centred]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return what DAPO's overlong shaping adds to the score of a completion, from 0 down to -1.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`, -1 beyond.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
    """
    if num_tokens >= max_tokens:
        return -1.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0


@dataclass(frozen=True)
class RowRules:
    """The settings that decide how groups become rows."""

    seq_len: int
    """Tokens a row keeps at most; the rest is cut from its end."""
    advantage_std: Literal["sample", "population", "none"] = "population"
    advantage_eps: float = 1e-8
    unsupported_fields: Literal["refuse", "ignore"] = "refuse"
    allow_tokenized_from_text: bool = False
    """Whether the policy loss takes tokens that were made from text."""
    vocabulary: int | None = None
    """Token ids the model has; None: unknown."""
    overlong_max_tokens: int | None = None
    """Trained tokens at which the score loses 1; None: no penalty."""
    overlong_buffer_tokens: int = 0
    truncated_completions: Literal["train", "mask"] = "train"
    uses_rewards: bool = True
    """Whether the policy loss takes part; without it every advantage is 0."""
    uses_reference: bool = False
    """Whether the loss has a KL penalty."""
    scores_reference: bool = False
    """Whether the trainer scores the reference itself where a group carries no `ref_logprobs`."""
    uses_teacher: bool = False
    """Whether the loss distils."""


@dataclass(frozen=True)
class Row:
    """One trajectory, unshifted; every list has its L entries."""

    tokens: Sequence[int]
    """[L] token ids."""
    labels: Sequence[int]
    """[L] the token id where trained, `IGNORE_INDEX` elsewhere."""
    advantages: Sequence[float]
    """[L] multiplier of each token's loss."""
    inference_logprobs: Sequence[float] | None
    """[L] logprobs of the engine that sampled, None when the group carried none."""
    temperature: float
    """Sampling temperature, above 0."""
    is_truncated: bool = False
    """Whether tokens were cut to fit `seq_len`."""
    is_cut_sampling: bool = False
    """Whether the engine drew from a part of the vocabulary only, so that its logprobs are either
    not of what it drew from, or not comparable with the trainer's."""
    is_sft: bool = False
    """Whether it is a demonstration, trained by likelihood."""
    ref_logprobs: Sequence[float] | None = None
    """[L] logprobs of a reference model."""
    distill_token_ids: Sequence[Sequence[int]] | None = None
    """[L][K] what a teacher expects at each position; K may differ and be 0."""
    distill_logprobs: Sequence[Sequence[float]] | None = None
    """[L][K] the teacher's logprobs of these."""


def rows_from_group(group: Mapping[str, Any], rules: RowRules, *, name: str = "group") -> list[Row]:
    """Turn one scored group into rows.

    Advantages come from the group's token-level `advantages` where it has them, else from its
    scores; both are passed over where rewards are not used. `overrides[i].set_advantage_to_zero`
    silences trajectory i after that. Trajectories marked `sft` have no advantage, and their scores
    no part in their siblings'. `messages` are not read: tokens say what they say.

    Args:
        group: A group as the service delivers it; null fields count as absent.
        rules: The settings.
        name: How errors call this group.

    Returns:
        [G] rows in the order of the group.

    Raises:
        GroupError: the group is malformed, or asks for something this trainer cannot do.
        ConfigError: its tokens are not those that a model sampled; every group of its environment
            is like that.
    """
    try:
        group = drop_unfilled(group)
        check_group(group)
        check_tokens(group, vocabulary=rules.vocabulary)
        check_switches(group)
        if rules.unsupported_fields == "refuse":
            refuse_unsupported(
                group, uses_reference=rules.uses_reference, uses_teacher=rules.uses_teacher
            )
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
                "them, name a --reference-model, or set --kl-coef 0"
            )
        return [
            _row(group, i, rules, advantages[i], reference[i] if reference else None, is_sft=is_sft)
            for i, is_sft in enumerate(are_sft)
        ]
    except GroupError as error:
        raise GroupError(f"{name}: {error}") from error
    except ArithmeticError as error:
        raise GroupError(f"{name}: its numbers cannot be computed with: {error}") from error


def _row(
    group: Mapping[str, Any],
    i: int,
    rules: RowRules,
    advantages: Sequence[float],
    ref_logprobs: Sequence[float] | None,
    *,
    is_sft: bool,
) -> Row:
    keep = slice(0, rules.seq_len)
    tokens, labels = group["tokens"][i], group["masks"][i][keep]
    is_cut = len(tokens) > rules.seq_len
    may_mask = rules.truncated_completions == "mask" and not is_sft
    if may_mask and (is_cut or is_cut_by_engine(group, i)):
        labels = [IGNORE_INDEX] * len(labels)
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
        is_truncated=is_cut,
        is_cut_sampling=samples_from_a_part(group),
        is_sft=is_sft,
        ref_logprobs=None if ref_logprobs is None else ref_logprobs[keep],
        distill_token_ids=None if ids is None else ids[keep],
        distill_logprobs=None if teacher is None else teacher[keep],
    )


def _token_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[list[float]]:
    """Return [G][L] advantages; demonstrations get zeros, and what they sent is not looked at."""
    if not rules.uses_rewards:
        return [[0.0] * len(tokens) for tokens in group["tokens"]]
    given = group.get("advantages")
    if given is None:
        given = _score_advantages(group, rules, are_sft)
    if len(given) != len(group["tokens"]):
        raise GroupError(f"advantages: {len(given)} entries, tokens has {len(group['tokens'])}")
    result = []
    for i, (value, tokens) in enumerate(zip(given, group["tokens"], strict=True)):
        if are_sft[i] or is_silenced(group, i):
            result.append([0.0] * len(tokens))
            continue
        # May-2025 environments send one number per trajectory.
        row = [float(value)] * len(tokens) if isinstance(value, (int, float)) else list(value)
        if len(row) != len(tokens):
            raise GroupError(f"advantages[{i}]: {len(row)} entries, tokens[{i}] has {len(tokens)}")
        check_numbers(f"advantages[{i}]", row)
        result.append(row)
    return result


def _score_advantages(
    group: Mapping[str, Any], rules: RowRules, are_sft: Sequence[bool]
) -> list[float]:
    """Return [G] one advantage per trajectory, from the scores of those that were sampled."""
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

"""What one trajectory asks of the loss: overrides, teacher arrays, temperature; or a refusal.

Everything here reads a group as the service delivers it and raises `GroupError` naming the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, has_placeholder_tokens
from example_trainer.row_checks import check_numbers, check_teacher_ids

__all__ = [
    "float_rows",
    "is_cut_by_engine",
    "is_demonstration",
    "is_silenced",
    "refuse_unsampled",
    "refuse_unsupported",
    "samples_from_a_part",
    "teacher_row",
    "temperature_of",
    "unknown_fields",
]

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
    """Refuse what the settings give the loss no use for.

    Raises:
        GroupError: names the field or the override.
    """
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

    Args:
        group: Lines up.
        are_sft: [G] whether a trajectory is a demonstration.
        uses_rewards: Whether the policy loss takes part.
        allow: Whether it takes tokens that were made from text all the same.

    Raises:
        ConfigError: it is so in every group of that environment, so none is passed over.
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
    """Return an optional [G][L] field, None when it was never filled.

    Raises:
        GroupError: its lengths are not those of the tokens, or a number is not finite.
    """
    rows: Sequence[Sequence[float]] | None = group.get(field) or None
    if rows is not None:
        _check_lengths(field, rows, group["tokens"])
        for i, row in enumerate(rows):
            check_numbers(f"{field}[{i}]", row)
    return rows


def teacher_row(
    group: Mapping[str, Any], i: int, *, vocabulary: int | None
) -> tuple[Sequence[Sequence[int]] | None, Sequence[Sequence[float]] | None]:
    """Return [L][K] ids and logprobs of the teacher for trajectory i, None without a teacher.

    `vocabulary`: ids the model has; None: unknown.

    Raises:
        GroupError: one array is missing, the two do not line up, or an entry is no id or number.
    """
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

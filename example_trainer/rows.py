"""Rows: the trajectories of scored groups, each with everything the loss needs of it.

    group [G][L] --(check, advantages, overrides, temperature, cut)--> G rows [L]

This is the border where a group is honoured field by field or refused naming the field; behind it
nothing is re-validated. Nothing is shifted or padded here: that is `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.errors import GroupError
from atroposlib.scored_data import check_group
from example_trainer.advantages import group_advantages

__all__ = ["Row", "RowRules", "rows_from_group"]

_UNSUPPORTED_FIELDS = {
    "distill_token_ids": "this trainer has no distillation loss yet",
    "distill_logprobs": "this trainer has no distillation loss yet",
    "images": "this trainer is text only",
}
_HONOURED_OVERRIDES = {"set_advantage_to_zero", "temperature"}
_HONOURED_GROUP_OVERRIDES = {"temperature", "group_size"}


@dataclass(frozen=True)
class RowRules:
    """The settings that decide how groups become rows."""

    seq_len: int
    """Tokens a row keeps at most; the rest is cut from its end."""
    advantage_std: Literal["sample", "population", "none"] = "population"
    advantage_eps: float = 1e-8
    unsupported_fields: Literal["refuse", "ignore"] = "refuse"


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


def rows_from_group(group: Mapping[str, Any], rules: RowRules, *, name: str = "group") -> list[Row]:
    """Turn one scored group into rows.

    Advantages come from the group's token-level `advantages` where it has them, else from its
    scores. `overrides[i].set_advantage_to_zero` silences trajectory i after that. `ref_logprobs`
    and `messages` are not read: no term of the loss uses them.

    Args:
        group: A group as the service delivers it; null fields count as absent.
        rules: The settings.
        name: How errors call this group.

    Returns:
        [G] rows in the order of the group.

    Raises:
        GroupError: the group is malformed, or asks for something this trainer cannot do.
    """
    try:
        check_group(group)
        if rules.unsupported_fields == "refuse":
            _refuse_unsupported(group)
        advantages = _token_advantages(group, rules)
    except GroupError as error:
        raise GroupError(f"{name}: {error}") from error
    logprobs = group.get("inference_logprobs") or None  # empty when never filled
    rows = []
    for i, tokens in enumerate(group["tokens"]):
        keep = slice(0, rules.seq_len)
        rows.append(
            Row(
                tokens=tokens[keep],
                labels=group["masks"][i][keep],
                advantages=advantages[i][keep],
                inference_logprobs=None if logprobs is None else logprobs[i][keep],
                temperature=_temperature(group, i),
                is_truncated=len(tokens) > rules.seq_len,
            )
        )
    return rows


def _refuse_unsupported(group: Mapping[str, Any]) -> None:
    remedy = "leave it out in the environment, or train without it: --unsupported-fields ignore"
    for field, reason in _UNSUPPORTED_FIELDS.items():
        value = group.get(field)
        if value is not None and value != []:
            raise GroupError(f"{field}: {reason}; {remedy}")
    for i, override in enumerate(group.get("overrides") or ()):
        for key, value in (override or {}).items():
            if value and key not in _HONOURED_OVERRIDES:
                raise GroupError(f"overrides[{i}].{key}: this trainer cannot honour it; {remedy}")
    for key, value in (group.get("group_overrides") or {}).items():
        if value and key not in _HONOURED_GROUP_OVERRIDES:
            raise GroupError(f"group_overrides.{key}: this trainer cannot honour it; {remedy}")


def _token_advantages(group: Mapping[str, Any], rules: RowRules) -> list[list[float]]:
    given = group.get("advantages")
    if given is None:
        given = group_advantages(group["scores"], std=rules.advantage_std, eps=rules.advantage_eps)
    if len(given) != len(group["tokens"]):
        raise GroupError(f"advantages: {len(given)} entries, tokens has {len(group['tokens'])}")
    result = []
    for i, (value, tokens) in enumerate(zip(given, group["tokens"], strict=True)):
        # May-2025 environments send one number per trajectory.
        row = [float(value)] * len(tokens) if isinstance(value, (int, float)) else list(value)
        if len(row) != len(tokens):
            raise GroupError(f"advantages[{i}]: {len(row)} entries, tokens[{i}] has {len(tokens)}")
        silent = bool(_override(group, i).get("set_advantage_to_zero"))
        result.append([0.0] * len(tokens) if silent else row)
    return result


def _override(group: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    overrides = group.get("overrides") or []
    return (overrides[i] or {}) if i < len(overrides) else {}


def _temperature(group: Mapping[str, Any], i: int) -> float:
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

"""What a group must satisfy beyond the wire before it is trained on: values, counts, types.

`scored_data.check_group` says that the rows line up and leaves the optional fields loose, because
the service passes them through. Here they are about to steer a gradient, so each is either right
or refused naming its path. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, MAX_SCORE
from example_trainer.losses.distillation import PADDED_TEACHER_ID

__all__ = ["check_numbers", "check_switches", "check_teacher_ids", "check_tokens", "drop_unfilled"]

_OPTIONAL = tuple(field.name for field in GROUP_FIELDS if not field.required)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def drop_unfilled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with None for each optional field that holds nothing at all.

    An empty list, or a list of nothing but nulls and empty lists, is how some environments say that
    they did not fill a field.
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

    Args:
        group: Lines up.
        vocabulary: Ids the model has; None: unknown.

    Raises:
        GroupError: names the first entry that is neither.
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
    """Check the shapes of `overrides`, `group_overrides`, `generation_params`, `finish_reasons`.

    Raises:
        GroupError: names the path.
    """
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
    """Check that all values of one row are numbers that a float of 32 bits holds, too.

    Raises:
        GroupError: names the first that is not.
    """
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
    """Check that the choices at one position are token ids or padding.

    Raises:
        GroupError: one is below the padding id, or beyond the model's vocabulary.
    """
    if len(ids) and vocabulary is not None and max(ids) >= vocabulary:
        raise GroupError(
            f"{path}: id {max(ids)}, the model's vocabulary has {vocabulary} entries; teacher and "
            "student must use one tokenizer"
        )
    if len(ids) and min(ids) < PADDED_TEACHER_ID:
        raise GroupError(
            f"{path}: {min(ids)} is neither a token id nor {PADDED_TEACHER_ID}, which pads"
        )

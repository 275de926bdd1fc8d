"""The shape of a group, and the numbers in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.admission import check_signal, wrong_number
from atroposlib.errors import GroupError
from atroposlib.wire import encode_group

__all__ = ["non_finite_path", "shape_problem", "wrong_score"]

NUMBER_FIELDS = ("scores", "advantages", "inference_logprobs", "ref_logprobs")


def shape_problem(group: Any, *, group_size: int) -> str | None:
    """Return what the service or the base class would refuse a group for, or None.

    Numbers that are not finite are left to `non_finite_path`, scores that are none to
    `wrong_score`.
    """
    if isinstance(group, Mapping):
        scores = [0.0] * len(group["scores"]) if wrong_score(group) else group.get("scores")
        group = {key: _finite(value) for key, value in {**group, "scores": scores}.items()}
    admission = check_signal(group, group_size=group_size, scores_must_differ=False)
    if not admission.is_accepted:
        return f"a group would be dropped as {admission.reason}: {admission.detail}"
    try:
        encode_group(group)
    except (GroupError, TypeError, ValueError) as error:
        return f"a group cannot be sent: {error}"
    return None


def wrong_score(group: Any) -> str | None:
    """Return which score of a group is no number, or None."""
    scores = group.get("scores") if isinstance(group, Mapping) else None
    return wrong_number("scores", scores) if isinstance(scores, list | tuple) else None


def non_finite_path(group: Mapping[str, Any]) -> str | None:
    """Return where the first number that is not finite stands, or None."""
    for name in NUMBER_FIELDS:
        path = _non_finite(group.get(name), name)
        if path:
            return path
    return None


def _non_finite(value: Any, path: str) -> str | None:
    if isinstance(value, list | tuple):
        paths = (_non_finite(entry, f"{path}[{i}]") for i, entry in enumerate(value))
        return next((found for found in paths if found), None)
    if isinstance(value, int | float) and not math.isfinite(value):
        return f"{path} is {value}"
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value

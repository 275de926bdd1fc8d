"""Negotiation of lanes: which one a body is in, which one a client wants to read; pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from atroposlib.wire.vocabulary import Lane

__all__ = ["BODY_TYPES", "MEDIA_TYPES", "AcceptedLane", "lane_of", "lane_of_accept"]

MEDIA_TYPES: Mapping[Lane, str] = MappingProxyType(
    {"json": "application/json", "msgpack": "application/msgpack"}
)
"""The media type of each lane, for `Content-Type` and `Accept`."""

_LANES: Mapping[str, Lane] = {
    "application/json": "json",
    "text/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}
BODY_TYPES = frozenset(_LANES)
"""Every name of a lane in `Content-Type`."""


class AcceptedLane(NamedTuple):
    """The lane a client reads, and whether it also reads compressed groups in it."""

    lane: Lane
    accepts_zstd: bool


def lane_of(content_type: str | None) -> Lane | None:
    """Return the lane of a body; a body without a type is JSON, an unknown type None."""
    name, _ = _parts(content_type or "")
    return _LANES.get(name or "application/json")


def lane_of_accept(accept: str | None, default: Lane = "json") -> AcceptedLane:
    """Choose the lane to answer in.

    Args:
        accept: the `Accept` header; `application/msgpack;zstd=1` also takes compressed groups.
        default: the lane of a client that names none, or takes anything.

    Returns:
        The named lane with the highest weight, the first one named among equals; a lane named
        with weight 0 is never chosen unless nothing else is left.
    """
    best: AcceptedLane | None = None
    best_weight = 0.0
    for entry in (accept or "").split(","):
        name, parameters = _parts(entry)
        lane = _LANES.get(name) or (default if name in ("*/*", "application/*") else None)
        weight = _weight(parameters.get("q", "1"))
        if lane is not None and weight > best_weight:
            best, best_weight = AcceptedLane(lane, parameters.get("zstd") == "1"), weight
    if best is None:
        return AcceptedLane(default, False)
    return best if best.lane == "msgpack" else AcceptedLane(best.lane, False)


def _parts(entry: str) -> tuple[str, dict[str, str]]:
    name, *parameters = (part.strip().lower() for part in entry.split(";"))
    pairs = (parameter.partition("=") for parameter in parameters)
    return name, {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0

"""A group as a source gives it, and the four fields of it that an export reads; pure.

JSON is decoded by msgspec, four fields only; text that msgspec refuses although Python's reader
takes it (a lone surrogate that a model wrote) goes the slow way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from atroposlib.errors import GroupError
from atroposlib.wire import Lane

__all__ = ["ExportGroup", "RawGroup", "export_group", "full_group", "lane_of_payload"]

_MAX_UNPACKED_BYTES = 2**31


class RawGroup(NamedTuple):
    """One group, not decoded yet."""

    where: str
    """Where it was found, for messages: `line 12`, `group 7`."""
    lane: Lane
    content: bytes


class ExportGroup(msgspec.Struct, gc=False):
    """What an export reads of a group; other fields are ignored."""

    tokens: list[list[int]]
    """[G][L] prompt and completion ids."""
    scores: list[float]
    """[G] one number per trajectory."""
    masks: list[list[int]] | None = None
    """[G][L] -100, or the id where it is trained on; None when the group has none."""
    messages: list[Any] | None = None
    """[G] one chat per trajectory; None when the environment gave none."""
    tokenized_from_text: bool | None = None
    """Whether the tokens were made from the text of a server that reports none."""


_decoder = msgspec.json.Decoder(ExportGroup)


def lane_of_payload(content: bytes) -> Lane:
    """Tell in which lane a stored group is written: JSON objects begin with a brace."""
    return "json" if content[:1] == b"{" else "msgpack"


def export_group(raw: RawGroup) -> ExportGroup:
    """Decode what an export needs of a group.

    Raises:
        GroupError: it is not a group; the message says what is wrong, never what the text holds.
    """
    if raw.lane == "json":
        try:
            group = _decoder.decode(raw.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            group = _converted(_plain_json(raw.content))
    else:
        group = _converted(_unpacked(raw.content))
    _check(group)
    return group


def full_group(raw: RawGroup) -> dict[str, Any]:
    """Decode a group with every field it has; raises like `export_group`."""
    if raw.lane != "json":
        return _unpacked(raw.content)
    value = _plain_json(raw.content)
    if not isinstance(value, dict):
        raise GroupError(f"expected an object with tokens and scores, not {_kind(value)}")
    _check(_converted(value))
    return value


def _plain_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GroupError(f"not JSON: {_without_content(error)}") from error


def _converted(value: Any) -> ExportGroup:
    try:
        return msgspec.convert(value, ExportGroup)
    except (msgspec.ValidationError, RecursionError) as error:
        raise GroupError(str(error).replace("`", "")) from error


def _unpacked(content: bytes) -> dict[str, Any]:
    from atroposlib.wire.conversion import read_blob
    from atroposlib.wire.zstd_frames import plain_blob

    group: dict[str, Any] = read_blob(
        plain_blob(content, max_bytes=_MAX_UNPACKED_BYTES), as_arrays=False
    )
    return group


def _check(group: ExportGroup) -> None:
    num_sequences = len(group.tokens)
    if num_sequences == 0:
        raise GroupError("tokens: empty; a group needs at least one trajectory")
    rows: tuple[tuple[str, Sequence[Any] | None], ...] = (
        ("scores", group.scores),
        ("masks", group.masks),
        ("messages", group.messages),
    )
    for name, column in rows:
        # An empty list in an optional field is how some environments say that it was not filled.
        if column and len(column) != num_sequences:
            raise GroupError(f"{name}: {len(column)} entries, tokens has {num_sequences}")
    if len(group.scores) != num_sequences:
        raise GroupError(f"scores: {len(group.scores)} entries, tokens has {num_sequences}")
    for i, (mask, ids) in enumerate(zip(group.masks or (), group.tokens, strict=False)):
        if len(mask) != len(ids):
            raise GroupError(f"masks[{i}]: {len(mask)} entries, tokens[{i}] has {len(ids)}")
    if any(score != score or score in (float("inf"), -float("inf")) for score in group.scores):
        raise GroupError("scores: a score is not a finite number")


def _without_content(error: Exception) -> str:
    """Say where text stopped being JSON, without repeating the text."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return type(error).__name__


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")

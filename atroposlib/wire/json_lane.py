"""Codec of groups in JSON, fast and exact; pure.

    body ── find_fields ──► where each value lies ── rows ──► checked ── splice ──► payload

The columns are found by their brackets (`walk`), and by a real parser where that is not
enough. Then every row is decoded on its own, checked, and forgotten: no call lasts long, and memory
holds the body, the payload and one row. What is written as it should be is spliced into the payload
untouched. Anything wrong is named by one path through the parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import GenericAlias
from typing import Any

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, GroupField, check_group
from atroposlib.utils.json_text import to_plain
from atroposlib.wire.checks import Lengths, check_layout, is_loose
from atroposlib.wire.row_text import write_row
from atroposlib.wire.rows import (
    ROW_FIELDS,
    JsonText,
    decode_value,
    read_integer,
    read_opaque,
    read_rows,
    read_scores,
)
from atroposlib.wire.vocabulary import (
    BODY_NOT_TEXT,
    DecodedGroup,
    Path,
    WireError,
    from_group_error,
)
from atroposlib.wire.walk import RowTexts, walk_group

__all__ = [
    "NULL",
    "decode_json_group",
    "decode_json_groups",
    "encode_json_group",
    "find_fields",
    "splice",
    "write_field",
]

NULL = b"null"

_NEXT_KEY = re.compile(rb'[ \t\r\n]*"')
_NO_MORE = re.compile(rb"[ \t\r\n]*\Z")
_LIST_OPENING = re.compile(rb"[ \t\r\n]*\[")
_NEXT_GROUP = re.compile(rb"[ \t\r\n]*,")
_LIST_CLOSING = re.compile(rb"[ \t\r\n]*\][ \t\r\n]*\Z")
_NAMES = (*(field.name for field in GROUP_FIELDS), "policy_version")
_NOTES = {field.name for field in GROUP_FIELDS if field.is_note} | {"policy_version"}


def _parsed_field(field: GroupField, *, is_rest: bool) -> Any:
    is_required = field.required and not is_rest
    wire_type: Any = msgspec.Raw
    if field.name in ROW_FIELDS:
        wire_type = list[msgspec.Raw] if is_required else list[msgspec.Raw] | None
    return (field.name, wire_type) if is_required else (field.name, wire_type, msgspec.UNSET)


def _parsed_type(name: str, *, is_rest: bool) -> Any:
    fields = [_parsed_field(field, is_rest=is_rest) for field in GROUP_FIELDS]
    version = ("policy_version", msgspec.Raw, msgspec.UNSET)
    return msgspec.defstruct(name, [*fields, version], kw_only=True, gc=False)


_Group = _parsed_type("Group", is_rest=False)
_group_decoder = msgspec.json.Decoder(_Group)
_groups_decoder = msgspec.json.Decoder(GenericAlias(list, _Group))
_rest_decoder = msgspec.json.Decoder(_parsed_type("Rest", is_rest=True))


def decode_json_group(body: bytes) -> DecodedGroup:
    """Read and check one group; raises `WireError`."""
    _require_text(body)
    try:
        return _read_group(find_fields(body))
    except GroupError:
        return _read_at(_parse_fields(body), ())


def decode_json_groups(body: bytes) -> list[DecodedGroup]:
    """Read and check an array of groups; one malformed group refuses the whole array."""
    _require_text(body)
    groups = _walk_groups(body)
    if groups is None:
        parsed = decode_value(_groups_decoder, body, ())
        groups = [_read_at(_present(group), (i,)) for i, group in enumerate(parsed)]
    return groups


def encode_json_group(group: Mapping[str, Any]) -> bytes:
    """Write one group in canonical form; raises `GroupError` naming the field at fault."""
    check_group(group)
    names = [name for name in _NAMES if name not in _NOTES or group.get(name) is not None]
    return b"{%b}" % b",".join(
        b'"%b":%b' % (name.encode(), write_field(name, group.get(name))) for name in names
    )


def write_field(name: str, value: Any) -> bytes:
    """Write one value as JSON.

    Raises:
        GroupError: it holds something JSON cannot express; the message names the field.
    """
    try:
        if name in ROW_FIELDS and isinstance(value, list):
            return b"[%b]" % b",".join(write_row(row, _encode) for row in value)
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise GroupError(f"{name}: cannot be sent: {error}") from error


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_encodable)


def find_fields(body: bytes) -> dict[str, Any]:
    """Find the fields of a group, and the rows of its columns, without reading them.

    Returns:
        What is there, by name: `RowTexts` or a list of texts for fields with rows, None for those
        that are null, the text of others.

    Raises:
        WireError: the body is not JSON, or not an object with the required fields.
    """
    walk = walk_group(body)
    if walk is None or not (_NO_MORE if walk.is_complete else _NEXT_KEY).match(body, walk.end):
        return _parse_fields(body)
    if walk.is_complete:
        return walk.fields
    try:
        rest = _present(_rest_decoder.decode(b"{" + body[walk.end :]))
    except (msgspec.DecodeError, RecursionError):
        return _parse_fields(body)
    # Of a key that comes twice the first value would not be looked at.
    return walk.fields | rest if walk.fields.keys().isdisjoint(rest) else _parse_fields(body)


def _walk_groups(body: bytes) -> list[DecodedGroup] | None:
    """Read an array whose groups can all be walked to their ends, else return None."""
    groups: list[DecodedGroup] = []
    position = _LIST_OPENING.match(body)
    while position is not None:
        walk = walk_group(body, position.end())
        if walk is None or not walk.is_complete:
            return None
        try:
            groups.append(_read_group(walk.fields))
        except GroupError:
            return None
        position = _NEXT_GROUP.match(body, walk.end)
        if position is None and _LIST_CLOSING.match(body, walk.end):
            return groups
    return None


def _require_text(body: bytes) -> None:
    try:
        # Parsers skip over opaque fields without looking at their encoding.
        if not body.isascii():
            body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(BODY_NOT_TEXT, kind="not_text") from error


def _parse_fields(body: bytes) -> dict[str, Any]:
    return _present(decode_value(_group_decoder, body, ()))


def _present(group: Any) -> dict[str, Any]:
    found = ((name, getattr(group, name)) for name in _NAMES)
    return {name: value for name, value in found if value is not msgspec.UNSET}


def _read_at(fields: Mapping[str, Any], path: Path) -> DecodedGroup:
    try:
        return _read_group(fields)
    except WireError as error:
        raise error.inside(path) from error
    except GroupError as error:
        raise from_group_error(error).inside(path) from error


def _read_group(fields: Mapping[str, Any]) -> DecodedGroup:
    texts: dict[str, JsonText] = {}
    lengths: dict[str, Lengths] = {}
    for field in GROUP_FIELDS:
        name, found = field.name, fields.get(field.name)
        if name in ROW_FIELDS and found is not None:
            texts[name], lengths[name] = _read_column(name, found)
        elif field.dtype == "json" and name != "env_id":
            texts[name] = NULL if found is None else found
            entries = read_opaque(name, texts[name])
            if entries is not None:
                lengths[name] = [None] * entries
    env_id = read_integer("env_id", fields.get("env_id") or NULL)
    texts["env_id"] = msgspec.json.encode(env_id)
    scores = read_scores(fields.get("scores") or NULL)
    texts["scores"] = scores.text
    check_layout(lengths, scores.values)
    return DecodedGroup(
        payload=splice(texts),
        lane="json",
        num_sequences=len(scores.values),
        num_tokens=sum(length or 0 for length in lengths["tokens"]),
        env_id=env_id,
        min_score=min(scores.values),
        max_score=max(scores.values),
        policy_version=read_integer("policy_version", fields.get("policy_version") or NULL),
        is_loose=is_loose(lengths),
        is_from_text=bytes(texts.get("tokenized_from_text", NULL)) == b"true",
    )


def _read_column(name: str, found: RowTexts | list[msgspec.Raw]) -> tuple[JsonText, Lengths]:
    rows = found.rows if isinstance(found, RowTexts) else found
    texts: list[JsonText] = []
    lengths: list[int | None] = []
    is_untouched = True
    for row in read_rows(name, rows):
        texts.append(row.text)
        lengths.append(len(row.values) if isinstance(row.values, list) else None)
        is_untouched &= row.is_untouched
    if is_untouched and isinstance(found, RowTexts):
        return found.whole, lengths
    return b"[%b]" % b",".join(texts), lengths


def splice(texts: Mapping[str, JsonText]) -> bytes:
    """Put a payload together from the canonical text of the fields that are there."""
    pieces: list[JsonText] = []
    for field in GROUP_FIELDS:
        text = texts.get(field.name, NULL)
        if not field.is_note or text != NULL:
            pieces += (b',"%b":' % field.name.encode(), text)
    pieces[0] = b'{"%b":' % GROUP_FIELDS[0].name.encode()
    return b"".join([*pieces, b"}"])


def _encodable(value: Any) -> Any:
    """Turn what environments commonly leave in a group into something JSON knows."""
    from pydantic import BaseModel

    return value.model_dump() if isinstance(value, BaseModel) else to_plain(value)

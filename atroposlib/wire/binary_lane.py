"""Reads and checks groups of the binary lane; `docs/wire.md` defines the bytes; pure.

    blob = map {format, field: {dtype, data, lengths?, counts?}, opaque field: JSON text, env_id}
           or the zstd frame of such a map

Checking a blob reads sizes and looks for numbers that are not finite; nothing is copied. A blob
that is right is stored as it came; one with keys that nobody knows is written again without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire.checks import Lengths, check_layout, is_loose
from atroposlib.wire.columns import TEXT, Column, Numbers, check_column, unpack
from atroposlib.wire.rows import (
    INT64,
    ROW_FIELDS,
    decode_value,
    read_opaque,
    read_rows,
)
from atroposlib.wire.vocabulary import (
    BODY_NOT_TEXT,
    DecodedGroup,
    WireError,
    from_group_error,
    from_validation,
)
from atroposlib.wire.zstd_frames import plain_blob

__all__ = [
    "FORMAT",
    "NUMERIC_FIELDS",
    "OPAQUE_FIELDS",
    "decode_binary_group",
    "decode_binary_groups",
    "opaque_text",
    "open_group",
    "texts_decoder",
    "unpack_fields",
    "write_map",
]

FORMAT = 1
"""Version of the format of a group."""

NUMERIC_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.name in ROW_FIELDS or f.name == "scores")
OPAQUE_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.dtype == "json" and f.name != "env_id")
_KEYS = ("format", *(field.name for field in GROUP_FIELDS), "policy_version")
_Checked = TypeVar("_Checked")
texts_decoder = msgspec.json.Decoder(list[msgspec.Raw])
"""Reads the entries of an array as JSON text."""


def _blob_type(name: str, *, is_strict: bool) -> Any:
    column: Any = Column
    if is_strict:
        column = msgspec.defstruct(
            "StrictColumn", [], bases=(Column,), forbid_unknown_fields=True, gc=False
        )
    fields: list[Any] = [("format", int)]
    for field in GROUP_FIELDS:
        if field.required:
            fields.append((field.name, column))
        else:
            value = column if field.name in NUMERIC_FIELDS else memoryview
            fields.append((field.name, (INT64 if field.name == "env_id" else value) | None, None))
    fields.append(("policy_version", INT64 | None, None))
    return msgspec.defstruct(
        name,
        fields,
        kw_only=True,
        gc=False,
        forbid_unknown_fields=is_strict,
    )


_blob_decoder = msgspec.msgpack.Decoder(_blob_type("Blob", is_strict=False))
_strict_decoder = msgspec.msgpack.Decoder(_blob_type("StrictBlob", is_strict=True))


def decode_binary_group(body: bytes, *, max_bytes: int) -> DecodedGroup:
    """Read and check one group.

    Args:
        body: a group, or its zstd frame.
        max_bytes: limit on what a compressed group may unfold to.

    Raises:
        WireError: the body is not a well-formed group.
    """
    return _decode_plain(body, plain_blob(body, max_bytes=max_bytes))


def decode_binary_groups(blobs: Sequence[memoryview], *, max_bytes: int) -> list[DecodedGroup]:
    """Read and check the groups of a list; one malformed group refuses all.

    Args:
        blobs: groups, or their zstd frames.
        max_bytes: limit on what the compressed ones may unfold to together.

    Raises:
        WireError: its path starts with the position of the group.
    """
    groups: list[DecodedGroup] = []
    for i, blob in enumerate(blobs):
        try:
            content = plain_blob(blob, max_bytes=max_bytes)
            max_bytes -= len(content) if content is not blob else 0
            groups.append(_decode_plain(blob, content))
        except WireError as error:
            raise error.inside((i,)) from error
    return groups


def _decode_plain(body: bytes | memoryview, content: bytes | memoryview) -> DecodedGroup:
    group, has_unknown_keys = _open(content)
    lengths, scores = _check(_check_fields, group)
    return DecodedGroup(
        payload=write_map(msgspec.structs.asdict(group)) if has_unknown_keys else bytes(body),
        lane="msgpack",
        num_sequences=len(scores),
        num_tokens=sum(length or 0 for length in lengths["tokens"]),
        env_id=group.env_id,
        min_score=min(scores),
        max_score=max(scores),
        policy_version=group.policy_version,
        is_loose=is_loose(lengths),
        is_from_text=opaque_text(group, "tokenized_from_text") == b"true",
    )


def open_group(blob: bytes | memoryview) -> Any:
    """Return the fields of a group, its columns checked, opaque fields as they are.

    Raises:
        WireError: the blob is not a group, or a column is not what its field holds.
    """
    group, _ = _open(blob)
    _check(_check_columns, group)
    return group


def _open(blob: bytes | memoryview) -> tuple[Any, bool]:
    has_unknown_keys = False
    try:
        try:
            group = _strict_decoder.decode(blob)
        except msgspec.ValidationError:
            group = _blob_decoder.decode(blob)
            has_unknown_keys = True
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"MessagePack decode error: {error}", kind="msgpack_invalid") from error
    if group.format != FORMAT:
        raise WireError(
            f"format: {group.format} is not known here, only {FORMAT}",
            kind="value_error",
            path=("format",),
        )
    return group, has_unknown_keys


def _check(check: Callable[[Any], _Checked], group: Any) -> _Checked:
    try:
        return check(group)
    except WireError:
        raise
    except GroupError as error:
        raise from_group_error(error) from error


def _check_fields(group: Any) -> tuple[dict[str, Lengths], list[float]]:
    lengths = _check_columns(group)
    for name in OPAQUE_FIELDS:
        entries = _check_opaque(name, getattr(group, name))
        if entries is not None:
            lengths[name] = [None] * entries
    scores: list[float] = unpack("scores", group.scores, None).flat.tolist()
    check_layout(lengths, scores)
    return lengths, scores


def _check_columns(group: Any) -> dict[str, Lengths]:
    tokens = check_column("tokens", group.tokens, None)
    assert tokens is not None  # tokens have rows
    lengths: dict[str, Lengths] = {"tokens": tokens}
    for name in NUMERIC_FIELDS[1:]:
        column = getattr(group, name)
        if column is None:
            continue
        if name == "advantages" and column.dtype == TEXT:
            lengths[name] = _lengths_of_text(name, column.data)
            continue
        of_rows = check_column(name, column, tokens)
        if of_rows is not None:
            lengths[name] = of_rows
    return lengths


def _check_opaque(name: str, data: memoryview | None) -> int | None:
    if data is None:
        return None
    _require_text(name, data)
    return read_opaque(name, data)


def _require_text(name: str, data: memoryview) -> None:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(BODY_NOT_TEXT, kind="not_text", path=(name,)) from error


def _lengths_of_text(name: str, text: memoryview) -> Lengths:
    _require_text(name, text)
    texts = decode_value(texts_decoder, text, (name,))
    values = (row.values for row in read_rows(name, texts))
    return [len(row) if isinstance(row, list) else None for row in values]


def write_map(values: Mapping[str, Any]) -> bytes:
    """Write the map of a group from columns, JSON texts and integers by name; None is left out."""
    present = ((name, values.get(name)) for name in _KEYS)
    return msgspec.msgpack.encode({name: value for name, value in present if value is not None})


def unpack_fields(group: Any) -> dict[str, Numbers]:
    """Return the numbers of an opened and checked group, by field; text columns are left out."""
    found: dict[str, Numbers] = {}
    for name in NUMERIC_FIELDS:
        column = getattr(group, name)
        if column is not None and column.dtype != TEXT:
            found[name] = unpack(name, column, found.get("tokens"))
    return found


def opaque_text(group: Any, name: str) -> bytes | None:
    """Return the canonical JSON text of a field of an opened group that is kept as text."""
    value = getattr(group, name)
    if isinstance(value, Column):
        texts = decode_value(texts_decoder, value.data, (name,))
        return b"[%b]" % b",".join(row.text for row in read_rows(name, texts))
    return None if value is None else bytes(value)

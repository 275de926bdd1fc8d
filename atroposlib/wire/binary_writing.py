"""Writes a group in the binary lane; `binary_lane` reads what is written here; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atroposlib.scored_data import check_group
from atroposlib.wire.binary_lane import (
    FORMAT,
    NUMERIC_FIELDS,
    OPAQUE_FIELDS,
    texts_decoder,
    write_map,
)
from atroposlib.wire.columns import TEXT, Column, Numbers
from atroposlib.wire.json_lane import write_field
from atroposlib.wire.packing import gather, gather_rows, pack
from atroposlib.wire.rows import decode_value, read_integer, read_scores

__all__ = ["encode_binary_group", "write_group"]


def encode_binary_group(group: Mapping[str, Any]) -> bytes:
    """Write one group; raises `GroupError` naming the field at fault."""
    check_group(group)
    fields: dict[str, Any] = {}
    for name in NUMERIC_FIELDS:
        if group.get(name) is not None:
            fields[name] = gather(name, group[name]) or _gather_laxly(name, group[name])
    for name in OPAQUE_FIELDS:
        if group.get(name) is not None:
            fields[name] = write_field(name, group[name])
    for name in ("env_id", "policy_version"):
        if group.get(name) is not None:
            fields[name] = read_integer(name, write_field(name, group[name]))
    return write_group(fields)


def _gather_laxly(name: str, value: Any) -> Numbers | bytes:
    """Read a field the way the JSON lane does, for numbers written as text and the like."""
    text = write_field(name, value)
    if name == "scores":
        found = gather(name, read_scores(text).values)
    else:
        found = gather_rows(name, decode_value(texts_decoder, text, (name,)))
    return text if found is None else found


def write_group(fields: Mapping[str, Any]) -> bytes:
    """Write a group.

    Args:
        fields: by name, of what is there: `Numbers`, JSON text of opaque fields and of
            `advantages` with lone numbers, integers.
    """
    tokens = fields["tokens"]
    written: dict[str, Any] = {"format": FORMAT}
    for name, value in fields.items():
        if isinstance(value, Numbers):
            written[name] = pack(name, value, tokens)
        elif name == "advantages":
            written[name] = Column(TEXT, memoryview(value))
        else:
            written[name] = value
    return write_map(written)

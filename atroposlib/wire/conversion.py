"""Conversion of stored groups between the lanes, and to what a trainer reads; pure.

Only what goes to a client of the other lane is converted, row by row. Values are the same on both
sides: floats are written so that the same float64 is read back, opaque fields keep their bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire.binary_lane import opaque_text, open_group, unpack_fields
from atroposlib.wire.binary_writing import write_group
from atroposlib.wire.columns import Numbers, split_rows
from atroposlib.wire.json_lane import find_fields, splice
from atroposlib.wire.packing import gather, gather_rows
from atroposlib.wire.row_text import write_row
from atroposlib.wire.rows import ROW_FIELDS, JsonText, decode_value, read_integer, read_scores
from atroposlib.wire.walk import RowTexts

__all__ = ["binary_of_json", "json_of_binary", "read_blob"]

_any_decoder = msgspec.json.Decoder()


def binary_of_json(payload: bytes) -> bytes:
    """Write a canonical JSON payload as a binary group."""
    fields: dict[str, Any] = {}
    for name, found in find_fields(payload).items():
        if found is None or found == b"null":
            continue
        if name in ROW_FIELDS:
            rows = found.rows if isinstance(found, RowTexts) else found
            numbers = gather_rows(name, rows)
            fields[name] = b"[%b]" % b",".join(rows) if numbers is None else numbers
        elif name == "scores":
            fields[name] = gather(name, read_scores(found).values)
        elif name in ("env_id", "policy_version"):
            fields[name] = read_integer(name, found)
        else:
            fields[name] = bytes(found)
    return write_group(fields)


def json_of_binary(blob: bytes | memoryview) -> bytes:
    """Write an uncompressed binary group as a canonical JSON payload."""
    group = open_group(blob)
    texts: dict[str, JsonText] = {
        name: _text(numbers) for name, numbers in unpack_fields(group).items()
    }
    for field in GROUP_FIELDS:
        if field.name == "env_id":
            texts["env_id"] = msgspec.json.encode(group.env_id)
        elif field.name not in texts:
            texts[field.name] = opaque_text(group, field.name) or b"null"
    return splice(texts)


def read_blob(blob: bytes | memoryview, *, as_arrays: bool) -> dict[str, Any]:
    """Read an uncompressed binary group.

    Args:
        blob: the group.
        as_arrays: give rows of numbers as arrays, views on `blob` where possible, not as lists.

    Returns:
        The fourteen fields, None where absent; notes and `policy_version` where the group has them.

    Raises:
        WireError: the blob is not a group.
    """
    group = open_group(blob)
    numbers = unpack_fields(group)
    values: dict[str, Any] = {}
    for field in GROUP_FIELDS:
        if field.name == "env_id":
            values["env_id"] = group.env_id
        elif field.name in numbers:
            values[field.name] = _values(numbers[field.name], as_arrays=as_arrays)
        else:
            text = opaque_text(group, field.name)
            if text is None and field.is_note:
                continue
            values[field.name] = decode_value(_any_decoder, text or b"null", (field.name,))
    if group.policy_version is not None:
        values["policy_version"] = group.policy_version
    return values


def _values(numbers: Numbers, *, as_arrays: bool) -> Any:
    if numbers.lengths is None:
        return numbers.flat if as_arrays else numbers.flat.tolist()
    found = list(split_rows(numbers))
    if as_arrays:
        return found
    return [
        row.tolist() if isinstance(row, np.ndarray) else [position.tolist() for position in row]
        for row in found
    ]


def _text(numbers: Numbers) -> bytes:
    if numbers.lengths is None:
        return msgspec.json.encode(numbers.flat.tolist())
    return b"[%b]" % b",".join(_row_text(row) for row in split_rows(numbers))


def _row_text(row: NDArray[Any] | list[NDArray[Any]]) -> bytes:
    if isinstance(row, list):
        return b"[%b]" % b",".join(msgspec.json.encode(position.tolist()) for position in row)
    return write_row(row, lambda part: msgspec.json.encode(part.tolist()))

"""Decoding a stored payload of either lane for the viewer; pure."""

from __future__ import annotations

from typing import Any

from atroposlib.errors import GroupError
from atroposlib.utils.json_text import decode_line
from atroposlib.wire import StoredPayload, convert_payload

__all__ = ["decode_payload"]


def decode_payload(content: bytes) -> dict[str, Any]:
    """Return the fields of a group as it is stored or sent.

    Raises:
        GroupError: the bytes are no group.
    """
    if content[:1] != b"{":
        content = bytes(convert_payload(StoredPayload("msgpack", content), "json"))
    try:
        fields = decode_line(content)
    except ValueError as error:
        raise GroupError(f"not a group: {error}") from error
    if not isinstance(fields, dict):
        raise GroupError("not a group: expected an object")
    return fields

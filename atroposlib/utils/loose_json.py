"""Reading a line of JSON Lines: fast where it is strict JSON, patiently where it is not."""

from __future__ import annotations

import json
from typing import Any

import msgspec

__all__ = ["decode_line"]

_decoder = msgspec.json.Decoder()


def decode_line(line: bytes) -> Any:
    """Return the value of one line.

    What Python's own writer makes of odd values is read as well: NaN, infinities, halves of
    surrogate pairs. Bytes that are no UTF-8 become replacement characters.

    Raises:
        ValueError: the line is not JSON; the message says where it stops being that.
        RecursionError: it is nested too deeply.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(line.decode("utf-8", errors="replace"))

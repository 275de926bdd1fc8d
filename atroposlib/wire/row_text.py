"""Writes one row of numbers as JSON, a long one in several calls; pure.

Other threads get their turn in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["write_row"]

_CALL_NUMBERS = 16 * 1024


def write_row(row: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Return `encode(row)`.

    Args:
        row: [L] or [L][K], a list or an array; anything else is encoded at once.
        encode: writes a row or a part of it, in brackets.
    """
    if row is None or isinstance(row, str | dict | float | int) or len(row) == 0:
        return encode(row)
    per_entry = len(row[0]) if isinstance(row[0], list) else 1
    step = max(1, _CALL_NUMBERS // max(1, per_entry))
    if len(row) <= step:
        return encode(row)
    parts = (encode(row[start : start + step])[1:-1] for start in range(0, len(row), step))
    return b"[%b]" % b",".join(parts)

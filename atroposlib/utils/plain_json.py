"""JSON text of values that may hold NumPy numbers and arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

__all__ = ["encode_mapping", "to_plain"]

_CALL_VALUES = 4096
"""Longer lists are written in several calls, so that other threads get their turn in between."""


def to_plain(value: Any) -> Any:
    """Turn a NumPy scalar or array into plain Python; refuse anything else.

    Suits `json.dumps(..., default=to_plain)`. NumPy is not imported for it: a value can only be
    NumPy's when somebody imported NumPy before.

    Raises:
        TypeError: the value is not NumPy's; the message names its type.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def encode_mapping(
    mapping: Mapping[str, Any], *, default: Callable[[Any], Any] = to_plain, allow_nan: bool = False
) -> str:
    """Return one line of JSON, naming the key at fault when that is impossible.

    Args:
        mapping: plain containers, numbers and text, with NumPy values anywhere in them.
        default: converts what JSON does not know.
        allow_nan: write NaN and infinities, which strict readers refuse.

    Raises:
        ValueError: a value cannot be written; the message begins with its top-level key.
    """
    dumps = partial(json.dumps, default=default, allow_nan=allow_nan)
    try:
        if not all(isinstance(key, str) for key in mapping):
            return dumps(dict(mapping))
        entries = (f"{dumps(key)}: {_in_pieces(value, dumps)}" for key, value in mapping.items())
        return "{" + ", ".join(entries) + "}"
    except (TypeError, ValueError) as error:
        for key, value in mapping.items():
            try:
                dumps({key: value})
            except (TypeError, ValueError) as cause:
                raise ValueError(f"{key}: {cause}") from error
        raise


def _in_pieces(value: Any, dumps: Callable[[Any], str]) -> str:
    """Return `dumps(value)`, called for the rows of a list of rows and for pieces of long ones."""
    if type(value) is not list or not value:
        return dumps(value)
    if type(value[0]) is list:
        return "[" + ", ".join(_in_pieces(row, dumps) for row in value) + "]"
    pieces = (value[i : i + _CALL_VALUES] for i in range(0, len(value), _CALL_VALUES))
    return "[" + ", ".join(dumps(piece)[1:-1] for piece in pieces) + "]"

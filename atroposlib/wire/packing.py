"""Gathers the numbers of a field and packs them into a column of the binary lane; pure.

    lists, arrays or JSON rows ── gather ──► Numbers(flat array, lengths) ── pack ──► Column

A column gets the smallest type that loses nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, GroupField
from atroposlib.wire.columns import BITS, Column, Numbers, require_finite
from atroposlib.wire.rows import JsonText, read_rows

__all__ = ["gather", "gather_rows", "pack"]

_FIELDS: Mapping[str, GroupField] = {field.name: field for field in GROUP_FIELDS}
_SMALLEST = (("u1", 0, 2**8), ("u2", 0, 2**16), ("i4", -(2**31), 2**31))


def gather(name: str, value: Any) -> Numbers | None:
    """Collect the numbers of a field from lists or arrays.

    Returns:
        The numbers; None when something in it is not plainly a number of the field's kind.
    """
    field = _FIELDS[name]
    kinds, code = ("iu", "q") if field.dtype == "int" else ("fiu", "d")
    try:
        if field.shape == "G":
            return Numbers(_flat(value, kinds, code), None)
        if field.shape == "GL":
            parts = [_flat(row, kinds, code) for row in value]
            return Numbers(_joined(parts, code), list(map(len, parts)))
        counts = [list(map(len, row)) for row in value]
        parts = [_flat(_chained(row), kinds, code) for row in value]
    except (TypeError, ValueError, OverflowError):
        return None
    sizes = np.fromiter(chain.from_iterable(counts), dtype="<u4")
    return Numbers(_joined(parts, code), list(map(len, counts)), sizes)


def _chained(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return row.ravel()
    return [number for position in row for number in position]


def _flat(row: Any, kinds: str, code: str) -> NDArray[Any]:
    if isinstance(row, np.ndarray):
        if row.ndim != 1 or row.dtype.kind not in kinds or row.dtype == np.uint64:
            raise TypeError("not an array of numbers of this kind")
        return row
    if not isinstance(row, list | tuple):
        raise TypeError("not a row")
    return np.frombuffer(array(code, row), dtype=code)


def _joined(parts: Sequence[NDArray[Any]], code: str) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=code)


def gather_rows(name: str, texts: Sequence[JsonText]) -> Numbers | None:
    """Read the rows of a field from JSON, one by one.

    Returns:
        The numbers; None where `advantages` have lone numbers among their rows.

    Raises:
        WireError: a row is not what the field holds.
    """
    parts: list[Numbers] = []
    for row in read_rows(name, texts):
        part = gather(name, [row.values])
        if part is None:
            return None
        parts.append(part)
    if not parts:
        return gather(name, [])
    counts = [part.counts for part in parts if part.counts is not None]
    return Numbers(
        np.concatenate([part.flat for part in parts]),
        [length for part in parts for length in part.lengths or ()],
        np.concatenate(counts) if counts else None,
    )


def pack(name: str, numbers: Numbers, tokens: Numbers) -> Column:
    """Write a field.

    Args:
        name: the field.
        numbers: its content.
        tokens: the tokens of the group, for `masks` and for lengths that are the same.

    Raises:
        GroupError: a number is not finite.
    """
    if _FIELDS[name].dtype == "float":
        require_finite(name, numbers)
    flat, dtype = numbers.flat, BITS
    if name == "masks" and _is_bitmap(numbers, tokens):
        flat = np.packbits(flat != IGNORE_INDEX, bitorder="little")
    else:
        dtype = _smallest(name, flat)
        flat = flat.astype(f"<{dtype}")
    lengths = None
    if numbers.lengths is not None and (name == "tokens" or numbers.lengths != tokens.lengths):
        lengths = _view(np.array(numbers.lengths, dtype="<u4"))
    return Column(dtype, _view(flat), lengths, _packed_counts(numbers.counts))


def _is_bitmap(masks: Numbers, tokens: Numbers) -> bool:
    if masks.lengths != tokens.lengths:
        return False
    return bool(np.all((masks.flat == IGNORE_INDEX) | (masks.flat == tokens.flat)))


def _smallest(name: str, flat: NDArray[Any]) -> str:
    if _FIELDS[name].dtype == "float":
        with np.errstate(over="ignore"):
            return "f4" if np.array_equal(flat.astype("f4").astype("f8"), flat) else "f8"
    lowest, highest = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
    fitting = (dtype for dtype, low, end in _SMALLEST if low <= lowest and highest < end)
    return next(fitting, "i8")


def _packed_counts(counts: NDArray[Any] | None) -> memoryview | int | None:
    if counts is None:
        return None
    if len(counts) and counts[0] and np.all(counts == counts[0]):
        return int(counts[0])
    return _view(counts)


def _view(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")

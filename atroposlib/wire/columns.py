"""Columns of the binary lane: all numbers of one field as a raw little-endian buffer; pure.

Numbers are views on the bytes that came. Sizes are checked before anything is allocated for them,
so a false length costs nothing. `packing` writes what is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, GroupField

__all__ = [
    "BITS",
    "TEXT",
    "Column",
    "Numbers",
    "check_column",
    "require_finite",
    "split_rows",
    "unpack",
]

BITS = "bits"
"""Type of `masks` where every entry is `IGNORE_INDEX` or its token: one bit, set where trained."""
TEXT = "json"
"""Type of `advantages` that are not one row of numbers per trajectory: JSON text."""

_TYPES: Mapping[str, tuple[str, ...]] = {
    "int": ("u1", "u2", "i4", "i8", "u4", "i1", "i2"),
    "float": ("f4", "f8"),
}
_FIELDS: Mapping[str, GroupField] = {field.name: field for field in GROUP_FIELDS}


class Column(msgspec.Struct, omit_defaults=True, gc=False):
    """A field with numbers, as it is written."""

    dtype: str
    data: memoryview
    lengths: memoryview | None = None
    """[G] u4, entries of each row; absent where they are those of `tokens`."""
    counts: memoryview | int | None = None
    """[positions] u4, numbers at each position of a `[G][L][K]` field; an integer for one K."""


class Numbers(NamedTuple):
    """All numbers of a field, and where they belong."""

    flat: NDArray[Any]
    lengths: list[int] | None
    """[G] entries of each row; None for a field with one number per trajectory."""
    counts: NDArray[Any] | None = None
    """[positions] numbers at each position of a `[G][L][K]` field."""


def check_column(name: str, column: Column, tokens: list[int] | None) -> list[int] | None:
    """Check the sizes, the type and the numbers of a field.

    Args:
        name: the field.
        column: as it came; not of type `TEXT`.
        tokens: [G] tokens of each trajectory; None when this is the field that says so.

    Returns:
        [G] entries of each row; None for a field with one number per trajectory.

    Raises:
        GroupError: names the field.
    """
    field = _FIELDS[name]
    types = _TYPES[field.dtype] + ((BITS,) if name == "masks" else ())
    if column.dtype not in types:
        raise GroupError(f"{name}: type {column.dtype!r} is none of {', '.join(types)}")
    if (field.shape == "G" and column.lengths is not None) or (
        field.shape != "GLK" and column.counts is not None
    ):
        raise GroupError(f"{name}: has lengths or counts that a field of its shape has not")
    lengths, total = None, _num_scores(column)
    if field.shape != "G":
        lengths = _lengths_of(name, column, tokens)
        total = sum(lengths)
        if field.shape == "GLK":
            total = _sum_counts(name, column.counts, total)
    needed = _num_bytes(column.dtype, total)
    if len(column.data) != needed:
        raise GroupError(
            f"{name}: {len(column.data)} bytes of data, "
            f"{total} numbers of type {column.dtype} take {needed}"
        )
    if field.dtype == "float":
        require_finite(name, _numbers(column, lengths))
    return lengths


def _num_scores(column: Column) -> int:
    return len(column.data) // int(column.dtype[1]) if column.dtype != BITS else 0


def _num_bytes(dtype: str, total: int) -> int:
    return (total + 7) // 8 if dtype == BITS else total * int(dtype[1])


def _lengths_of(name: str, column: Column, tokens: list[int] | None) -> list[int]:
    if column.lengths is None:
        if tokens is None:
            raise GroupError(f"{name}: has no lengths")
        return tokens
    lengths: list[int] = _unsigned(f"{name}: lengths", column.lengths).tolist()
    return lengths


def _sum_counts(name: str, counts: memoryview | int | None, positions: int) -> int:
    if isinstance(counts, int):
        # Zero would let a few bytes stand for any number of positions.
        if not 1 <= counts < 2**32:
            raise GroupError(f"{name}: counts is {counts}; write one count per position")
        return positions * counts
    if counts is None:
        raise GroupError(f"{name}: has no counts")
    sizes = _unsigned(f"{name}: counts", counts)
    if len(sizes) != positions:
        raise GroupError(f"{name}: {len(sizes)} counts, its rows have {positions} positions")
    return int(sizes.sum(dtype=np.uint64))


def _unsigned(what: str, data: memoryview) -> NDArray[Any]:
    if len(data) % 4:
        raise GroupError(f"{what} take 4 bytes each, {len(data)} bytes came")
    return np.frombuffer(data, dtype="<u4")


def _counts_of(column: Column, total: int) -> NDArray[Any] | None:
    if isinstance(column.counts, int):
        return np.full(total // column.counts, column.counts, dtype="<u4")
    return None if column.counts is None else np.frombuffer(column.counts, dtype="<u4")


def require_finite(name: str, numbers: Numbers) -> None:
    """Refuse numbers that are not finite; raises `GroupError` naming the first."""
    is_finite = np.isfinite(numbers.flat)
    if is_finite.all():
        return
    index = int(np.argmin(is_finite))
    if numbers.lengths is None:
        raise GroupError(f"{name}[{index}]: {numbers.flat[index]} is not a finite number")
    if numbers.counts is not None:
        index = int(np.searchsorted(np.cumsum(numbers.counts), index, side="right"))
    for i, length in enumerate(numbers.lengths):
        if index < length:
            place = f"{name}[{i}][{index}]" if _FIELDS[name].aligned else f"{name}[{i}]"
            raise GroupError(f"{place}: holds a number that is not finite")
        index -= length


def unpack(name: str, column: Column, tokens: Numbers | None) -> Numbers:
    """Read a checked field; numbers are views on the bytes that came, except those of a bitmap.

    Args:
        name: the field.
        column: it passed `check_column`.
        tokens: the tokens of the group; None when this is they.
    """
    if _FIELDS[name].shape == "G":
        return _numbers(column, None)
    lengths = _lengths_of(name, column, tokens.lengths if tokens else None)
    if column.dtype == BITS:
        assert tokens is not None  # only masks are bitmaps
        packed = np.frombuffer(column.data, dtype="u1")
        is_trained = np.unpackbits(packed, count=len(tokens.flat), bitorder="little")
        ids = tokens.flat.astype("<i8")
        return Numbers(np.where(is_trained, ids, IGNORE_INDEX), lengths)
    return _numbers(column, lengths)


def _numbers(column: Column, lengths: list[int] | None) -> Numbers:
    flat = np.frombuffer(column.data, dtype=f"<{column.dtype}")
    return Numbers(flat, lengths, _counts_of(column, len(flat)))


def split_rows(numbers: Numbers) -> Iterator[NDArray[Any] | list[NDArray[Any]]]:
    """Yield the rows of a field: arrays, or one array per position of a `[G][L][K]` field."""
    assert numbers.lengths is not None  # callers know the shape
    if numbers.counts is None:
        yield from _split(numbers.flat, numbers.lengths)
        return
    start = 0
    for counts in _split(numbers.counts, numbers.lengths):
        end = start + int(counts.sum(dtype=np.uint64))
        yield list(_split(numbers.flat[start:end], counts.tolist()))
        start = end


def _split(flat: NDArray[Any], lengths: Iterable[int]) -> Iterator[NDArray[Any]]:
    start = 0
    for end in accumulate(lengths):
        yield flat[start:end]
        start = end

"""Opaque columns: named numbers of a group for which the service has no other use; pure.

    "columns": {"routed_experts": [G] arrays [L, layers, k], "token_weights": [G] arrays [L]}

    arrays or lists ── column_parts ──► bytes of all rows ─► one copy into the blob
    blob ── check_opaque_columns: sizes only, floats finite ──► column_rows ──► views on the blob
    JSON text ── check_column_text ──► kept as it is; column_of_text for a binary client

A column has one row per trajectory and one entry per token; an entry is a number, `[K]` or
`[layers][k]`, of the same shape at every token. In the binary format its numbers are one raw
buffer, never parsed. In JSON the text of the sender is checked and kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from atroposlib.errors import GroupError
from atroposlib.utils.json_text import to_plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

JsonText = bytes | memoryview | msgspec.Raw

MAX_COLUMNS = 32
"""Maximum number of columns of a group."""
MAX_ENTRY_NUMBERS = 2**20
"""Maximum number of numbers at one token."""
COLUMN_TYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
"""Types of numbers in the binary format, as numpy names them, little-endian."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_STEP_NUMBERS = 16 * 1024
"""Numbers that are encoded or decoded in one call, so that other threads can run in between."""
_EXPECTED = "expected an array of finite numbers, or of arrays that all have the same shape"


class OpaqueColumn(msgspec.Struct, gc=False):
    """A column in the binary format; the lengths of its rows are those of `tokens`."""

    dtype: str
    data: memoryview
    shape: tuple[int, ...] = ()
    """Shape of the entry of one token: `()`, `(K,)` or `(layers, k)`."""

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype[1])


class ColumnParts(NamedTuple):
    """A column to be written: its bytes in parts, one after another."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[memoryview]


def check_names(columns: Mapping[str, Any]) -> None:
    """Check the number of columns and their names; raises `GroupError`."""
    if len(columns) > MAX_COLUMNS:
        raise GroupError(f"columns: {len(columns)} columns, expected at most {MAX_COLUMNS}")
    for name in columns:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise GroupError(
                f"columns: the name {name!r:.80} is invalid; expected at most 64 letters, digits "
                "and underscores, not starting with a digit"
            )


def check_opaque_columns(columns: Mapping[str, OpaqueColumn], lengths: Sequence[int]) -> None:
    """Check the columns of a binary group; only floats are read.

    Args:
        columns: by name.
        lengths: [G] tokens of each trajectory.

    Raises:
        GroupError: names the column and what was expected.
    """
    check_names(columns)
    for name, column in columns.items():
        path = f"columns.{name}"
        if column.dtype not in COLUMN_TYPES:
            types = ", ".join(COLUMN_TYPES)
            raise GroupError(f"{path}: type {column.dtype!r:.20} is not one of {types}")
        _check_shape(path, column.shape)
        needed = sum(lengths) * column.entry_bytes
        if len(column.data) != needed:
            raise GroupError(
                f"{path}: {len(column.data)} bytes of data, {sum(lengths)} tokens with entries of "
                f"shape {list(column.shape)} and type {column.dtype} take {needed}"
            )
        for i, row in enumerate(column_rows(column, lengths)):
            _check_finite(f"{path}[{i}]", row)


def _check_shape(path: str, shape: Sequence[int]) -> None:
    if len(shape) > 2:
        raise GroupError(f"{path}: {len(shape) + 2} dimensions, expected at most 4")
    if any(size < 1 for size in shape) or math.prod(shape) > MAX_ENTRY_NUMBERS:
        raise GroupError(
            f"{path}: entries of shape {list(shape)}, expected 1 to {MAX_ENTRY_NUMBERS} numbers"
        )


def _check_finite(path: str, row: NDArray[Any]) -> None:
    import numpy as np

    if row.dtype.kind != "f" or not row.size:
        return
    if row.dtype.itemsize == 2:  # ten times faster than np.isfinite
        is_finite = bool(((row.view("<u2") & 0x7C00) != 0x7C00).all())
    else:
        is_finite = bool(np.isfinite(row).all())
    if not is_finite:
        raise GroupError(f"{path}: holds a number that is not finite")


def column_rows(column: OpaqueColumn, lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Return [G] arrays (L, *shape) of a checked column, read-only views on the received bytes."""
    import numpy as np

    entries = np.frombuffer(column.data, dtype=f"<{column.dtype}").reshape(-1, *column.shape)
    ends = list(accumulate(lengths))
    return [entries[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def column_parts(columns: Any, lengths: Sequence[int]) -> dict[str, ColumnParts]:
    """Prepare the columns of a group for the binary format, without copying arrays.

    Args:
        columns: by name, an array (G, L, ...) or [G] rows, which are arrays or nested lists.
        lengths: [G] tokens of each trajectory.

    Raises:
        GroupError: names the column and what was expected.
    """
    if not isinstance(columns, Mapping):
        raise GroupError("columns: expected an object with one column per name")
    check_names(columns)
    found: dict[str, ColumnParts] = {}
    for name, given in columns.items():
        path = f"columns.{name}"
        _check_count(path, given, lengths)
        rows = list(given)
        arrays = [_array_of(f"{path}[{i}]", row) for i, row in enumerate(rows)]
        keeps_type = all(array is row for array, row in zip(arrays, rows, strict=True))
        found[name] = _parts_of(path, arrays, lengths, keeps_type=keeps_type)
    return found


def _parts_of(
    path: str, arrays: Sequence[NDArray[Any]], lengths: Sequence[int], *, keeps_type: bool
) -> ColumnParts:
    import numpy as np

    filled = [array for array in arrays if array.size]
    shape = filled[0].shape[1:] if filled else ()
    _check_shape(path, shape)
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        _check_length(f"{path}[{i}]", array, i, length)
        if array.size and array.shape[1:] != shape:
            raise GroupError(
                f"{path}[{i}]: entries of shape {list(array.shape[1:])}, others have {list(shape)}"
            )
        _check_finite(f"{path}[{i}]", array)
    if not filled:
        return ColumnParts("u1", (), [])
    dtype = _common_type(path, filled) if keeps_type else _smallest(filled)
    parts = [np.ascontiguousarray(array, dtype=f"<{dtype}") for array in filled]
    return ColumnParts(dtype, shape, [part.data.cast("B") for part in parts])


def _common_type(path: str, arrays: Sequence[NDArray[Any]]) -> str:
    types = sorted({array.dtype.str[1:] for array in arrays})
    if len(types) > 1 or types[0] not in COLUMN_TYPES:
        raise GroupError(
            f"{path}: arrays of type {', '.join(types)}, expected one of {', '.join(COLUMN_TYPES)}"
        )
    return str(types[0])


def _array_of(path: str, row: Any) -> NDArray[Any]:
    import numpy as np

    try:
        array = np.asarray(row)
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{path}: {_EXPECTED}") from error
    if not array.ndim or array.dtype.kind not in "iuf" or array.dtype == np.uint64:
        raise GroupError(f"{path}: {_EXPECTED}")
    return array


def _smallest(arrays: Sequence[NDArray[Any]]) -> str:
    """Return the smallest type that represents all numbers of some lists, as of other fields."""
    import numpy as np

    if any(array.dtype.kind == "f" for array in arrays):
        with np.errstate(over="ignore"):
            is_exact = all(
                np.array_equal(array.astype("f4").astype("f8"), array) for array in arrays
            )
        return "f4" if is_exact else "f8"
    lowest = min(int(array.min()) for array in arrays)
    highest = max(int(array.max()) for array in arrays)
    fitting = (("u1", 0, 2**8), ("u2", 0, 2**16), ("i4", -(2**31), 2**31))
    return next((name for name, low, end in fitting if low <= lowest and highest < end), "i8")


def _check_count(path: str, rows: Any, lengths: Sequence[int]) -> None:
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Sequence):
        import numpy as np

        if not isinstance(rows, np.ndarray) or not rows.ndim:
            raise GroupError(f"{path}: expected one row per trajectory")
    if len(rows) != len(lengths):
        raise GroupError(f"{path}: {len(rows)} entries, tokens has {len(lengths)}")


def _check_length(path: str, row: Any, i: int, length: int) -> None:
    if len(row) != length:
        raise GroupError(f"{path}: {len(row)} entries, tokens[{i}] has {length}")


class _NumberReader(NamedTuple):
    integers: msgspec.json.Decoder[Any]
    floats: msgspec.json.Decoder[Any]
    separator: bytes
    """Separator at which a long row may be cut: at its final comma."""


def _reader(integer_rows: Any, float_rows: Any, separator: bytes) -> _NumberReader:
    decoder = msgspec.json.Decoder
    return _NumberReader(decoder(integer_rows), decoder(float_rows), separator)


_READERS = (
    _reader(list[_INT64], list[float], b","),
    _reader(list[list[_INT64]], list[list[float]], b"],"),
    _reader(list[list[list[_INT64]]], list[list[list[float]]], b"]],"),
)
_OPENING = re.compile(rb"[ \t\r\n]*(?:\[[ \t\r\n]*)*")
_columns_decoder = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])


def check_column_text(text: JsonText, lengths: Sequence[int]) -> bool:
    """Check the columns of a JSON group; return whether there are any.

    Raises:
        GroupError: names the column and what was expected.
    """
    return sum(1 for _ in _rows_of_text(text, lengths)) > 0


def column_parts_of_text(text: JsonText, lengths: Sequence[int]) -> dict[str, ColumnParts]:
    """Prepare the columns of a JSON group for the binary format; raises as `check_column_text`."""
    arrays: dict[str, list[NDArray[Any]]] = {}
    for name, row in _rows_of_text(text, lengths):
        rows = arrays.setdefault(name, [])
        rows.append(_array_of(f"columns.{name}[{len(rows)}]", row))
    return {
        name: _parts_of(f"columns.{name}", rows, lengths, keeps_type=False)
        for name, rows in arrays.items()
    }


def _rows_of_text(text: JsonText, lengths: Sequence[int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield name and numbers of every row, [L] numbers or nested lists, checked one by one."""
    try:
        columns = _columns_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "expected an object with one list of rows per name, without nulls"
        raise GroupError(f"columns: {reason}") from error
    check_names(columns)
    for name, texts in columns.items():
        path = f"columns.{name}"
        _check_count(path, texts, lengths)
        shape: tuple[int, ...] | None = None
        for i, (row_text, length) in enumerate(zip(texts, lengths, strict=True)):
            row = _numbers_of(f"{path}[{i}]", bytes(row_text), length)
            _check_length(f"{path}[{i}]", row, i, length)
            own_shape = _entry_shape(f"{path}[{i}]", row) if row else shape
            if shape is not None and own_shape != shape:
                raise GroupError(
                    f"{path}[{i}]: entries of shape {list(own_shape or ())}, others have "
                    f"{list(shape)}"
                )
            shape = own_shape
            _check_shape(path, shape or ())
            yield name, row
    # Rows have no strings, so a further quote is of a name that occurs twice.
    if sum(1 for _ in re.finditer(b'"', text)) > 2 * len(columns):
        raise GroupError("columns: a name occurs twice")


def _numbers_of(path: str, text: bytes, length: int) -> list[Any]:
    """Return the numbers of a row of `length` tokens; a longer row is not decoded as a whole."""
    opening = _OPENING.match(text)
    depth = opening.group().count(b"[") if opening else 0
    if text.strip() == b"[]":
        return []
    if not 1 <= depth <= len(_READERS):
        raise GroupError(f"{path}: {_EXPECTED}, of at most 4 dimensions with that of the group")
    if text.count(b",") >= max(1, length) * MAX_ENTRY_NUMBERS:
        raise GroupError(
            f"{path}: expected at most {MAX_ENTRY_NUMBERS} numbers at each of {length} tokens"
        )
    reader = _READERS[depth - 1]
    pieces = list(cut_array(text, reader.separator, 8 * _STEP_NUMBERS))
    for decoder in (reader.integers, reader.floats):
        try:
            return _joined(path, map(decoder.decode, pieces), length)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    raise GroupError(f"{path}: {_EXPECTED}")


def _joined(path: str, parts: Iterable[list[Any]], length: int) -> list[Any]:
    row: list[Any] = []
    for part in parts:
        row += part
        if len(row) > length + _STEP_NUMBERS:
            raise GroupError(f"{path}: more than {length} entries, one per token")
    return row


def cut_array(text: bytes, separator: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Cut the text of an array after separators into pieces of about `piece_bytes`.

    The array is valid if and only if every piece is valid and not empty.
    """
    start, opening = 0, b""
    while len(text) - start > piece_bytes:
        found = text.find(separator, start + piece_bytes)
        if found < 0:
            break
        comma = found + len(separator) - 1
        yield b"%b%b]" % (opening, text[start:comma])
        start, opening = comma + 1, b"["
    yield opening + text[start:]


def _entry_shape(path: str, row: list[Any]) -> tuple[int, ...]:
    shape = []
    entries = row
    while isinstance(entries[0], list):
        sizes = set(map(len, entries))
        if len(sizes) > 1 or 0 in sizes:
            raise GroupError(f"{path}: {_EXPECTED}")
        shape.append(sizes.pop())
        entries = list(chain.from_iterable(entries))
    return tuple(shape)


def text_of_columns(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Write columns as JSON; rows are arrays or lists, and long ones are written in steps."""
    encode = partial(msgspec.json.encode, enc_hook=to_plain)
    entries = (
        b"%b:[%b]" % (encode(name), b",".join(_row_text(row, encode) for row in rows))
        for name, rows in columns.items()
    )
    return b"{%b}" % b",".join(entries)


def _row_text(row: Any, encode: Callable[[Any], bytes]) -> bytes:
    try:
        first = encode(row[0])
    except (TypeError, LookupError):  # empty, or not a row, which the check of the text reports
        return encode(row)
    step = max(1, _STEP_NUMBERS // (first.count(b",") + 1))
    pieces = (encode(row[start : start + step])[1:-1] for start in range(0, len(row), step))
    return b"[%b]" % b",".join(pieces)


def plain_columns(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return columns whose arrays are nested lists, for JSON writers."""
    return {
        name: [row if isinstance(row, list) else to_plain(row) for row in rows]
        for name, rows in columns.items()
    }


def written_columns(columns: Mapping[str, ColumnParts]) -> list[bytes | memoryview]:
    """Return the MessagePack map of columns as pieces, with the numbers not copied."""
    pack = msgspec.msgpack.encode
    pieces: list[bytes | memoryview] = [map_header(len(columns))]
    for name, column in columns.items():
        size = sum(map(len, column.parts))
        pieces += (
            pack(name),
            map_header(3),
            *(pack("dtype"), pack(column.dtype)),
            *(pack("shape"), pack(column.shape)),
            *(pack("data"), b"\xc6" + size.to_bytes(4, "big")),
            *column.parts,
        )
    return pieces


def map_header(size: int) -> bytes:
    """Return the header of a MessagePack map with this number of entries."""
    return bytes([0x80 | size]) if size < 16 else b"\xde" + size.to_bytes(2, "big")

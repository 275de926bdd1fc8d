"""Codec of groups in the binary format, and conversion from and to JSON; pure.

    blob = map {format, field: {dtype, data, lengths?, counts?}, opaque field: JSON text, env_id}
           or the zstd frame of such a map

    lists, arrays or JSON rows ── gather ──► Numbers(flat array, lengths) ── pack ──► Column ─► blob
    blob ── open_group: sizes and numbers checked, nothing copied ──► unpack ──► views on the blob

`docs/wire.md` defines the bytes. A column holds all numbers of one field as a raw little-endian
buffer, in the smallest type that loses nothing. Sizes are checked before memory is allocated for
them. A canonical blob is stored unchanged; one with unknown keys is written again without them.

Conversion between the formats works row by row and keeps values exactly: floats are written so that
the same float64 is read, and opaque fields keep their bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, GroupField, check_group
from atroposlib.wire.columns import (
    ColumnParts,
    JsonText,
    OpaqueColumn,
    check_opaque_columns,
    column_parts,
    column_parts_of_text,
    column_rows,
    map_header,
    text_of_columns,
    written_columns,
)
from atroposlib.wire.json_format import (
    BODY_NOT_TEXT,
    INT64,
    ROW_FIELDS,
    DecodedGroup,
    Lengths,
    RowTexts,
    WireError,
    check_layout,
    decode_value,
    encodable,
    find_fields,
    from_group_error,
    from_validation,
    is_loose,
    read_integer,
    read_opaque,
    read_rows,
    read_scores,
    read_traceparent,
    splice,
    write_field,
    write_row,
)

BITS = "bits"
"""Type of `masks` whose entries are `IGNORE_INDEX` or their token: one bit each, set if trained."""
TEXT = "json"
"""Type of `advantages` without rows of numbers: JSON text."""

_TYPES: Mapping[str, tuple[str, ...]] = {
    "int": ("u1", "u2", "i4", "i8", "u4", "i1", "i2"),
    "float": ("f4", "f8"),
}
_FIELDS: Mapping[str, GroupField] = {field.name: field for field in GROUP_FIELDS}


class Column(msgspec.Struct, omit_defaults=True, gc=False):
    """A numeric field, as written."""

    dtype: str
    data: memoryview
    lengths: memoryview | None = None
    """[G] u4, entries of each row; absent if equal to those of `tokens`."""
    counts: memoryview | int | None = None
    """[positions] u4, numbers at each position of a `[G][L][K]` field; an integer for one K."""


class Numbers(NamedTuple):
    """All numbers of a field, and their division into rows."""

    flat: NDArray[Any]
    lengths: list[int] | None
    """[G] entries of each row; None for a field with one number per trajectory."""
    counts: NDArray[Any] | None = None
    """[positions] numbers at each position of a `[G][L][K]` field."""


def check_column(name: str, column: Column, tokens: list[int] | None) -> list[int] | None:
    """Check the sizes, the type and the numbers of a field that is not of type `TEXT`.

    `tokens` are the lengths of the trajectories, [G]; None for the field `tokens` itself.

    Returns:
        [G] entries of each row; None for a field with one number per trajectory.

    Raises:
        GroupError: names the field.
    """
    field = _FIELDS[name]
    types = _TYPES[field.dtype] + ((BITS,) if name == "masks" else ())
    if column.dtype not in types:
        raise GroupError(f"{name}: type {column.dtype!r} is not one of {', '.join(types)}")
    if (field.shape == "G" and column.lengths is not None) or (
        field.shape != "GLK" and column.counts is not None
    ):
        raise GroupError(f"{name}: has lengths or counts, but a field of its shape has none")
    lengths = None
    if field.shape == "G":
        total = len(column.data) // int(column.dtype[1])
    else:
        lengths = _lengths_of(name, column, tokens)
        total = sum(lengths)
        if field.shape == "GLK":
            total = _sum_counts(name, column.counts, total)
    needed = (total + 7) // 8 if column.dtype == BITS else total * int(column.dtype[1])
    if len(column.data) != needed:
        raise GroupError(
            f"{name}: {len(column.data)} bytes of data, "
            f"{total} numbers of type {column.dtype} take {needed}"
        )
    if field.dtype == "float":
        require_finite(name, _numbers(column, lengths))
    return lengths


def _lengths_of(name: str, column: Column, tokens: list[int] | None) -> list[int]:
    if column.lengths is None:
        if tokens is None:
            raise GroupError(f"{name}: has no lengths")
        return tokens
    lengths: list[int] = _unsigned(f"{name}: lengths", column.lengths).tolist()
    return lengths


def _sum_counts(name: str, counts: memoryview | int | None, positions: int) -> int:
    if isinstance(counts, int):
        # With zero, a few bytes could represent any number of positions.
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


def require_finite(name: str, numbers: Numbers) -> None:
    """Reject numbers that are not finite; raise `GroupError` with the index of the first."""
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
    """Read a field that passed `check_column`, as a view on the received bytes if possible.

    `tokens` are those of its group; None for `tokens` itself.
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
    flat, counts = np.frombuffer(column.data, dtype=f"<{column.dtype}"), column.counts
    if isinstance(counts, int):
        return Numbers(flat, lengths, np.full(len(flat) // counts, counts, dtype="<u4"))
    return Numbers(flat, lengths, None if counts is None else np.frombuffer(counts, dtype="<u4"))


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


FORMAT = 1
"""Version of the format of a group."""

NUMERIC_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.name in ROW_FIELDS or f.name == "scores")
OPAQUE_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.dtype == "json" and f.name != "env_id")
_KEYS = ("format", *(field.name for field in GROUP_FIELDS), "policy_version")
_Checked = TypeVar("_Checked")
texts_decoder = msgspec.json.Decoder(list[msgspec.Raw])
"""Reads the entries of an array as JSON text."""


_STRICT: Mapping[str, Any] = {"forbid_unknown_fields": True, "gc": False}


def _blob_type(name: str, *, is_strict: bool) -> Any:
    column: Any = Column
    opaque: Any = OpaqueColumn
    if is_strict:
        column, opaque = (
            msgspec.defstruct("Strict" + base.__name__, [], bases=(base,), **_STRICT)
            for base in (Column, OpaqueColumn)
        )
    fields: list[Any] = [("format", int)]
    for field in GROUP_FIELDS:
        if field.required:
            fields.append((field.name, column))
        else:
            value: Any = column if field.name in NUMERIC_FIELDS else memoryview
            if field.name == "columns":
                value = GenericAlias(dict, (str, opaque))
            fields.append((field.name, (INT64 if field.name == "env_id" else value) | None, None))
    fields.append(("policy_version", INT64 | None, None))
    return msgspec.defstruct(name, fields, kw_only=True, gc=False, forbid_unknown_fields=is_strict)


_blob_decoder = msgspec.msgpack.Decoder(_blob_type("Blob", is_strict=False))
_strict_decoder = msgspec.msgpack.Decoder(_blob_type("StrictBlob", is_strict=True))


def decode_binary_group(body: bytes | memoryview, content: bytes | memoryview) -> DecodedGroup:
    """Read and check one group; `body` is its `content` or the zstd frame of that.

    Raises:
        WireError: the group is malformed.
    """
    group, has_unknown_keys = _open(content)
    traceparent = read_traceparent(group.traceparent)
    is_changed = has_unknown_keys
    if traceparent is None and group.traceparent is not None:
        group.traceparent, is_changed = None, True
    lengths, scores = _check(_check_fields, group)
    return DecodedGroup(
        payload=write_map(msgspec.structs.asdict(group)) if is_changed else bytes(body),
        wire_format="msgpack",
        num_sequences=len(scores),
        num_tokens=sum(length or 0 for length in lengths["tokens"]),
        env_id=group.env_id,
        min_score=min(scores),
        max_score=max(scores),
        policy_version=group.policy_version,
        is_loose=is_loose(lengths),
        is_from_text=(opaque_text(group, "tokenized_from_text") or b"").strip() == b"true",
        traceparent=traceparent,
    )


def open_group(blob: bytes | memoryview) -> Any:
    """Return the fields of a group, with checked columns and unchanged opaque fields.

    Raises:
        WireError: the blob is not a group, or a column does not fit its field.
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
            f"format: {group.format} is unknown, expected {FORMAT}",
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
        data = getattr(group, name)
        if data is None:
            continue
        _require_text(name, data)
        entries = read_opaque(name, data, lengths.get("tokens", []))
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
    if group.columns:
        check_opaque_columns(group.columns, tokens)
    return lengths


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
    """Write the map of a group from columns, JSON texts and integers by name, without None.

    The opaque columns are last, and are copied once.
    """
    present = {name: values[name] for name in _KEYS if values.get(name) is not None}
    columns = present.pop("columns", None)
    content = msgspec.msgpack.encode(present)
    if not columns:
        return content
    parts = {
        name: column
        if isinstance(column, ColumnParts)
        else ColumnParts(column.dtype, column.shape, [column.data])
        for name, column in columns.items()
    }
    others = memoryview(content)[len(map_header(len(present))) :]
    name = msgspec.msgpack.encode("columns")
    return b"".join([map_header(len(present) + 1), others, name, *written_columns(parts)])


def unpack_fields(group: Any) -> dict[str, Numbers]:
    """Return the numbers of an opened and checked group, by field, without text columns."""
    found: dict[str, Numbers] = {}
    for name in NUMERIC_FIELDS:
        column = getattr(group, name)
        if column is not None and column.dtype != TEXT:
            found[name] = unpack(name, column, found.get("tokens"))
    return found


def _column_rows(group: Any) -> dict[str, list[NDArray[Any]]]:
    lengths = _lengths_of("tokens", group.tokens, None)
    return {name: column_rows(column, lengths) for name, column in (group.columns or {}).items()}


def opaque_text(group: Any, name: str) -> bytes | None:
    """Return the canonical JSON text of a text field of an opened group."""
    value = getattr(group, name)
    if isinstance(value, Column):
        texts = decode_value(texts_decoder, value.data, (name,))
        return b"[%b]" % b",".join(row.text for row in read_rows(name, texts))
    return None if value is None else bytes(value)


_SMALLEST = (("u1", 0, 2**8), ("u2", 0, 2**16), ("i4", -(2**31), 2**31))


def gather(name: str, value: Any) -> Numbers | None:
    """Collect the numbers of a field from lists or arrays; None if an entry is of another kind."""
    field = _FIELDS[name]
    kinds, code = ("iu", "q") if field.dtype == "int" else ("fiu", "d")
    try:
        if field.shape == "G":
            return Numbers(_flat(value, kinds, code), None)
        if field.shape == "GL":
            parts = [_flat(row, kinds, code) for row in value]
            return Numbers(_concatenated(parts, code), list(map(len, parts)))
        counts = [list(map(len, row)) for row in value]
        parts = [_flat(_chained(row), kinds, code) for row in value]
    except (TypeError, ValueError, OverflowError):
        return None
    sizes = np.fromiter(chain.from_iterable(counts), dtype="<u4")
    return Numbers(_concatenated(parts, code), list(map(len, counts)), sizes)


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


def _concatenated(parts: Sequence[NDArray[Any]], code: str) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=code)


def gather_rows(name: str, texts: Sequence[JsonText]) -> Numbers | None:
    """Decode the rows of a field from JSON, one by one; raises `WireError`.

    Returns:
        The numbers; None if `advantages` have single numbers in place of rows.
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
    """Write a field of a group with these tokens; GroupError if a number is not finite."""
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


def encode_binary_group(group: Mapping[str, Any]) -> bytes:
    """Write one group; raises `GroupError` with the name of the invalid field."""
    check_group(group)
    fields: dict[str, Any] = {}
    for name in NUMERIC_FIELDS:
        if group.get(name) is not None:
            fields[name] = gather(name, group[name]) or _gather_laxly(name, group[name])
    for name in OPAQUE_FIELDS:
        if group.get(name) is not None:
            fields[name] = _json_text(name, group[name])
    for name in ("env_id", "policy_version"):
        value = group.get(name)
        if type(value) is int and -(2**63) <= value < 2**63:
            fields[name] = value
        elif value is not None:  # such as a numpy integer, or a number written as text
            fields[name] = read_integer(name, write_field(name, value))
    if group.get("columns") is not None:
        fields["columns"] = column_parts(group["columns"], list(map(len, group["tokens"])))
    return write_group(fields)


def _json_text(name: str, value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=encodable)
    except (TypeError, ValueError, RecursionError) as error:
        raise GroupError(f"{name}: cannot be sent: {error}") from error


def _gather_laxly(name: str, value: Any) -> Numbers | bytes:
    """Read a field by the lax rules of JSON, such as numbers written as text."""
    text = write_field(name, value)
    if name == "scores":
        found = gather(name, read_scores(text).values)
    else:
        found = gather_rows(name, decode_value(texts_decoder, text, (name,)))
    return text if found is None else found


def write_group(fields: Mapping[str, Any]) -> bytes:
    """Write a group from its present fields: `Numbers`, integers and JSON texts, by name."""
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
    if "columns" in fields:
        lengths = fields["tokens"].lengths
        fields["columns"] = column_parts_of_text(fields["columns"], lengths)
    return write_group(fields)


def json_of_binary(blob: bytes | memoryview, *, with_columns: bool = True) -> bytes:
    """Write an uncompressed binary group as a canonical JSON payload, maybe without `columns`."""
    group = open_group(blob)
    texts: dict[str, JsonText] = {
        name: _text(numbers) for name, numbers in unpack_fields(group).items()
    }
    for field in GROUP_FIELDS:
        if field.name == "env_id":
            texts["env_id"] = msgspec.json.encode(group.env_id)
        elif field.name == "columns":
            rows = _column_rows(group) if with_columns else None
            texts["columns"] = text_of_columns(rows) if rows else b"null"
        elif field.name not in texts:
            texts[field.name] = opaque_text(group, field.name) or b"null"
    return splice(texts)


def read_blob(blob: bytes | memoryview, *, as_arrays: bool) -> dict[str, Any]:
    """Read an uncompressed binary group; raises `WireError`.

    Args:
        blob: the group.
        as_arrays: Whether rows of numbers are arrays, views on `blob` where possible, not lists.
            The rows of `columns` always are.

    Returns:
        The fourteen fields, None if absent; notes and `policy_version` if the group has them.
    """
    group = open_group(blob)
    numbers = unpack_fields(group)
    values: dict[str, Any] = {}
    for field in GROUP_FIELDS:
        if field.name == "env_id":
            values["env_id"] = group.env_id
        elif field.name in numbers:
            values[field.name] = _values(numbers[field.name], as_arrays=as_arrays)
        elif field.name == "columns":
            columns = _column_rows(group)
            values.update({"columns": columns} if columns else {})
        else:
            text = opaque_text(group, field.name)
            if text is not None:
                values[field.name] = decode_value(_any_decoder, text, (field.name,))
            elif not field.is_note:
                values[field.name] = None
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


_NUMBERS_AT_ONCE = 256 * 1024
_ROWS_AT_ONCE = 4096
"""Rows or positions that are written together: a short one takes less memory as text."""


def _text(numbers: Numbers) -> bytes:
    if numbers.lengths is None:
        return _text_of(numbers.flat)
    return b"[%b]" % _joined(_row_texts(numbers, numbers.lengths))


def _row_texts(numbers: Numbers, lengths: list[int]) -> Iterator[bytes]:
    """Yield the text of each row; of a `[G][L][K]` field, without an array per position."""
    if numbers.counts is None:
        for row in _split(numbers.flat, lengths):
            yield write_row(row, _text_of)
        return
    start = 0
    for counts in _split(numbers.counts, lengths):
        end = start + int(counts.sum(dtype=np.uint64))
        yield b"[%b]" % _joined(_position_texts(numbers.flat[start:end], counts))
        start = end


def _position_texts(flat: NDArray[Any], counts: NDArray[Any]) -> Iterator[bytes]:
    """Yield the text of some thousand positions at a time; of one, if it has many numbers."""
    end = 0
    for first in range(0, len(counts), _ROWS_AT_ONCE):
        sizes = counts[first : first + _ROWS_AT_ONCE].tolist()
        start, end = end, end + sum(sizes)
        if end - start > _NUMBERS_AT_ONCE:
            for position in _split(flat[start:end], sizes):
                yield write_row(position, _text_of)
        else:
            numbers = iter(flat[start:end].tolist())
            yield msgspec.json.encode([list(islice(numbers, size)) for size in sizes])[1:-1]


def _text_of(numbers: NDArray[Any]) -> bytes:
    return msgspec.json.encode(numbers.tolist())


def _joined(texts: Iterator[bytes]) -> bytes:
    """Join texts with commas, a few thousand at a time."""
    parts: list[bytes] = []
    while some := list(islice(texts, _ROWS_AT_ONCE)):
        parts.append(b",".join(some))
    return b",".join(parts)

"""Reads the JSON text of single values of a group: rows of numbers, integers, opaque values; pure.

A row is decoded on its own, and a long one in several calls, so that other threads get their turn
in between. A row written as it should be keeps its text; one that needs lax conversion (numbers
as strings, integral floats for integers, integers for floats) is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, GroupField
from atroposlib.wire.checks import check_opaque
from atroposlib.wire.vocabulary import (
    BODY_NOT_TEXT,
    Path,
    WireError,
    from_group_error,
    from_validation,
)

__all__ = [
    "INT64",
    "ROW_FIELDS",
    "JsonText",
    "ReadRow",
    "decode_value",
    "read_integer",
    "read_opaque",
    "read_rows",
    "read_scores",
]

INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""The integers both lanes carry."""

ROW_FIELDS = frozenset(f.name for f in GROUP_FIELDS if f.shape in ("GL", "GLK"))
"""Fields with one row of numbers per trajectory."""

JsonText = bytes | memoryview | msgspec.Raw

_INDEXED_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.required or f.aligned)
_CALL_BYTES = 192 * 1024
"""Longer rows are decoded in several calls."""


class ReadRow(NamedTuple):
    """One row of a field."""

    text: JsonText
    """In canonical form."""
    values: Any
    """Its numbers; a lone number where a row is written as one."""
    is_untouched: bool
    """Whether `text` is what was given."""


class _RowCodec(NamedTuple):
    strict: msgspec.json.Decoder[Any]
    lax: msgspec.json.Decoder[Any]
    count: Callable[[Any], int]
    """Numbers in a row."""
    is_float: bool
    separator: bytes
    """Where a long row may be cut: at the comma this ends with."""


def _codec(number: Any, *, is_nested: bool = False) -> _RowCodec:
    row_type = list[list[number]] if is_nested else list[number]
    return _RowCodec(
        strict=msgspec.json.Decoder(row_type),
        lax=msgspec.json.Decoder(row_type, strict=False),
        count=_count_nested if is_nested else len,
        is_float=number is float,
        separator=b"]," if is_nested else b",",
    )


def _codec_of(field: GroupField) -> _RowCodec:
    return _codec(INT64 if field.dtype == "int" else float, is_nested=field.shape == "GLK")


def _count_nested(row: list[list[Any]]) -> int:
    return sum(map(len, row))


_CODECS = {f.name: _codec_of(f) for f in GROUP_FIELDS if f.name in ROW_FIELDS}
_scores_codec = _codec(float)
_integer_decoder = msgspec.json.Decoder(INT64 | None, strict=False)
_number_decoder = msgspec.json.Decoder(list[float] | float, strict=False)


def read_rows(name: str, rows: Sequence[JsonText]) -> Iterator[ReadRow]:
    """Decode the rows of a field one by one.

    Args:
        name: the field.
        rows: [G] the text of each row.

    Raises:
        WireError: a row is not what the field holds.
    """
    codec = _CODECS[name]
    for i, row in enumerate(rows):
        text = bytes(row)
        if name == "advantages" and not text.startswith(b"["):
            # One number per trajectory is the older form of `advantages`; stored as given.
            number = decode_value(_number_decoder, text, (name, i))
            _require_finite(number, (name, i))
            yield ReadRow(msgspec.json.encode(number), number, False)
            continue
        values = _decode_strictly(codec, text)
        if values is None:
            values = decode_value(codec.lax, text, (name, i))
            _require_finite(values, (name, i))
            yield ReadRow(msgspec.json.encode(values), values, False)
        elif _is_canonical(codec, text, values):
            yield ReadRow(row, values, True)
        else:
            yield ReadRow(msgspec.json.encode(values), values, False)


def read_scores(text: JsonText) -> ReadRow:
    """Decode the scores; whether they are finite is not checked. Raises `WireError`."""
    content = bytes(text)
    values = _decode_strictly(_scores_codec, content)
    if values is not None and _is_canonical(_scores_codec, content, values):
        return ReadRow(text, values, True)
    if values is None:
        values = decode_value(_scores_codec.lax, content, ("scores",))
    return ReadRow(msgspec.json.encode(values), values, False)


def read_integer(name: str, text: JsonText) -> int | None:
    """Decode `env_id` or `policy_version`; raises `WireError`."""
    value: int | None = decode_value(_integer_decoder, text, (name,))
    return value


def read_opaque(name: str, text: JsonText) -> int | None:
    """Decode an opaque value to check it; its bytes stay as they came.

    Returns:
        How many entries it has when it is a list, else None.

    Raises:
        WireError: it is not JSON, or has not the outer shape of this field.
    """
    try:
        value = None if text == b"null" else msgspec.json.decode(text)
        if value is not None:
            check_opaque(name, value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"{name}: {error}", kind="value_error", path=(name,)) from error
    except GroupError as error:
        raise from_group_error(error) from error
    return len(value) if isinstance(value, list) else None


def decode_value(decoder: msgspec.json.Decoder[Any], text: JsonText, path: Path) -> Any:
    """Decode the value at `path` of the body; raises `WireError` with the path of the fault."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise from_validation(error, path) from error
    except UnicodeDecodeError as error:
        raise WireError(BODY_NOT_TEXT, kind="not_text", path=path) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"JSON decode error: {error}", kind="json_invalid", path=path) from error


def _is_canonical(codec: _RowCodec, text: bytes, values: list[Any]) -> bool:
    # A float is written with a point; the rare `1e-5` is rewritten along with integers.
    return not codec.is_float or text.count(b".") == codec.count(values)


def _decode_strictly(codec: _RowCodec, text: bytes) -> list[Any] | None:
    """Decode a row that is written as it should be, else return None."""
    values: list[Any] = []
    try:
        if len(text) <= _CALL_BYTES:
            values = codec.strict.decode(text)
        else:
            for piece in _cut(text, codec.separator):
                part = codec.strict.decode(piece)
                if not part:  # a comma with nothing behind it
                    return None
                values += part
    except (msgspec.DecodeError, RecursionError):
        return None
    return values


def _cut(text: bytes, separator: bytes) -> Iterator[bytes]:
    """Cut an array at commas: it is well-formed exactly when every piece is, and none is empty."""
    start, opening = 0, b""
    while len(text) - start > _CALL_BYTES:
        found = text.find(separator, start + _CALL_BYTES)
        if found < 0:
            break
        comma = found + len(separator) - 1
        yield b"%b%b]" % (opening, text[start:comma])
        start, opening = comma + 1, b"["
    yield opening + text[start:]


def _require_finite(value: Any, path: Path) -> None:
    """Refuse `"nan"` and `"inf"` strings, which lax conversion lets through."""
    if _is_finite(value):
        return
    if path[0] in _INDEXED_FIELDS:
        path += (next(i for i, number in enumerate(value) if not math.isfinite(number)),)
    place = "".join(f"[{i}]" for i in path[1:])
    message = f"{path[0]}{place}: holds a number that is not finite"
    raise WireError(message, kind="value_error", path=path)


def _is_finite(value: Any) -> bool:
    return all(map(_is_finite, value)) if isinstance(value, list) else math.isfinite(value)

"""Codec of groups in JSON, fast and exact, and the types and checks of both formats; pure.

    body ── find_fields ──► location of each value ── rows ──► checked ── splice ──► payload

`walk_group` finds rows by their brackets: a row of numbers ends at the next `]`, so most bytes of a
group need not be scanned. This is exact once every row has been decoded as an array, since an array
that ends at the first `]` is the whole value. An opaque value ends where the next key starts, which
is tested. The walk stops at the first unexpected construct, and a parser reads the rest.

Rows are then decoded and checked one by one, long ones in several calls so that other threads can
run. Memory holds the body, the payload and one row. A canonical row is spliced into the payload
unchanged; one that needs lax conversion (numbers as strings, integral floats for integers, integers
for floats, true and false for scores) is rewritten. The parser determines the path of every error.

`check_layout` applies `scored_data.check_group` to the lengths of rows, because a codec never holds
all numbers of a group at once. The shape of opaque fields is checked here only: our own senders
cannot write a wrong one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any, Literal, NamedTuple
from unicodedata import category

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, MAX_SCORE, check_group, is_traceparent
from atroposlib.utils.json_text import to_plain
from atroposlib.wire.columns import JsonText, check_column_text, cut_array, text_of_columns

WireFormat = Literal["json", "msgpack"]
"""Format of groups: JSON text, or the binary format of `docs/wire.md`."""

BODY_NOT_TEXT = "There was an error parsing the body"
"""Response of the service, with 400, to a body that is not text."""

Path = tuple[str | int, ...]
"""Keys and indices from the root of a body to one of its values."""


class WireError(GroupError):
    """A body that is not a valid group, with the path of the error.

    Attributes:
        kind: `not_text`, `json_invalid`, `msgpack_invalid`, `missing`, `value_error` or
            `too_large`.
        path: Keys and indices from the root of the body to the invalid value.
    """

    def __init__(self, message: str, *, kind: str, path: Path = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path

    def inside(self, path: Path) -> WireError:
        """Return the same error with a prefix added to its path."""
        return WireError(str(self), kind=self.kind, path=path + self.path)


class DecodedGroup(NamedTuple):
    """A checked group: its canonical bytes, and the attributes that batching uses."""

    payload: bytes
    wire_format: WireFormat
    num_sequences: int
    num_tokens: int
    env_id: int | None
    min_score: float
    max_score: float
    policy_version: int | None
    """Policy version that sampled it; None if the sender did not set one."""
    is_loose: bool
    """Whether the lengths of an optional field differ from those of `tokens`."""
    is_from_text: bool = False
    """Whether its field `tokenized_from_text` is true."""
    traceparent: str | None = None
    """Its field of that name; None if it is missing or malformed, and then it is not stored."""


class StoredPayload(NamedTuple):
    """The canonical bytes of a group, and their format."""

    wire_format: WireFormat
    content: bytes


def from_validation(error: msgspec.ValidationError, path: Path = ()) -> WireError:
    """Convert an error raised while decoding the value at `path` to a `WireError`."""
    text, _, where = str(error).partition(" - at `$")
    path = path + _path_of(where.rstrip("`").lstrip("."))
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        path = (*path, missing.group(1))
        return WireError(f"{_dotted(path)}: field required", kind="missing", path=path)
    prefix = f"{_dotted(path)}: " if path else ""
    return WireError(f"{prefix}{text.replace('`', '')}", kind="value_error", path=path)


def from_group_error(error: GroupError) -> WireError:
    """Convert an error whose message starts with a path to one with that path."""
    message = str(error)
    return WireError(message, kind="value_error", path=_path_of(message))


def _path_of(message: str) -> Path:
    """Read `masks[1][2]: ...` as `("masks", 1, 2)`."""
    head = re.match(r"(?:\[\d+\]|\.?[A-Za-z_]\w*)+", message)
    found = re.findall(r"\[(\d+)\]|([A-Za-z_]\w*)", head.group(0)) if head else []
    return tuple(int(index) if index else name for index, name in found)


def _dotted(path: Iterable[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")


MAX_LABEL_CHARACTERS = 256
"""Maximum length of the name of a reward part, and of a finish reason."""
MAX_REWARD_PARTS = 256
"""Maximum number of parts of one reward."""

MAX_DEPTH = 200
"""Maximum depth of lists and objects in an opaque field; JSON parsers of trainers have limits."""

Lengths = Sequence[int | None]
"""[G] entries of each row; None for one that is not a row of numbers."""

_ALIGNED_FIELDS = tuple(f for f in GROUP_FIELDS if f.aligned)
_LOOSE_FIELDS = tuple(f for f in GROUP_FIELDS if f.per_trajectory and not f.required)


def check_opaque(name: str, value: Any, tokens: Lengths) -> None:
    """Check the outer shape of an opaque field; the message of a `GroupError` has the path.

    `tokens` are the lengths of the trajectories, [G].
    """
    if name == "messages":
        _check_messages(value)
    elif name in ("generation_params", "group_overrides"):
        if not isinstance(value, dict):
            raise GroupError(f"{name}: expected an object or null")
    elif name == "overrides":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of objects or null")
        for i, override in enumerate(value):
            if not isinstance(override, dict):
                raise GroupError(f"{name}[{i}]: expected an object")
    elif name == "reward_parts":
        _check_reward_parts(value)
    elif name == "finish_reasons":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of strings or null")
        for i, reason in enumerate(value):
            if not isinstance(reason, str | None):
                raise GroupError(f"{name}[{i}]: expected a string or null")
            _check_label(f"{name}[{i}]", reason or "")
    elif name == "traces":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of objects or null")
        for i, trace in enumerate(value):
            if not isinstance(trace, dict | None):
                raise GroupError(f"{name}[{i}]: expected an object or null")
    elif name == "token_versions":
        _check_token_versions(value, tokens)
    elif name == "tokenized_from_text" and not isinstance(value, bool):
        raise GroupError(f"{name}: expected true, false or null")


def _check_reward_parts(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("reward_parts: expected a list of objects or null")
    for i, parts in enumerate(value):
        if not isinstance(parts, dict | None):
            raise GroupError(f"reward_parts[{i}]: expected an object or null")
        if parts is not None and len(parts) > MAX_REWARD_PARTS:
            raise GroupError(f"reward_parts[{i}]: {len(parts)} parts, at most {MAX_REWARD_PARTS}")
        for part, number in (parts or {}).items():
            _check_label(f"reward_parts[{i}]: the name {part!r:.60}", part)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise GroupError(f"reward_parts[{i}].{part}: expected a number, got {number!r:.60}")


def _check_token_versions(value: Any, tokens: Lengths) -> None:
    if not isinstance(value, list):
        raise GroupError("token_versions: expected a list of runs or null")
    if len(value) != len(tokens):
        raise GroupError(f"token_versions: {len(value)} entries, tokens has {len(tokens)}")
    for i, (runs, length) in enumerate(zip(value, tokens, strict=True)):
        if runs is None:
            continue
        if not isinstance(runs, list):
            raise GroupError(f"token_versions[{i}]: expected a list of runs or null")
        for j, run in enumerate(runs):
            version, size = run if isinstance(run, list) and len(run) == 2 else (None, None)
            if not _is_count(size) or not (version is None or _is_count(version)):
                raise GroupError(
                    f"token_versions[{i}][{j}]: expected [version or null, number of tokens], got "
                    f"{run!r:.60}"
                )
        total = sum(size for _, size in runs)
        if total != length:
            raise GroupError(
                f"token_versions[{i}]: runs of {total} tokens, tokens[{i}] has {length}"
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_label(path: str, text: str) -> None:
    """Reject labels that are too long or have control characters; they become metric names."""
    if len(text) > MAX_LABEL_CHARACTERS:
        raise GroupError(f"{path}: {len(text)} characters, expected at most {MAX_LABEL_CHARACTERS}")
    if not text.isprintable() and any(category(char) in ("Cc", "Zl", "Zp") for char in text):
        raise GroupError(f"{path}: expected no control characters")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("messages: expected a list with one list of messages per trajectory")
    for i, conversation in enumerate(value):
        # Plain strings are the older form of a conversation; they are stored unchanged.
        if isinstance(conversation, str):
            continue
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}]: expected a list of messages")
        for j, message in enumerate(conversation):
            if isinstance(message, str):
                continue
            if not isinstance(message, dict) or not message.keys() >= {"role", "content"}:
                raise GroupError(
                    f"messages[{i}][{j}]: role and content are required in every message"
                )


def check_layout(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> None:
    """Check counts, lengths and scores with `check_group`; raises its `GroupError`.

    `lengths` are the lengths of the rows of every present field except `scores`.
    """
    if _is_right(lengths, scores):  # ten times faster
        return
    rows: dict[str, Any] = {
        name: [_Row(length or 0) for length in of_field] for name, of_field in lengths.items()
    }
    check_group({**rows, "scores": scores})


def _is_right(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> bool:
    tokens = lengths.get("tokens", ())
    return (
        0 < len(tokens) == len(scores)
        and -MAX_SCORE <= min(scores) <= max(scores) <= MAX_SCORE
        and math.isfinite(sum(scores))
        and all(
            lengths.get(field.name, None if field.required else tokens) == tokens
            for field in _ALIGNED_FIELDS
        )
    )


class _Row:
    """Placeholder for a row of numbers that are already checked."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[float]:
        return iter(())


def is_loose(lengths: Mapping[str, Lengths]) -> bool:
    """Whether an optional field has other counts or lengths than `tokens`; this is accepted."""
    tokens = lengths["tokens"]
    for field in _LOOSE_FIELDS:
        rows = lengths.get(field.name)
        if not rows:
            continue
        if len(rows) != len(tokens):
            return True
        if any(
            length is not None and length != expected
            for length, expected in zip(rows, tokens, strict=True)
        ):
            return True
    return False


_ROW_FIELDS = frozenset(f.name for f in GROUP_FIELDS if f.shape == "GL")
_OPAQUE_FIELDS = {f.name for f in GROUP_FIELDS if f.dtype in ("json", "columns")} - {"env_id"}
_FIELD_NAMES = b"|".join(f.name.encode() for f in GROUP_FIELDS)
_NEXT_FIELD = re.compile(rb',[ \t\r\n]*"(?:%b)"[ \t\r\n]*:' % _FIELD_NAMES)
_OPENING = re.compile(rb"[ \t\r\n]*\{")
_KEY = re.compile(rb'[ \t\r\n]*"([a-z_]+)"[ \t\r\n]*:[ \t\r\n]*')
_NULL = re.compile(rb"null(?=[ \t\r\n,}])")
_INTEGER = re.compile(rb"-?[0-9]+(?=[ \t\r\n,}])")
_AFTER_VALUE = re.compile(rb"[ \t\r\n]*([,}])")
_ROWS_OPENING = re.compile(rb"\[[ \t\r\n]*(?=\[)")
_AFTER_ROW = re.compile(rb"[ \t\r\n]*([,\]])[ \t\r\n]*")


_SEARCH_BYTES = 256 * 1024
"""Bytes per search, so that other threads can run in between."""
_MAX_KEY_BYTES = 64
_MAX_TRIES = 4
"""Attempts to find the next key; if keys inside values resemble it, a parser is faster."""
_BLANKS = b" \t\r\n"
_value_decoder = msgspec.json.Decoder(msgspec.Raw)


class RowTexts(NamedTuple):
    """Location of a field with one row per trajectory; nothing is copied."""

    rows: list[memoryview]
    """[G] the text of each row."""
    whole: memoryview
    """The text of the whole field."""


class Walk(NamedTuple):
    """The result of a walk."""

    fields: dict[str, Any]
    """None for null, the text of single values, a `RowTexts` for fields with rows."""
    end: int
    """Position after the closing brace, or after the comma before the first field not walked."""
    is_complete: bool
    """Whether the closing brace was reached."""


def walk_group(body: bytes, start: int = 0) -> Walk | None:
    """Walk over the group at a position; None if its first field fails or a key occurs twice."""
    opening = _OPENING.match(body, start)
    if opening is None:
        return None
    fields: dict[str, Any] = {}
    position = opening.end()
    while True:
        key = _KEY.match(body, position)
        found = _walk_value(body, key.group(1).decode(), key.end()) if key else None
        after = _AFTER_VALUE.match(body, found[1]) if found else None
        if key is None or found is None or after is None:
            return Walk(fields, position, False) if fields else None
        if key.group(1).decode() in fields:
            return None  # parsers ignore the first value
        fields[key.group(1).decode()] = found[0]
        position = after.end()
        if after.group(1) == b"}":
            return Walk(fields, position, True)


def _walk_value(body: bytes, name: str, start: int) -> tuple[Any, int] | None:
    null = _NULL.match(body, start)
    if null is not None:
        return None, null.end()
    if name in _ROW_FIELDS:
        return _walk_rows(body, start)
    if name == "scores":
        end = body.find(b"]", start) + 1
        return (body[start:end], end) if end and body.startswith(b"[", start) else None
    if name in _OPAQUE_FIELDS:
        return _walk_opaque(body, start)
    integer = _INTEGER.match(body, start) if name in ("env_id", "policy_version") else None
    return (integer.group(), integer.end()) if integer else None


def _walk_opaque(body: bytes, start: int) -> tuple[bytes, int] | None:
    end = start
    for _ in range(_MAX_TRIES):
        end = _find_next_key(body, end + 1)
        if end < 0:
            return None
        text = body[start:end]
        try:
            # A text that is a complete value and is followed by a comma is the whole value.
            _value_decoder.decode(text)
        except (msgspec.DecodeError, RecursionError):
            continue
        return text.rstrip(_BLANKS), end
    return None


def _find_next_key(body: bytes, start: int) -> int:
    while start < len(body):
        found = _NEXT_FIELD.search(body, start, start + _SEARCH_BYTES + _MAX_KEY_BYTES)
        if found is not None:
            return found.start()
        start += _SEARCH_BYTES
    return -1


def _walk_rows(body: bytes, start: int) -> tuple[RowTexts, int] | None:
    opening = _ROWS_OPENING.match(body, start)
    view = memoryview(body)
    rows: list[memoryview] = []
    position = opening.end() if opening else len(body)
    while body.startswith(b"[", position):
        end = body.find(b"]", position) + 1
        rows.append(view[position:end])
        after = _AFTER_ROW.match(body, end) if end else None
        if after is None:
            return None
        if after.group(1) == b"]":
            end = after.start(1) + 1
            return RowTexts(rows, view[start:end]), end
        position = after.end()
    return None


INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Range of integers in both formats."""

ROW_FIELDS = frozenset(f.name for f in GROUP_FIELDS if f.shape in ("GL", "GLK"))
"""Fields with one row of numbers per trajectory."""

_INDEXED_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.required or f.aligned)
_ROW_BYTES = 192 * 1024
"""Rows longer than this are decoded in several calls."""


class ReadRow(NamedTuple):
    """One row of a field."""

    text: JsonText
    """In canonical form."""
    values: Any
    """Its numbers; a single number if it is written in place of a row."""
    is_untouched: bool
    """Whether `text` equals the input."""


class _RowCodec(NamedTuple):
    strict: msgspec.json.Decoder[Any]
    lax: msgspec.json.Decoder[Any]
    count: Callable[[Any], int]
    """Numbers in a row."""
    is_float: bool
    separator: bytes
    """Separator at which a long row may be cut: at its final comma."""


def _codec(number: Any, *, is_nested: bool) -> _RowCodec:
    row_type = list[list[number]] if is_nested else list[number]
    return _RowCodec(
        strict=msgspec.json.Decoder(row_type),
        lax=msgspec.json.Decoder(row_type, strict=False),
        count=(lambda row: sum(map(len, row))) if is_nested else len,
        is_float=number is float,
        separator=b"]," if is_nested else b",",
    )


_CODECS = {
    field.name: _codec(INT64 if field.dtype == "int" else float, is_nested=field.shape == "GLK")
    for field in GROUP_FIELDS
    if field.name in ROW_FIELDS
}
_scores_codec = _codec(float, is_nested=False)
_entries_decoder = msgspec.json.Decoder(list[Any])
_integer_decoder = msgspec.json.Decoder(INT64 | None, strict=False)
_number_decoder = msgspec.json.Decoder(list[float] | float, strict=False)


def read_rows(name: str, rows: Sequence[JsonText]) -> Iterator[ReadRow]:
    """Decode the rows of a field, [G] texts, one by one; raises `WireError`."""
    codec = _CODECS[name]
    for i, row in enumerate(rows):
        text = bytes(row)
        if name == "advantages" and not text.startswith(b"["):
            # One number per trajectory is the older form of `advantages`; stored unchanged.
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
        values = decode_value(_scores_codec.lax, _as_numbers(content), ("scores",))
    return ReadRow(msgspec.json.encode(values), values, False)


def _as_numbers(text: bytes) -> bytes:
    """Return scores with 1 and 0 in place of true and false."""
    try:
        values = _entries_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return msgspec.json.encode([int(v) if isinstance(v, bool) else v for v in values])


def read_integer(name: str, text: JsonText) -> int | None:
    """Decode `env_id` or `policy_version`; raises `WireError`."""
    value: int | None = decode_value(_integer_decoder, text, (name,))
    return value


def read_opaque(name: str, text: JsonText, tokens: Lengths) -> int | None:
    """Check an opaque value; return the number of entries if it is a list, else None.

    `tokens` are the lengths of the trajectories, [G].

    Raises:
        WireError: it is not JSON, does not have the outer shape of the field, or is nested more
            than `MAX_DEPTH` levels.
    """
    try:
        value = None if text == b"null" else msgspec.json.decode(text)
        if value is not None:
            check_opaque(name, value, tokens)
            if len(memoryview(text)) > 2 * MAX_DEPTH:  # else there is no room for such brackets
                _check_depth(name, value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"{name}: {error}", kind="value_error", path=(name,)) from error
    except GroupError as error:
        raise from_group_error(error) from error
    return len(value) if isinstance(value, list) else None


def _check_depth(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if type(each) in (dict, list)]
        if not containers:
            return
        level = list(chain.from_iterable(map(_contents, containers)))
    raise GroupError(f"{name}: nested more than {MAX_DEPTH} levels")


def _contents(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def decode_value(decoder: msgspec.json.Decoder[Any], text: JsonText, path: Path) -> Any:
    """Decode the value at `path` of the body; raises `WireError` with the path of the error."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if not path:  # a decoder stops at a wrong type; malformed text after it is the first error
            decode_value(_value_decoder, text, path)
        raise from_validation(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Before msgspec 0.23, a UnicodeDecodeError.
        if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
            raise WireError(BODY_NOT_TEXT, kind="not_text", path=path) from error
        raise WireError(f"JSON decode error: {error}", kind="json_invalid", path=path) from error


def _is_canonical(codec: _RowCodec, text: bytes, values: list[Any]) -> bool:
    # A canonical float has a point; the rare `1e-5` is rewritten like integers.
    return not codec.is_float or text.count(b".") == codec.count(values)


def _decode_strictly(codec: _RowCodec, text: bytes) -> list[Any] | None:
    """Decode a canonical row; None for another one."""
    values: list[Any] = []
    try:
        if len(text) <= _ROW_BYTES:
            values = codec.strict.decode(text)
        else:
            for piece in cut_array(text, codec.separator, _ROW_BYTES):
                part = codec.strict.decode(piece)
                if not part:  # a trailing comma
                    return None
                values += part
    except (msgspec.DecodeError, RecursionError):
        return None
    return values


def _require_finite(value: Any, path: Path) -> None:
    """Reject the strings `"nan"` and `"inf"`, which lax conversion accepts."""
    if _is_finite(value):
        return
    if path[0] in _INDEXED_FIELDS:
        path += (next(i for i, number in enumerate(value) if not math.isfinite(number)),)
    place = "".join(f"[{i}]" for i in path[1:])
    message = f"{path[0]}{place}: holds a number that is not finite"
    raise WireError(message, kind="value_error", path=path)


def _is_finite(value: Any) -> bool:
    return all(map(_is_finite, value)) if isinstance(value, list) else math.isfinite(value)


_ENCODED_NUMBERS = 16 * 1024


def write_row(row: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Return `encode(row)` for a row [L] or [L][K], encoding long rows in several calls."""
    try:
        length = 0 if isinstance(row, str | dict) else len(row)
    except TypeError:  # a number or null in place of a row, those of NumPy and torch too
        length = 0
    if length == 0:
        return encode(row)
    per_entry = len(row[0]) if isinstance(row[0], list) else 1
    step = max(1, _ENCODED_NUMBERS // max(1, per_entry))
    if length <= step:
        return encode(row)
    parts = (encode(row[start : start + step])[1:-1] for start in range(0, length, step))
    return b"[%b]" % b",".join(parts)


NULL = b"null"

_NEXT_KEY = re.compile(rb'[ \t\r\n]*"')
_NO_MORE = re.compile(rb"[ \t\r\n]*\Z")
_LIST_OPENING = re.compile(rb"[ \t\r\n]*\[")
_NEXT_GROUP = re.compile(rb"[ \t\r\n]*,")
_LIST_CLOSING = re.compile(rb"[ \t\r\n]*\][ \t\r\n]*\Z")
_NAMES = (*(field.name for field in GROUP_FIELDS), "policy_version")
_NOTES = {field.name for field in GROUP_FIELDS if field.is_note} | {"policy_version"}


def _parsed_type(name: str, *, is_rest: bool) -> Any:
    fields: list[Any] = []
    for field in GROUP_FIELDS:
        rows: Any = list[msgspec.Raw] if field.name in ROW_FIELDS else msgspec.Raw
        if field.required and not is_rest:
            fields.append((field.name, rows))
        else:
            optional = rows | None if field.name in ROW_FIELDS else rows
            fields.append((field.name, optional, msgspec.UNSET))
    fields.append(("policy_version", msgspec.Raw, msgspec.UNSET))
    return msgspec.defstruct(name, fields, kw_only=True, gc=False)


_Group = _parsed_type("Group", is_rest=False)
_group_decoder = msgspec.json.Decoder(_Group)
_groups_decoder = msgspec.json.Decoder(GenericAlias(list, _Group))
_rest_decoder = msgspec.json.Decoder(_parsed_type("Rest", is_rest=True))


def decode_json_group(body: bytes) -> DecodedGroup:
    """Read and check one group; raises `WireError`."""
    _require_text(body)
    try:
        return _read_group(find_fields(body))
    except GroupError:
        return _read_at(_parse_fields(body), ())


def decode_json_groups(body: bytes) -> list[DecodedGroup]:
    """Read and check an array of groups; one malformed group rejects the whole array."""
    _require_text(body)
    groups = _walk_groups(body)
    if groups is None:
        parsed = decode_value(_groups_decoder, body, ())
        groups = [_read_at(_present(group), (i,)) for i, group in enumerate(parsed)]
    return groups


def encode_json_group(group: Mapping[str, Any]) -> bytes:
    """Write one group in canonical form; raises `GroupError` with the name of the invalid field."""
    check_group(group)
    texts = {
        name: write_field(name, group.get(name))
        for name in _NAMES
        if name not in _NOTES or group.get(name) is not None
    }
    lengths = list(map(len, group["tokens"]))
    if "columns" in texts and not check_column_text(texts["columns"], lengths):
        del texts["columns"]
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), text) for name, text in texts.items())


def write_field(name: str, value: Any) -> bytes:
    """Write one value as JSON; raises `GroupError` with the name of the field."""
    try:
        if name in ROW_FIELDS and isinstance(value, list):
            return b"[%b]" % b",".join(write_row(row, _encode) for row in value)
        if name == "columns" and isinstance(value, Mapping):
            return text_of_columns(value)
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise GroupError(f"{name}: cannot be sent: {error}") from error


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=encodable)


def find_fields(body: bytes) -> dict[str, Any]:
    """Find the fields of a group and their rows, without decoding them.

    Returns:
        The present fields by name: `RowTexts` or a list of texts for fields with rows, None for
        null, the text of others.

    Raises:
        WireError: the body is not JSON, or not an object with the required fields.
    """
    walk = walk_group(body)
    if walk is None or not (_NO_MORE if walk.is_complete else _NEXT_KEY).match(body, walk.end):
        return _parse_fields(body)
    if walk.is_complete:
        return walk.fields
    try:
        rest = _present(_rest_decoder.decode(b"{" + body[walk.end :]))
    except (msgspec.DecodeError, RecursionError):
        return _parse_fields(body)
    # If a key occurs twice, its first value is not checked.
    return walk.fields | rest if walk.fields.keys().isdisjoint(rest) else _parse_fields(body)


def _walk_groups(body: bytes) -> list[DecodedGroup] | None:
    """Read an array of groups by walking over it; None if a group cannot be walked to its end."""
    groups: list[DecodedGroup] = []
    position = _LIST_OPENING.match(body)
    while position is not None:
        walk = walk_group(body, position.end())
        if walk is None or not walk.is_complete:
            return None
        try:
            groups.append(_read_group(walk.fields))
        except GroupError:
            return None
        position = _NEXT_GROUP.match(body, walk.end)
        if position is None and _LIST_CLOSING.match(body, walk.end):
            return groups
    return None


def _require_text(body: bytes) -> None:
    try:
        # Parsers skip opaque fields without checking their encoding.
        if not body.isascii():
            body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(BODY_NOT_TEXT, kind="not_text") from error


def _parse_fields(body: bytes) -> dict[str, Any]:
    return _present(decode_value(_group_decoder, body, ()))


def _present(group: Any) -> dict[str, Any]:
    found = ((name, getattr(group, name)) for name in _NAMES)
    return {name: _text_of(value) for name, value in found if value is not msgspec.UNSET}


def _text_of(value: Any) -> Any:
    """Return a single value as a view, as a `Raw` never equals other bytes."""
    return memoryview(value) if isinstance(value, msgspec.Raw) else value


def _read_at(fields: Mapping[str, Any], path: Path) -> DecodedGroup:
    try:
        return _read_group(fields)
    except WireError as error:
        raise error.inside(path) from error
    except GroupError as error:
        raise from_group_error(error).inside(path) from error


def _read_group(fields: Mapping[str, Any]) -> DecodedGroup:
    texts: dict[str, JsonText] = {}
    lengths: dict[str, Lengths] = {}
    traceparent: str | None = None
    for field in GROUP_FIELDS:  # tokens are the first
        name, found = field.name, fields.get(field.name)
        if name in ROW_FIELDS and found is not None:
            texts[name], lengths[name] = _read_column(name, found)
        elif name == "traceparent":
            traceparent = read_traceparent(found)
            texts[name] = NULL if traceparent is None else b'"%b"' % traceparent.encode()
        elif field.dtype == "json" and name != "env_id":
            texts[name] = NULL if found is None else found
            entries = read_opaque(name, texts[name], lengths.get("tokens", []))
            if entries is not None:
                lengths[name] = [None] * entries
        elif field.dtype == "columns" and found is not None and found != NULL:
            tokens = lengths.get("tokens", [])  # `check_layout` refuses a group without any
            has_columns = check_column_text(found, [length or 0 for length in tokens])
            texts[name] = found if has_columns else NULL
    env_id = read_integer("env_id", fields.get("env_id") or NULL)
    texts["env_id"] = msgspec.json.encode(env_id)
    scores = read_scores(fields.get("scores") or NULL)
    texts["scores"] = scores.text
    check_layout(lengths, scores.values)
    return DecodedGroup(
        payload=splice(texts),
        wire_format="json",
        num_sequences=len(scores.values),
        num_tokens=sum(length or 0 for length in lengths["tokens"]),
        env_id=env_id,
        min_score=min(scores.values),
        max_score=max(scores.values),
        policy_version=read_integer("policy_version", fields.get("policy_version") or NULL),
        is_loose=is_loose(lengths),
        is_from_text=bytes(texts.get("tokenized_from_text", NULL)) == b"true",
        traceparent=traceparent,
    )


def read_traceparent(text: JsonText | None) -> str | None:
    """Read a `traceparent` from its JSON text; a malformed one does not make a group invalid."""
    value = "" if text is None else bytes(memoryview(text)[:64]).decode("ascii", "replace")
    return value[1:-1] if value[-1:] == '"' and is_traceparent(value[1:-1]) else None


def _read_column(name: str, found: RowTexts | list[msgspec.Raw]) -> tuple[JsonText, Lengths]:
    rows = found.rows if isinstance(found, RowTexts) else found
    texts: list[JsonText] = []
    lengths: list[int | None] = []
    is_untouched = True
    for row in read_rows(name, rows):
        texts.append(row.text)
        lengths.append(len(row.values) if isinstance(row.values, list) else None)
        is_untouched &= row.is_untouched
    if is_untouched and isinstance(found, RowTexts):
        return found.whole, lengths
    return b"[%b]" % b",".join(texts), lengths


def splice(texts: Mapping[str, JsonText]) -> bytes:
    """Assemble a payload from the canonical text of the present fields."""
    pieces: list[JsonText] = []
    for field in GROUP_FIELDS:
        text = texts.get(field.name, NULL)
        if not field.is_note or text != NULL:
            pieces += (b',"%b":' % field.name.encode(), text)
    pieces[0] = b'{"%b":' % GROUP_FIELDS[0].name.encode()
    return b"".join([*pieces, b"}"])


def encodable(value: Any) -> Any:
    """Convert common types of environments, such as pydantic models, to JSON types."""
    from pydantic import BaseModel

    return value.model_dump() if isinstance(value, BaseModel) else to_plain(value)

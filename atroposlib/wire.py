"""Codecs between a scored group and its bytes on the wire; pure functions, JSON lane.

    sender:  group ── encode_group ──► body ──► POST
    service: body ── decode_group(s) ──► DecodedGroup(payload, size, tokens, env_id) ──► store
             payloads ── encode_batch ──► body of GET /batch (spliced, never decoded again)

A *payload* is the canonical form of one group: a JSON object with all fourteen fields of
`scored_data.GROUP_FIELDS`, in table order, absent ones null. Numbers keep every digit: arrays are
decoded to 64-bit values and written in their shortest exact form, opaque fields (`messages`,
`images`, ...) keep the bytes they came with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, GroupField, check_group
from atroposlib.utils.plain_json import to_plain
from atroposlib.wire_checks import check_finite, check_opaque, is_loose

__all__ = [
    "BODY_NOT_TEXT",
    "DecodedGroup",
    "WireError",
    "decode_group",
    "decode_groups",
    "encode_batch",
    "encode_group",
    "encode_groups",
]

BODY_NOT_TEXT = "There was an error parsing the body"
"""What the service answers, with 400, to a body that is not text at all."""

_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_NULL = msgspec.Raw(b"null")
_ARRAY_TYPES: dict[tuple[str, str], Any] = {
    ("int", "GL"): list[list[_INT64]],
    ("float", "G"): list[float],
    ("float", "GL"): list[list[float]],
    ("int", "GLK"): list[list[list[_INT64]]],
    ("float", "GLK"): list[list[list[float]]],
}
_SPECIAL_TYPES: dict[str, Any] = {
    # One number per trajectory is the older form of `advantages`; it is stored as given.
    "advantages": list[list[float] | float],
    "env_id": _INT64,
}


class WireError(GroupError):
    """A body that is not a group; carries where it went wrong.

    Attributes:
        kind: `not_text`, `json_invalid`, `missing` or `value_error`.
        path: Keys and indices from the root of the body to the offending value.
    """

    def __init__(self, message: str, *, kind: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path


class DecodedGroup(NamedTuple):
    """A checked group: its canonical bytes, and the little that batching needs to know."""

    payload: bytes
    num_sequences: int
    num_tokens: int
    env_id: int | None
    is_loose: bool
    """Whether an optional field does not line up with `tokens`: accepted, but worth counting."""


def _struct_field(field: GroupField) -> Any:
    wire_type = _SPECIAL_TYPES.get(field.name) or _ARRAY_TYPES.get((field.dtype, field.shape))
    if wire_type is None:
        return (field.name, msgspec.Raw, _NULL)
    return (field.name, wire_type) if field.required else (field.name, wire_type | None, None)


_WireGroup: Any = msgspec.defstruct(
    "WireGroup", [_struct_field(field) for field in GROUP_FIELDS], kw_only=True, gc=False
)
_OPAQUE_FIELDS = tuple(f.name for f in GROUP_FIELDS if f.dtype == "json" and f.name != "env_id")
_group_decoder = msgspec.json.Decoder(_WireGroup, strict=False)
_groups_decoder = msgspec.json.Decoder(list[_WireGroup], strict=False)


def decode_group(body: bytes) -> DecodedGroup:
    """Read and check one group.

    Args:
        body: a JSON object; unknown keys are ignored. Numeric strings and integral floats are
            taken for integers, integers for floats.

    Returns:
        The group in canonical form.

    Raises:
        WireError: the body is not text, not JSON or not a well-formed group.
    """
    return _canonical(_decode(_group_decoder, body), ())


def decode_groups(body: bytes) -> list[DecodedGroup]:
    """Read and check an array of groups; one malformed group refuses the whole array.

    Raises:
        WireError: as `decode_group`; its path starts with the position of the group.
    """
    return [_canonical(group, (i,)) for i, group in enumerate(_decode(_groups_decoder, body))]


def encode_group(group: Mapping[str, Any]) -> bytes:
    """Write one group in canonical form.

    numpy arrays and scalars, and pydantic models such as chat messages, are converted.

    Raises:
        GroupError: the group is malformed (see `scored_data.check_group`), or a field holds
            something JSON cannot express; the message names the field.
    """
    check_group(group)
    parts = []
    for field in GROUP_FIELDS:
        try:
            value = msgspec.json.encode(group.get(field.name), enc_hook=_encodable)
        except (TypeError, ValueError) as error:
            raise GroupError(f"{field.name}: cannot be sent: {error}") from error
        parts.append(b'"%b":%b' % (field.name.encode(), value))
    return b"{%b}" % b",".join(parts)


def encode_groups(groups: Iterable[Mapping[str, Any]]) -> bytes:
    """Write an array of groups in canonical form; raises like `encode_group`."""
    return b"[%b]" % b",".join([encode_group(group) for group in groups])


def encode_batch(payloads: Sequence[bytes]) -> bytes:
    """Splice the payloads of a batch into the body of `GET /batch` without decoding them."""
    return b'{"batch":[%b]}' % b",".join(payloads)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        # The decoder skips over opaque fields without looking at their encoding.
        if not body.isascii():
            body.decode("utf-8")
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise WireError(BODY_NOT_TEXT, kind="not_text") from error
    except msgspec.ValidationError as error:
        raise _from_validation(error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"JSON decode error: {error}", kind="json_invalid") from error


def _canonical(group: Any, path: tuple[int, ...]) -> DecodedGroup:
    fields = {field.name: getattr(group, field.name) for field in GROUP_FIELDS}
    try:
        fields |= _read_opaque(fields)
        check_group(fields)
        check_finite(fields)
    except WireError as error:
        raise WireError(str(error), kind=error.kind, path=path + error.path) from error
    except GroupError as error:
        message = str(error)
        raise WireError(message, kind="value_error", path=path + _path_of(message)) from error
    return DecodedGroup(
        payload=msgspec.json.encode(group),
        num_sequences=len(group.tokens),
        num_tokens=sum(map(len, group.tokens)),
        env_id=group.env_id,
        is_loose=is_loose(fields),
    )


def _read_opaque(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the opaque fields that are there, to check them; their bytes stay as they came."""
    values: dict[str, Any] = {}
    for name in _OPAQUE_FIELDS:
        raw = fields[name]
        values[name] = None
        if raw is _NULL:
            continue
        try:
            values[name] = value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"{name}: {error}", kind="value_error", path=(name,)) from error
        if value is not None:
            check_opaque(name, value)
    return values


def _from_validation(error: msgspec.ValidationError) -> WireError:
    text, _, where = str(error).partition(" - at `$")
    path = _path_of(where.rstrip("`").lstrip("."))
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        path = (*path, missing.group(1))
        return WireError(f"{_dotted(path)}: field required", kind="missing", path=path)
    prefix = f"{_dotted(path)}: " if path else ""
    return WireError(f"{prefix}{text.replace('`', '')}", kind="value_error", path=path)


def _path_of(message: str) -> tuple[str | int, ...]:
    """Read `masks[1][2]: ...` as `("masks", 1, 2)`."""
    head = re.match(r"(?:\[\d+\]|\.?[A-Za-z_]\w*)+", message)
    found = re.findall(r"\[(\d+)\]|([A-Za-z_]\w*)", head.group(0)) if head else []
    return tuple(int(index) if index else name for index, name in found)


def _dotted(path: Iterable[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")


def _encodable(value: Any) -> Any:
    """Turn what environments commonly leave in a group into something JSON knows."""
    from pydantic import BaseModel

    return value.model_dump() if isinstance(value, BaseModel) else to_plain(value)

"""Entry points of the codecs: groups, lists of groups, the body of `GET /batch`, media types; pure.

    JSON:    [group, ...]        {"batch": [group, ...] | null, other keys}
    binary:  array [bin, ...]    map {"batch": array [bin, ...] | nil, other keys}

In code, `wire_format` is `json`, or `msgpack` for the binary format.

Stored groups are spliced into lists, so writing a list only copies bytes. The binary codec, and
numpy with it, is imported on first use. Its groups may be zstd frames; they are decompressed here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from atroposlib.wire.json_format import (
    DecodedGroup,
    StoredPayload,
    WireError,
    WireFormat,
    decode_json_group,
    decode_json_groups,
    decode_value,
    encode_json_group,
    from_validation,
)

MEDIA_TYPES: Mapping[WireFormat, str] = MappingProxyType(
    {"json": "application/json", "msgpack": "application/msgpack"}
)
"""The media type of each format, for `Content-Type` and `Accept`."""

_FORMATS: Mapping[str, WireFormat] = {
    "application/json": "json",
    "text/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}

BODY_TYPES = frozenset(_FORMATS)
"""Every accepted `Content-Type`."""


class AcceptedFormat(NamedTuple):
    """The format that a client accepts, and whether it accepts compressed groups."""

    wire_format: WireFormat
    accepts_zstd: bool


def format_of_type(content_type: str | None) -> WireFormat | None:
    """Return the format of a body: JSON without a type, None for an unknown type."""
    name, _ = _parts(content_type or "")
    return _FORMATS.get(name or "application/json")


def format_of_accept(accept: str | None) -> AcceptedFormat:
    """Choose the format of the response by an `Accept` header.

    The format with the highest weight is chosen, and the first one among equals. JSON is the
    default. `application/msgpack;zstd=1` also accepts compressed groups.
    """
    best, best_weight = AcceptedFormat("json", False), 0.0
    for entry in (accept or "").split(","):
        name, parameters = _parts(entry)
        wire_format = _FORMATS.get(name) or ("json" if name in ("*/*", "application/*") else None)
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            weight = 0.0
        if wire_format is not None and weight > best_weight:
            accepts_zstd = wire_format == "msgpack" and parameters.get("zstd") == "1"
            best, best_weight = AcceptedFormat(wire_format, accepts_zstd), weight
    return best


def _parts(entry: str) -> tuple[str, dict[str, str]]:
    name, *parameters = (part.strip().lower() for part in entry.split(";"))
    pairs = (parameter.partition("=") for parameter in parameters)
    return name, {key.strip(): value.strip().strip('"') for key, _, value in pairs}


_blobs_decoder = msgspec.msgpack.Decoder(list[memoryview])
_batch_decoder = msgspec.msgpack.Decoder(list[memoryview] | None)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_json_decoder = msgspec.json.Decoder()
_UNLIMITED = 2**63


def is_spliceable(
    payload: StoredPayload, wire_format: WireFormat, *, accepts_zstd: bool = False
) -> bool:
    """Whether a stored group needs no conversion; see `convert_payload`."""
    if payload.wire_format != wire_format:
        return False
    return wire_format == "json" or accepts_zstd or not is_compressed(payload.content)


def convert_payload(
    payload: StoredPayload, wire_format: WireFormat, *, accepts_zstd: bool = False
) -> bytes:
    """Return a stored group in a format; it stays compressed only if `accepts_zstd` is set."""
    if is_spliceable(payload, wire_format, accepts_zstd=accepts_zstd):
        return payload.content
    if payload.wire_format == "json":
        from atroposlib.wire.binary_format import binary_of_json

        return binary_of_json(payload.content)
    blob = plain_blob(payload.content, max_bytes=_UNLIMITED)
    if wire_format == "msgpack":
        return bytes(blob)
    from atroposlib.wire.binary_format import json_of_binary

    return json_of_binary(blob)


def json_without_columns(content: bytes) -> bytes:
    """Return a stored group of the binary format as JSON, without its opaque columns."""
    from atroposlib.wire.binary_format import json_of_binary

    return json_of_binary(plain_blob(content, max_bytes=_UNLIMITED), with_columns=False)


def batch_pieces(
    payloads: Sequence[StoredPayload] | None,
    wire_format: WireFormat = "json",
    *,
    envelope: Mapping[str, Any] | None = None,
    accepts_zstd: bool = False,
) -> list[bytes]:
    """Write the body of `GET /batch` as pieces to be sent one after another.

    Args:
        payloads: groups of the batch; None without a batch.
        wire_format: format of the response.
        envelope: further keys of the response, such as `batch_id`.
        accepts_zstd: Whether compressed groups may stay compressed.
    """
    contents = [
        convert_payload(payload, wire_format, accepts_zstd=accepts_zstd)
        for payload in payloads or ()
    ]
    if wire_format == "json":
        return _json_pieces(None if payloads is None else contents, envelope or {})
    pieces = [_header(1 + len(envelope or {}), 0x80, b"\xdf"), msgspec.msgpack.encode("batch")]
    if payloads is None:
        pieces.append(msgspec.msgpack.encode(None))
    else:
        pieces += _array_of(contents)
    return pieces + [
        msgspec.msgpack.encode(part) for pair in (envelope or {}).items() for part in pair
    ]


def decode_batch(
    body: bytes,
    wire_format: WireFormat = "json",
    *,
    as_arrays: bool = False,
    max_bytes: int = 2**30,
) -> Any:
    """Read the body of `GET /batch`; raises `WireError`.

    In the binary format, `as_arrays` returns rows of numbers as arrays instead of lists, and
    `max_bytes` limits the decompressed size of one group.

    Returns:
        The response; `batch` is a list of groups with all fourteen fields, or None.
    """
    if wire_format == "json":
        return decode_value(_json_decoder, body, ())
    from atroposlib.wire.binary_format import read_blob

    answer = {
        key: _decode(_batch_decoder if key == "batch" else msgspec.msgpack, raw)
        for key, raw in _decode(_map_decoder, body).items()
    }
    if answer.get("batch") is not None:
        answer["batch"] = [
            read_blob(plain_blob(blob, max_bytes=max_bytes), as_arrays=as_arrays)
            for blob in answer["batch"]
        ]
    return answer


def _json_pieces(contents: Sequence[bytes] | None, envelope: Mapping[str, Any]) -> list[bytes]:
    pieces = [b'{"batch":']
    if contents is None:
        pieces.append(b"null")
    else:
        for i, content in enumerate(contents):
            pieces += (b"," if i else b"[", content)
        pieces.append(b"]" if contents else b"[]")
    for key, value in envelope.items():
        pieces.append(b",%b:%b" % (msgspec.json.encode(key), msgspec.json.encode(value)))
    return [*pieces, b"}"]


def _decode(decoder: Any, content: Any) -> Any:
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"MessagePack decode error: {error}", kind="msgpack_invalid") from error


def _array_of(blobs: Sequence[bytes]) -> list[bytes]:
    """Return a MessagePack array of binary values as pieces."""
    pieces = [_header(len(blobs), 0x90, b"\xdd")]
    for blob in blobs:
        pieces += (b"\xc6" + struct.pack(">I", len(blob)), blob)
    return pieces


def _header(count: int, short: int, long: bytes) -> bytes:
    return bytes([short | count]) if count < 16 else long + struct.pack(">I", count)


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL = 3


def is_compressed(blob: bytes | memoryview) -> bool:
    """Whether this is a zstd frame; an uncompressed group never starts like one."""
    return bytes(blob[:4]) == _ZSTD_MAGIC


def compressed_blob(blob: bytes) -> bytes:
    """Return the zstd frame of a group."""
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(blob)


def plain_blob(blob: bytes | memoryview, *, max_bytes: int) -> bytes | memoryview:
    """Return the decompressed group.

    Raises:
        WireError: it is not a complete zstd frame, does not state its size, or is too large.
    """
    if not is_compressed(blob):
        return blob
    import zstandard

    try:
        size = zstandard.frame_content_size(blob)
        if size < 0:
            raise WireError(
                "expected a zstd frame that states its content size", kind="value_error"
            )
        if size > max_bytes:
            text = f"expected a zstd frame of at most {max_bytes} bytes"
            raise WireError(text, kind="too_large")
        return zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"not a zstd frame: {error}", kind="msgpack_invalid") from error


_MAX_BYTES = 2**30


def decode_group(
    body: bytes, wire_format: WireFormat = "json", *, max_bytes: int = _MAX_BYTES
) -> DecodedGroup:
    """Read and check one group; return it in canonical form.

    Args:
        body: in JSON an object: unknown keys are ignored, numeric strings and integral floats are
            read as integers, integers as floats. In the binary format a group, or its zstd frame.
        wire_format: format of the body.
        max_bytes: limit on the decompressed size of a group.

    Raises:
        WireError: the body is not in this format, or the group is malformed.
    """
    if wire_format == "json":
        return decode_json_group(body)
    from atroposlib.wire.binary_format import decode_binary_group

    return decode_binary_group(body, plain_blob(body, max_bytes=max_bytes))


def decode_groups(
    body: bytes, wire_format: WireFormat = "json", *, max_bytes: int = _MAX_BYTES
) -> list[DecodedGroup]:
    """Read and check an array of groups; one malformed group rejects the whole array.

    `max_bytes` limits the total decompressed size. Errors are those of `decode_group`; their path
    starts with the index of the group.
    """
    if wire_format == "json":
        return decode_json_groups(body)
    from atroposlib.wire.binary_format import decode_binary_group

    groups: list[DecodedGroup] = []
    for i, blob in enumerate(_decode(_blobs_decoder, body)):
        try:
            content = plain_blob(blob, max_bytes=max_bytes)
            max_bytes -= len(content) if content is not blob else 0
            groups.append(decode_binary_group(blob, content))
        except WireError as error:
            raise error.inside((i,)) from error
    return groups


def encode_group(
    group: Mapping[str, Any], wire_format: WireFormat = "json", *, zstd: bool = False
) -> bytes:
    """Write one group in canonical form; an integer `policy_version` is included.

    numpy arrays and scalars, and pydantic models such as chat messages, are converted. `zstd`
    compresses the group; it applies to the binary format only.

    Raises:
        GroupError: the group is malformed (see `scored_data.check_group`), or a field has a value
            that cannot be encoded; the message names the field.
    """
    if wire_format == "json":
        return encode_json_group(group)
    from atroposlib.wire.binary_format import encode_binary_group

    blob = encode_binary_group(group)
    return compressed_blob(blob) if zstd else blob


def encode_groups(
    groups: Iterable[Mapping[str, Any]], wire_format: WireFormat = "json", *, zstd: bool = False
) -> bytes:
    """Write a list of groups in canonical form; arguments and errors as for `encode_group`."""
    encoded = [encode_group(group, wire_format, zstd=zstd) for group in groups]
    if wire_format == "json":
        return b"[%b]" % b",".join(encoded)
    return b"".join(_array_of(encoded))

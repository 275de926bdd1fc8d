"""Entry points of the codecs: groups, lists of groups, and the body of `GET /batch`; pure.

    JSON:    [group, ...]        {"batch": [group, ...] | null, other keys}
    binary:  array [bin, ...]    map {"batch": array [bin, ...] | nil, other keys}

Stored groups are spliced into lists, so a list costs no more than copying its bytes. The binary
codec, and numpy with it, is imported on first use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from atroposlib.wire.json_format import (
    decode_json_group,
    decode_json_groups,
    decode_value,
    encode_json_group,
)
from atroposlib.wire.vocabulary import DecodedGroup, Lane, StoredPayload, WireError, from_validation
from atroposlib.wire.zstd_frames import compressed_blob, is_compressed, plain_blob

__all__ = [
    "batch_pieces",
    "convert_payload",
    "decode_batch",
    "decode_group",
    "decode_groups",
    "encode_group",
    "encode_groups",
    "is_spliceable",
    "join_blobs",
    "split_blobs",
]

_blobs_decoder = msgspec.msgpack.Decoder(list[memoryview])
_batch_decoder = msgspec.msgpack.Decoder(list[memoryview] | None)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_json_decoder = msgspec.json.Decoder()
_UNLIMITED = 2**63


def join_blobs(blobs: Sequence[bytes]) -> bytes:
    """Write a list of binary groups."""
    return b"".join([_array_header(len(blobs)), *_with_headers(blobs)])


def split_blobs(body: bytes) -> list[memoryview]:
    """Split a list of binary groups; raises `WireError`."""
    blobs: list[memoryview] = _decode(_blobs_decoder, body)
    return blobs


def is_spliceable(payload: StoredPayload, lane: Lane, *, accepts_zstd: bool = False) -> bool:
    """Whether a stored group needs no conversion; see `convert_payload`."""
    if payload.lane != lane:
        return False
    return lane == "json" or accepts_zstd or not is_compressed(payload.content)


def convert_payload(payload: StoredPayload, lane: Lane, *, accepts_zstd: bool = False) -> bytes:
    """Return a stored group in a format, converted if it is stored in the other one.

    Args:
        payload: a group as returned by `decode_group`.
        lane: the format to write.
        accepts_zstd: Whether a compressed group may stay compressed.
    """
    if is_spliceable(payload, lane, accepts_zstd=accepts_zstd):
        return payload.content
    if payload.lane == "json":
        from atroposlib.wire.binary_format import binary_of_json

        return binary_of_json(payload.content)
    blob = plain_blob(payload.content, max_bytes=_UNLIMITED)
    if lane == "msgpack":
        return bytes(blob)
    from atroposlib.wire.binary_format import json_of_binary

    return json_of_binary(blob)


def batch_pieces(
    payloads: Sequence[StoredPayload] | None,
    lane: Lane = "json",
    *,
    envelope: Mapping[str, Any] | None = None,
    accepts_zstd: bool = False,
) -> list[bytes]:
    """Write the body of `GET /batch` as pieces to be sent one after another.

    Args:
        payloads: the groups of the batch; None without a batch.
        lane: the format of the response.
        envelope: further keys of the response, such as `batch_id`.
        accepts_zstd: Whether compressed groups may stay compressed.
    """
    contents = [
        convert_payload(payload, lane, accepts_zstd=accepts_zstd) for payload in payloads or ()
    ]
    if lane == "json":
        return _json_pieces(None if payloads is None else contents, envelope or {})
    pieces = [_map_header(1 + len(envelope or {})), msgspec.msgpack.encode("batch")]
    if payloads is None:
        pieces.append(msgspec.msgpack.encode(None))
    else:
        pieces += (_array_header(len(contents)), *_with_headers(contents))
    return pieces + [
        msgspec.msgpack.encode(part) for pair in (envelope or {}).items() for part in pair
    ]


def decode_batch(
    body: bytes, lane: Lane = "json", *, as_arrays: bool = False, max_bytes: int = 2**30
) -> Any:
    """Read the body of `GET /batch`.

    Args:
        body: body of the response.
        lane: its format.
        as_arrays: Whether rows of numbers in the binary format are arrays instead of lists.
        max_bytes: limit on the decompressed size of one group.

    Returns:
        The response; `batch` is a list of groups with all fourteen fields, or None.

    Raises:
        WireError: the body is malformed.
    """
    if lane == "json":
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


def _with_headers(blobs: Sequence[bytes]) -> list[bytes]:
    return [part for blob in blobs for part in (_bin_header(len(blob)), blob)]


def _bin_header(size: int) -> bytes:
    return b"\xc6" + struct.pack(">I", size)


def _array_header(count: int) -> bytes:
    return bytes([0x90 | count]) if count < 16 else b"\xdd" + struct.pack(">I", count)


def _map_header(count: int) -> bytes:
    return bytes([0x80 | count]) if count < 16 else b"\xdf" + struct.pack(">I", count)


_MAX_BYTES = 2**30


def decode_group(body: bytes, lane: Lane = "json", *, max_bytes: int = _MAX_BYTES) -> DecodedGroup:
    """Read and check one group.

    Args:
        body: in JSON an object: unknown keys are ignored, numeric strings and integral floats are
            read as integers, integers as floats. In the binary format a group, or its zstd frame.
        lane: the format of the body.
        max_bytes: limit on the decompressed size of a group.

    Returns:
        The group in canonical form.

    Raises:
        WireError: the body is not in this format, or the group is malformed.
    """
    if lane == "json":
        return decode_json_group(body)
    from atroposlib.wire.binary_format import decode_binary_group

    return decode_binary_group(body, max_bytes=max_bytes)


def decode_groups(
    body: bytes, lane: Lane = "json", *, max_bytes: int = _MAX_BYTES
) -> list[DecodedGroup]:
    """Read and check a list of groups; one malformed group rejects the whole list.

    Args:
        body: an array of groups.
        lane: the format of the body.
        max_bytes: limit on the total decompressed size of the groups.

    Raises:
        WireError: as `decode_group`; its path starts with the index of the group.
    """
    if lane == "json":
        return decode_json_groups(body)
    from atroposlib.wire.binary_format import decode_binary_groups

    return decode_binary_groups(split_blobs(body), max_bytes=max_bytes)


def encode_group(group: Mapping[str, Any], lane: Lane = "json", *, zstd: bool = False) -> bytes:
    """Write one group in canonical form.

    numpy arrays and scalars, and pydantic models such as chat messages, are converted.

    Args:
        group: the group; an integer `policy_version` is included.
        lane: the format to write.
        zstd: Whether to compress it; binary format only.

    Raises:
        GroupError: the group is malformed (see `scored_data.check_group`), or a field has a value
            that cannot be encoded; the message names the field.
    """
    if lane == "json":
        return encode_json_group(group)
    from atroposlib.wire.binary_format import encode_binary_group

    blob = encode_binary_group(group)
    return compressed_blob(blob) if zstd else blob


def encode_groups(
    groups: Iterable[Mapping[str, Any]], lane: Lane = "json", *, zstd: bool = False
) -> bytes:
    """Write a list of groups in canonical form; arguments and errors as for `encode_group`."""
    encoded = [encode_group(group, lane, zstd=zstd) for group in groups]
    return b"[%b]" % b",".join(encoded) if lane == "json" else join_blobs(encoded)

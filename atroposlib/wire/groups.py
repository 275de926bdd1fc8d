"""Reads and writes groups in the lane that is asked for; pure.

The binary lane is loaded when it is first used, and numpy with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atroposlib.wire.batches import join_blobs, split_blobs
from atroposlib.wire.json_lane import decode_json_group, decode_json_groups, encode_json_group
from atroposlib.wire.vocabulary import DecodedGroup, Lane
from atroposlib.wire.zstd_frames import compressed_blob

__all__ = ["decode_group", "decode_groups", "encode_group", "encode_groups"]

_MAX_BYTES = 2**30


def decode_group(body: bytes, lane: Lane = "json", *, max_bytes: int = _MAX_BYTES) -> DecodedGroup:
    """Read and check one group.

    Args:
        body: in JSON an object: unknown keys are ignored, numeric strings and integral floats are
            taken for integers, integers for floats. In binary a group, or its zstd frame.
        lane: the lane of the body.
        max_bytes: limit on what a compressed group may unfold to.

    Returns:
        The group in canonical form.

    Raises:
        WireError: the body is not in this lane, or not a well-formed group.
    """
    if lane == "json":
        return decode_json_group(body)
    from atroposlib.wire.binary_lane import decode_binary_group

    return decode_binary_group(body, max_bytes=max_bytes)


def decode_groups(
    body: bytes, lane: Lane = "json", *, max_bytes: int = _MAX_BYTES
) -> list[DecodedGroup]:
    """Read and check a list of groups; one malformed group refuses the whole list.

    Args:
        body: an array of groups.
        lane: the lane of the body.
        max_bytes: limit on what the compressed groups in it may unfold to together.

    Raises:
        WireError: as `decode_group`; its path starts with the position of the group.
    """
    if lane == "json":
        return decode_json_groups(body)
    from atroposlib.wire.binary_lane import decode_binary_groups

    return decode_binary_groups(split_blobs(body), max_bytes=max_bytes)


def encode_group(group: Mapping[str, Any], lane: Lane = "json", *, zstd: bool = False) -> bytes:
    """Write one group in canonical form.

    numpy arrays and scalars, and pydantic models such as chat messages, are converted.

    Args:
        group: the group; an integer under `policy_version` is sent along.
        lane: the lane to write it in.
        zstd: compress it; in the binary lane only.

    Raises:
        GroupError: the group is malformed (see `scored_data.check_group`), or a field holds
            something that cannot be sent; the message names the field.
    """
    if lane == "json":
        return encode_json_group(group)
    from atroposlib.wire.binary_writing import encode_binary_group

    blob = encode_binary_group(group)
    return compressed_blob(blob) if zstd else blob


def encode_groups(
    groups: Iterable[Mapping[str, Any]], lane: Lane = "json", *, zstd: bool = False
) -> bytes:
    """Write a list of groups in canonical form; takes and raises what `encode_group` does."""
    encoded = [encode_group(group, lane, zstd=zstd) for group in groups]
    return b"[%b]" % b",".join(encoded) if lane == "json" else join_blobs(encoded)

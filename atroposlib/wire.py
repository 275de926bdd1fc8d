"""Codecs between a scored group and its bytes on the wire, in JSON and in binary; pure.

    sender:  group ── encode_group ──► body ──► POST
    service: body ── decode_group(s) ──► DecodedGroup(payload, lane, size, ...) ──► store
             StoredPayload(lane, bytes) ── batch_pieces ──► body of GET /batch
    trainer: body ── decode_batch ──► {"batch": [group, ...]}

A *payload* is the canonical form of one group in the lane it came in. In JSON: an object with all
fourteen fields of `scored_data.GROUP_FIELDS`, in table order, absent ones null; numbers keep every
digit, opaque fields (`messages`, `images`, ...) keep the bytes they came with. In binary: the blob
that `docs/wire.md` defines. Payloads of the lane a client asked for are spliced into its batch;
only the others are converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atroposlib.wire_json import decode_json_group, decode_json_groups, encode_json_group
from atroposlib.wire_lanes import MEDIA_TYPES, AcceptedLane, lane_of, lane_of_accept
from atroposlib.wire_types import BODY_NOT_TEXT, DecodedGroup, Lane, StoredPayload, WireError

__all__ = [
    "BODY_NOT_TEXT",
    "MEDIA_TYPES",
    "AcceptedLane",
    "DecodedGroup",
    "Lane",
    "StoredPayload",
    "WireError",
    "decode_group",
    "decode_groups",
    "encode_batch",
    "encode_group",
    "encode_groups",
    "lane_of",
    "lane_of_accept",
]


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
    return decode_json_group(body)


def decode_groups(body: bytes) -> list[DecodedGroup]:
    """Read and check an array of groups; one malformed group refuses the whole array.

    Raises:
        WireError: as `decode_group`; its path starts with the position of the group.
    """
    return decode_json_groups(body)


def encode_group(group: Mapping[str, Any]) -> bytes:
    """Write one group in canonical form.

    numpy arrays and scalars, and pydantic models such as chat messages, are converted.

    Raises:
        GroupError: the group is malformed (see `scored_data.check_group`), or a field holds
            something JSON cannot express; the message names the field.
    """
    return encode_json_group(group)


def encode_groups(groups: Iterable[Mapping[str, Any]]) -> bytes:
    """Write an array of groups in canonical form; raises like `encode_group`."""
    return b"[%b]" % b",".join([encode_group(group) for group in groups])


def encode_batch(payloads: Sequence[bytes]) -> bytes:
    """Splice the payloads of a batch into the body of `GET /batch` without decoding them."""
    return b'{"batch":[%b]}' % b",".join(payloads)

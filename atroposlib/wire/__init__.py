"""Codecs between a scored group and its bytes on the wire, in JSON and in binary; pure.

    sender:  group ── encode_group ──► body ──► POST
    service: body ── decode_group(s) ──► DecodedGroup(payload, lane, size, ...) ──► store
             StoredPayload(lane, bytes) ── batch_pieces ──► body of GET /batch
    trainer: body ── decode_batch ──► {"batch": [group, ...]}

A *payload* is the canonical form of one group in the format in which it was posted (`lane`). In
JSON: an object with the fields of `scored_data.GROUP_FIELDS` in table order, absent ones null,
absent notes left out. Numbers keep every digit, opaque fields (`messages`, `images`, ...) their
bytes. In binary: the blob that `docs/wire.md` defines. Payloads in the format that a client
requested are spliced into its batch; only the others are converted.
"""

from atroposlib.wire.groups import (
    BODY_TYPES,
    MEDIA_TYPES,
    AcceptedLane,
    batch_pieces,
    convert_payload,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
    is_spliceable,
    lane_of,
    lane_of_accept,
)
from atroposlib.wire.json_format import BODY_NOT_TEXT, DecodedGroup, Lane, StoredPayload, WireError

__all__ = [
    "BODY_NOT_TEXT",
    "BODY_TYPES",
    "MEDIA_TYPES",
    "AcceptedLane",
    "DecodedGroup",
    "Lane",
    "StoredPayload",
    "WireError",
    "batch_pieces",
    "convert_payload",
    "decode_batch",
    "decode_group",
    "decode_groups",
    "encode_group",
    "encode_groups",
    "is_spliceable",
    "lane_of",
    "lane_of_accept",
]

"""Codecs between a scored group and its bytes on the wire, in JSON and in binary; pure.

    sender:  group ── encode_group ──► body ──► POST
    service: body ── decode_group(s) ──► DecodedGroup(payload, format, size, ...) ──► store
             StoredPayload(format, bytes) ── batch_pieces ──► body of GET /batch
    trainer: body ── decode_batch ──► {"batch": [group, ...]}

A *payload* is the canonical form of one group in the format in which it was posted, `wire_format`.
In JSON: an object with the fields of `scored_data.GROUP_FIELDS` in table order, absent ones null,
absent notes left out. Numbers keep every digit, opaque fields (`messages`, `images`, ...) their
bytes. In binary: the blob that `docs/wire.md` defines. Payloads in the format that a client
requested are spliced into its batch; only the others are converted.
"""

from atroposlib.wire.groups import (
    BODY_TYPES,
    MEDIA_TYPES,
    AcceptedFormat,
    batch_pieces,
    convert_payload,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
    format_of_accept,
    format_of_type,
    is_spliceable,
    json_without_columns,
)
from atroposlib.wire.json_format import (
    BODY_NOT_TEXT,
    DecodedGroup,
    StoredPayload,
    WireError,
    WireFormat,
)

__all__ = [
    "BODY_NOT_TEXT",
    "BODY_TYPES",
    "MEDIA_TYPES",
    "AcceptedFormat",
    "DecodedGroup",
    "StoredPayload",
    "WireError",
    "WireFormat",
    "batch_pieces",
    "convert_payload",
    "decode_batch",
    "decode_group",
    "decode_groups",
    "encode_group",
    "encode_groups",
    "format_of_accept",
    "format_of_type",
    "is_spliceable",
    "json_without_columns",
]

"""Any group survives both formats and the ways between them; any bytes are answered."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire import (
    StoredPayload,
    WireError,
    WireFormat,
    batch_pieces,
    convert_payload,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
)
from tests.wire.groups import FULL_GROUP, groups

pytestmark = pytest.mark.slow

FORMATS: tuple[WireFormat, ...] = ("json", "msgpack")
BODIES = {
    "json": encode_group(FULL_GROUP),
    "msgpack": encode_group(FULL_GROUP, "msgpack"),
    "zstd": encode_group(FULL_GROUP, "msgpack", zstd=True),
}
fuzz = settings(max_examples=200)


def exact(group: Any) -> str:
    """Write values so that 1 and 1.0, and 0.0 and -0.0, are told apart."""
    return repr([group.get(field.name) for field in GROUP_FIELDS])


@fuzz
@given(group=groups())
def test_any_group_is_the_same_in_both_formats_and_across(group):
    stored = {}
    for wire_format in FORMATS:
        decoded = decode_group(encode_group(group, wire_format), wire_format)
        stored[wire_format] = StoredPayload(wire_format, decoded.payload)
        assert decoded.num_sequences == len(group["tokens"])
        assert decoded.num_tokens == sum(map(len, group["tokens"]))
        assert decoded.env_id == group.get("env_id")
        assert decoded.policy_version == group.get("policy_version")
    as_text = json.loads(stored["json"].content)
    expected = {
        field.name: group.get(field.name)
        for field in GROUP_FIELDS
        if not field.is_note or group.get(field.name) is not None
    }

    assert as_text == expected
    for payload in stored.values():
        for wire_format in FORMATS:
            body = b"".join(batch_pieces([payload], wire_format))
            assert exact(decode_batch(body, wire_format)["batch"][0]) == exact(as_text)


@fuzz
@given(group=groups())
def test_conversion_back_and_forth_gives_the_same_bytes(group):
    text = StoredPayload("json", decode_group(encode_group(group)).payload)
    blob = StoredPayload("msgpack", convert_payload(text, "msgpack"))

    again = convert_payload(blob, "json")

    assert again == text.content
    assert convert_payload(StoredPayload("json", again), "msgpack") == blob.content
    assert decode_group(blob.content, "msgpack").payload == blob.content


@fuzz
@given(body=st.binary(max_size=200), wire_format=st.sampled_from(FORMATS), read=st.sampled_from(
    [decode_group, decode_groups, decode_batch]))  # fmt: skip
def test_any_bytes_are_read_or_refused(body, wire_format, read):
    with contextlib.suppress(WireError):
        read(body, wire_format)


@fuzz
@given(name=st.sampled_from(sorted(BODIES)), data=st.data())
def test_damaged_groups_are_read_or_refused(name, data):
    body = bytearray(BODIES[name])
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[position] ^= 1 << data.draw(st.integers(0, 7))
    damaged = bytes(body[: data.draw(st.integers(len(body) // 2, len(body)))])
    wire_format: WireFormat = "json" if name == "json" else "msgpack"
    other: WireFormat = "msgpack" if name == "json" else "json"

    try:
        decoded = decode_group(damaged, wire_format, max_bytes=100_000)
    except WireError:
        return
    converted = convert_payload(StoredPayload(wire_format, decoded.payload), other)
    assert decode_group(converted, other).num_tokens == decoded.num_tokens


@pytest.mark.parametrize("name", sorted(BODIES))
def test_every_truncation_is_refused(name):
    wire_format: WireFormat = "json" if name == "json" else "msgpack"

    for size in range(len(BODIES[name])):
        with pytest.raises(WireError):
            decode_group(BODIES[name][:size], wire_format)

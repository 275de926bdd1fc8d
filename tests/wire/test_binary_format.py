"""The binary format: what it writes, what it refuses, and what hostile bytes can do to it."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire import (
    StoredPayload,
    WireError,
    batch_pieces,
    convert_payload,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
)
from tests.wire.groups import FULL_GROUP

SMALL = {"tokens": [[1, 2, 3], [4]], "masks": [[-100, 2, 3], [-100]], "scores": [1.0, -0.5]}


def fields_of(group: dict[str, Any]) -> dict[str, Any]:
    return msgspec.msgpack.decode(encode_group(group, "msgpack"))


def changed(**columns: Any) -> bytes:
    """Return a small group, with some keys of its columns or whole fields replaced."""
    fields = fields_of({**SMALL, "inference_logprobs": [[1.0, -0.5, -0.25], [1.0]]})
    for name, change in columns.items():
        is_column = isinstance(change, dict) and name in fields
        fields[name] = {**fields[name], **change} if is_column else change
    return msgspec.msgpack.encode(fields)


def u4(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([0, 255], "u1"),
        ([0, 256], "u2"),
        ([0, 65536], "i4"),
        ([-1, 0], "i4"),
        ([0, 2**31], "i8"),
        ([-(2**63), 2**63 - 1], "i8"),
    ],
)
def test_integers_get_the_smallest_type_that_holds_them(numbers, dtype):
    group = {"tokens": [numbers], "masks": [numbers], "scores": [0.5]}

    assert fields_of(group)["tokens"]["dtype"] == dtype


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([0.5, -0.25], "f4"), ([0.1, 0.0], "f8"), ([1e300, 0.0], "f8"), ([0.0, 1.0], "f4")],
)
def test_floats_are_single_only_when_nothing_is_lost(numbers, dtype):
    group = {"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [0.5], "advantages": [numbers]}

    assert fields_of(group)["advantages"]["dtype"] == dtype


def test_masks_are_bits_only_where_they_follow_the_tokens():
    odd = {**SMALL, "masks": [[-100, 2, 9], [-100]]}

    assert fields_of(SMALL)["masks"] == {"dtype": "bits", "data": b"\x06"}
    assert fields_of(odd)["masks"]["dtype"] == "i4"


def test_numbers_that_are_written_laxly_are_read_as_in_json():
    group = {"tokens": [["1", 2.0]], "masks": [[1, 2]], "scores": [0.5], "env_id": "3"}

    (read,) = read_back(encode_group(group, "msgpack"))

    assert (read["tokens"], read["scores"], read["env_id"]) == ([[1, 2]], [0.5], 3)


def test_arrays_are_encoded_like_lists():
    as_lists = {**SMALL, "distill_token_ids": [[[1, 2]] * 3, [[3, 4]]]}
    as_arrays = {
        "tokens": [np.array([1, 2, 3]), np.array([4], dtype="u2")],
        "masks": [np.array([-100, 2, 3]), np.array([-100])],
        "scores": np.array([1.0, -0.5], dtype="f4"),
        "distill_token_ids": [np.array([[1, 2]] * 3), np.array([[3, 4]])],
    }

    assert encode_group(as_arrays, "msgpack") == encode_group(as_lists, "msgpack")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"masks": [[1], [4]]}, r"masks\[0\]: 1 entries, tokens\[0\] has 3"),
        ({"advantages": [[float("nan")], [1.0]]}, r"advantages\[0\]: holds a number"),
        ({"tokens": [[1, 2.5, 3], [4]]}, r"tokens\[0\]\[1\]: Expected int"),
        ({"tokens": [[1, 2, 2**64], [4]]}, r"tokens\[0\]\[2\]: Expected int <="),
        ({"images": object}, "images: cannot be sent"),
        ({"env_id": "x"}, "env_id: Expected int"),
    ],
)
def test_encode_refuses_what_is_no_group(changes, says):
    with pytest.raises(GroupError, match=says):
        encode_group({**SMALL, **changes}, "msgpack")


@pytest.mark.parametrize("zstd", [False, True])
def test_decode_stores_the_blob_as_it_came(zstd):
    blob = encode_group({**SMALL, "policy_version": 7, "env_id": 2}, "msgpack", zstd=zstd)

    decoded = decode_group(blob, "msgpack")

    assert decoded.payload == blob
    assert decoded[1:] == ("msgpack", 2, 4, 2, -0.5, 1.0, 7, False, False, None)


def test_decode_drops_keys_that_nobody_knows():
    decoded = decode_group(changed(extra=1, masks={"colour": "red"}), "msgpack")

    assert decoded.payload == changed()


@pytest.mark.parametrize(
    ("body", "path", "says"),
    [
        (changed(format=2), ("format",), "expected 1"),
        (changed(tokens=None), ("tokens",), "Expected object"),
        (changed(tokens={"data": b"\1\2\3"}), ("tokens",), "3 bytes of data, 4 numbers"),
        (changed(tokens={"dtype": "u8"}), ("tokens",), "type 'u8' is not one of"),
        (changed(tokens={"dtype": "bits"}), ("tokens",), "type 'bits' is not one of"),
        (changed(tokens={"lengths": None}), ("tokens",), "has no lengths"),
        (changed(tokens={"lengths": b"123"}), ("tokens",), "take 4 bytes each"),
        (changed(tokens={"lengths": b"", "data": b""}, masks={"data": b""},
                 inference_logprobs=None), ("tokens",), "at least one"),
        (changed(scores={"lengths": u4(2)}), ("scores",), "lengths or counts"),
        (changed(scores={"dtype": "f4", "data": b"\0" * 4}), ("scores",), "1 entries, tokens has"),
        (changed(scores={"dtype": "u1", "data": b"\0\0"}), ("scores",), "not one of f4, f8"),
        (changed(masks={"lengths": u4(3)}), ("masks",), "1 entries, tokens has 2"),
        (changed(masks={"lengths": u4(2, 1)}), ("masks", 0), "2 entries, tokens[0] has 3"),
        (changed(masks={"lengths": u4(1, 0)}), ("masks", 0), "1 entries, tokens[0] has 3"),
        (changed(masks={"data": b""}), ("masks",), "0 bytes of data, 4 numbers of type bits"),
        (
            changed(inference_logprobs={"data": struct.pack("<4f", 1, 0, float("-inf"), 1)}),
            ("inference_logprobs", 0, 2),
            "not finite",
        ),
        (
            changed(ref_logprobs={"dtype": "f4", "data": struct.pack("<4f", 0, 0, 0, np.nan)}),
            ("ref_logprobs", 1),
            "not finite",
        ),
        (changed(scores={"dtype": "f8", "data": struct.pack("<2d", 1, np.inf)}),
         ("scores", 1), "inf is not a finite number"),
        (changed(distill_token_ids={"dtype": "u1", "data": b""}), ("distill_token_ids",),
         "no counts"),
        (changed(distill_token_ids={"dtype": "u1", "data": b"", "counts": u4(0)}),
         ("distill_token_ids",), "1 counts, its rows have 4 positions"),
        (changed(distill_token_ids={"dtype": "u1", "data": b"", "counts": 0}),
         ("distill_token_ids",), "one count per position"),
        (changed(messages=b"[1]"), ("messages", 0), "list of messages"),
        (changed(messages=b"[["), ("messages",), "truncated"),
        (changed(overrides=b"{}"), ("overrides",), "list of objects"),
        (changed(images=b'"\\ud800"'), ("images",), "images: "),
        (changed(images=b"[" * 50_000 + b"]" * 50_000), ("images",), "recursion"),
        (changed(env_id="x"), ("env_id",), "Expected int"),
        (changed(env_id=2**63), ("env_id",), "<="),
        (changed(advantages={"dtype": "json", "data": b'["nan"]'}), ("advantages", 0), "finite"),
    ],
)  # fmt: skip
def test_malformed_groups_are_refused_with_the_path(body, path, says):
    with pytest.raises(WireError) as caught:
        decode_group(body, "msgpack")

    assert caught.value.path == path
    assert says.lower() in str(caught.value).lower()


@pytest.mark.parametrize("body", [b"", b"\x81", b"\xc1", b"\x93\1\2\3", changed() + b"\0"])
def test_bytes_that_are_no_group_are_refused(body):
    with pytest.raises(WireError):
        decode_group(body, "msgpack")


def test_opaque_bytes_that_are_not_text_are_named_as_such():
    with pytest.raises(WireError) as caught:
        decode_group(changed(images=b'"\xff"'), "msgpack")

    assert (caught.value.kind, caught.value.path) == ("not_text", ("images",))


def test_optional_columns_that_do_not_line_up_are_loose():
    group = {**SMALL, "advantages": [[1.0], [2.0]]}

    assert decode_group(encode_group(group, "msgpack"), "msgpack").is_loose is True
    of_numbers = encode_group({**SMALL, "advantages": [1, 2]}, "msgpack")
    assert decode_group(of_numbers, "msgpack").is_loose is False


def test_decode_groups_names_the_position_of_the_malformed_group():
    good, bad = encode_group(SMALL, "msgpack"), changed(masks={"data": b""})

    with pytest.raises(WireError) as caught:
        decode_groups(msgspec.msgpack.encode([good, bad]), "msgpack")

    assert caught.value.path == (1, "masks")
    assert len(decode_groups(encode_groups([SMALL] * 20, "msgpack", zstd=True), "msgpack")) == 20


def test_compressed_groups_unfold_to_no_more_than_allowed():
    blob = encode_group({**SMALL, "images": "x" * 1_000_000}, "msgpack", zstd=True)

    assert len(blob) < 1000
    with pytest.raises(WireError, match="at most 1000000 bytes"):
        decode_group(blob, "msgpack", max_bytes=1_000_000)
    with pytest.raises(WireError) as caught:
        decode_groups(msgspec.msgpack.encode([blob] * 3), "msgpack", max_bytes=2_500_000)
    assert caught.value.path == (2,)


def test_false_sizes_allocate_nothing():
    body = changed(
        tokens={"lengths": u4(2**32 - 1, 2**32 - 1)},
        distill_logprobs={"dtype": "f4", "data": b"", "counts": 2**32 - 1},
    )
    tracemalloc.start()

    with pytest.raises(WireError):
        decode_group(body, "msgpack")

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_batch_converts_only_groups_of_the_other_format():
    payloads = [
        StoredPayload("json", decode_group(encode_group(FULL_GROUP)).payload),
        StoredPayload("msgpack", encode_group(FULL_GROUP, "msgpack")),
        StoredPayload("msgpack", encode_group(FULL_GROUP, "msgpack", zstd=True)),
    ]

    as_json = b"".join(batch_pieces(payloads, envelope={"batch_id": "3-1"}))
    as_binary = batch_pieces(payloads, "msgpack", envelope={"batch_id": "3-1"})
    as_compressed = batch_pieces(payloads, "msgpack", accepts_zstd=True)

    assert json.loads(as_json) == {"batch": [FULL_GROUP] * 3, "batch_id": "3-1"}
    assert decode_batch(b"".join(as_binary), "msgpack") == json.loads(as_json)
    assert any(piece is payloads[1].content for piece in as_binary)
    assert any(piece is payloads[2].content for piece in as_compressed)
    assert decode_batch(b"".join(as_compressed), "msgpack") == {"batch": [FULL_GROUP] * 3}


@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
def test_batch_that_is_not_text_is_refused(wire_format):
    blob = changed(images=b'"\xff"')
    body = b'{"a":"\xff"}' if wire_format == "json" else msgspec.msgpack.encode({"batch": [blob]})

    with pytest.raises(WireError) as caught:
        decode_batch(body, wire_format)

    assert caught.value.kind == "not_text"


@pytest.mark.parametrize(("payloads", "batch"), [(None, None), ([], [])])
def test_batch_may_be_empty_or_missing(payloads, batch):
    assert decode_batch(b"".join(batch_pieces(payloads, "msgpack")), "msgpack") == {"batch": batch}


def test_batch_of_many_groups_is_plain_msgpack():
    payloads = [StoredPayload("msgpack", encode_group(SMALL, "msgpack"))] * 70_000

    body = b"".join(batch_pieces(payloads, "msgpack"))

    assert msgspec.msgpack.decode(body) == {"batch": [payload.content for payload in payloads]}


def test_batch_is_read_as_arrays_when_asked():
    payload = StoredPayload("msgpack", encode_group(FULL_GROUP, "msgpack"))

    (group,) = decode_batch(
        b"".join(batch_pieces([payload], "msgpack")), "msgpack", as_arrays=True
    )["batch"]

    assert [row.tolist() for row in group["masks"]] == FULL_GROUP["masks"]
    assert [position.tolist() for position in group["distill_token_ids"][0]] == [
        [1, 2],
        [3, 4],
        [5, 6],
    ]
    assert group["scores"].tolist() == FULL_GROUP["scores"]


def test_conversion_keeps_the_bytes_of_opaque_fields():
    opaque = b'{"a": 1.10, "b": 123456789012345678901234567890, "c":"\\u00fc"}'
    body = encode_group(SMALL).replace(b'"images":null', b'"images":' + opaque)
    payload = StoredPayload("json", decode_group(body).payload)

    blob = convert_payload(payload, "msgpack")
    back = convert_payload(StoredPayload("msgpack", blob), "json")

    assert msgspec.msgpack.decode(blob)["images"] == opaque
    assert back == payload.content


def test_long_rows_are_converted_in_pieces():
    row = list(range(100_000))
    group = {"tokens": [row], "masks": [row], "scores": [0.5]}

    text = convert_payload(StoredPayload("msgpack", encode_group(group, "msgpack")), "json")

    assert text == encode_group(group)


def read_back(blob: bytes) -> list[dict[str, Any]]:
    body = b"".join(batch_pieces([StoredPayload("msgpack", blob)], "msgpack"))
    groups = decode_batch(body, "msgpack")["batch"]
    assert [list(group) for group in groups] == [[f.name for f in GROUP_FIELDS if not f.is_note]]
    return groups


@pytest.mark.parametrize("num_numbers", [1, 0])
def test_short_positions_and_rows_take_little_memory_as_json(num_numbers):
    num_entries = 100_000
    entries = [[7] * num_numbers] * num_entries
    group = {
        **{"tokens": [[1]], "masks": [[1]], "scores": [0.5]},
        "distill_token_ids": [entries],
        "ref_logprobs": [[]] * num_entries,
    }
    stored = StoredPayload("msgpack", encode_group(group, "msgpack"))

    tracemalloc.start()
    text = convert_payload(stored, "json")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert json.loads(text)["distill_token_ids"] == [entries]
    assert json.loads(text)["ref_logprobs"] == group["ref_logprobs"]
    assert peak_bytes < 15 * len(text)

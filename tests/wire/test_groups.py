"""The codecs of a group, without a service."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire import (
    StoredPayload,
    WireError,
    batch_pieces,
    decode_batch,
    decode_group,
    decode_groups,
    encode_group,
    encode_groups,
)
from atroposlib.wire.json_format import MAX_DEPTH

GROUP = {
    "tokens": [[1, 2, 3], [4]],
    "masks": [[-100, 2, 3], [4]],
    "scores": [1.0, -0.1],
    "inference_logprobs": [[1.0, -0.30000000000000004, -2.5], [-0.1]],
    "messages": [[{"role": "user", "content": "ü🙂", "reward": None}], []],
    "env_id": 3,
}
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_tokens_made_from_text_are_counted_in_both_formats():
    group = {**GROUP, "tokenized_from_text": True}

    for wire_format in ("json", "msgpack"):
        assert decode_group(encode_group(group, wire_format), wire_format).is_from_text is True
        assert decode_group(encode_group(GROUP, wire_format), wire_format).is_from_text is False


def test_blanks_around_a_note_do_not_change_its_meaning():
    spaced = json.dumps({**GROUP, "traces": None}).encode()[:-1]
    spaced = b'{"tokenized_from_text" : true ,\n' + spaced[1:] + b"}"
    assert decode_group(spaced).is_from_text
    blob = encode_group({**GROUP, "tokenized_from_text": True}, "msgpack")
    blob = blob.replace(b"\xc4\x04true", b"\xc4\x06 true ")
    assert decode_group(blob, "msgpack").is_from_text


def test_payload_has_every_field_in_table_order():
    payload = encode_group(GROUP)

    assert list(json.loads(payload)) == [f.name for f in GROUP_FIELDS if not f.is_note]


@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
def test_notes_travel_where_they_are_written(wire_format):
    notes = {
        "reward_parts": [{"format": 0.5, "answer": 1}, {}],
        "finish_reasons": ["stop", "length"],
        "tokenized_from_text": True,
        "traces": [{"version": 1, "events": []}, None],
    }

    payload = decode_group(encode_group({**GROUP, **notes}, wire_format), wire_format).payload
    body = b"".join(batch_pieces([StoredPayload(wire_format, payload)], "json"))

    (group,) = decode_batch(body, "json")["batch"]
    assert {name: group[name] for name in notes} == notes


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (
            {"reward_parts": [{"format": "good"}, {}]},
            r"reward_parts\[0\].format: expected a number",
        ),
        ({"reward_parts": {"format": 1}}, "reward_parts: expected a list of objects"),
        ({"finish_reasons": ["stop", 3]}, r"finish_reasons\[1\]: expected a string"),
        ({"tokenized_from_text": "yes"}, "tokenized_from_text: expected true, false"),
        ({"traces": {}}, "traces: expected a list of objects"),
        ({"traces": [None, "done"]}, r"traces\[1\]: expected an object or null"),
    ],
)
def test_notes_of_another_shape_are_refused_by_path(note, message):
    with pytest.raises(WireError, match=message):
        decode_group(encode_group({**GROUP, **note}))


def test_decode_group_describes_what_it_read():
    decoded = decode_group(encode_group(GROUP))

    assert (decoded.num_sequences, decoded.num_tokens, decoded.env_id) == (2, 4, 3)
    assert decoded.is_loose is False


def test_decode_group_gives_back_the_canonical_payload():
    payload = encode_group(GROUP)

    assert json.loads(decode_group(payload).payload) == json.loads(payload)
    assert decode_group(decode_group(payload).payload).payload == decode_group(payload).payload


def test_decode_group_splices_what_is_right_already():
    body = b'{"tokens": [[1, 2]], "masks": [[-100,2]], "scores":[0.50], "ref_logprobs":[[1e-5,0]]}'

    payload = decode_group(body).payload

    assert payload.startswith(b'{"tokens":[[1, 2]],"masks":[[-100,2]],"scores":[0.50],')
    assert b'"ref_logprobs":[[0.00001,0.0]]' in payload


def test_decode_group_writes_floats_as_floats():
    body = b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[1],"inference_logprobs":[[1, -0.25]]}'

    group = json.loads(decode_group(body).payload)

    assert repr(group["scores"] + group["inference_logprobs"][0]) == "[1.0, 1.0, -0.25]"


def test_decode_group_consumes_the_policy_version():
    decoded = decode_group(encode_group({**GROUP, "policy_version": 7}))

    assert decoded.policy_version == 7
    assert "policy_version" not in json.loads(decoded.payload)
    assert (decoded.min_score, decoded.max_score) == (-0.1, 1.0)


@pytest.mark.parametrize("separator", [",", ", "])
def test_long_rows_are_read_in_pieces_and_kept(separator):
    row = separator.join(str(number) for number in range(60_000))
    floats = separator.join(f"-{number}.25" for number in range(60_000))
    body = f'{{"tokens":[[{row}]],"masks":[[{row}]],"scores":[1],"advantages":[[{floats}]]}}'

    decoded = decode_group(body.encode())

    assert decoded.num_tokens == 60_000
    assert json.loads(decoded.payload) | json.loads(body) == json.loads(decoded.payload)


@pytest.mark.parametrize("ending", [",]", ",,1]", ',"x"]', ",[1]]", ",1"])
def test_long_rows_that_end_wrong_are_refused(ending):
    row = ",".join(str(number) for number in range(60_000))
    body = f'{{"tokens":[[{row}{ending}],"masks":[[1]],"scores":[1]}}'

    with pytest.raises(WireError):
        decode_group(body.encode())


def test_of_a_repeated_key_the_last_value_counts_and_the_first_must_be_json():
    tail = b'"masks":[[1]],"scores":[1],"tokens":[[5]]}'

    assert json.loads(decode_group(b'{"tokens":[[1],[2]],' + tail).payload)["tokens"] == [[5]]
    with pytest.raises(WireError, match="JSON"):
        decode_group(b'{"tokens":[[1"]],' + tail)


@pytest.mark.parametrize("num_keys", [1, 10])
def test_opaque_values_may_hold_the_keys_of_a_group(num_keys):
    nested = [{"a": 1, "images": [[1]], "tokens": [["]"]]}] * num_keys
    group = {
        "tokens": [[1, 2]],
        "messages": [[{"role": "user", "content": nested}, ',"masks":']],
        "masks": [[1, 2]],
        "images": nested,
        "scores": [0.5],
    }

    one = decode_group(json.dumps(group).encode())
    two = decode_groups(json.dumps([group, group]).encode())

    assert {key: json.loads(one.payload)[key] for key in group} == group
    assert [each.payload for each in two] == [one.payload] * 2


@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("field", "levels", "place"),
    [
        ("images", 0, lambda value: value),
        ("generation_params", 1, lambda value: {"stop": value}),
        ("messages", 3, lambda value: [[{"role": "user", "content": value}]]),
    ],
)
def test_opaque_values_with_too_many_levels_for_a_parser_are_refused(
    field, levels, place, wire_format
):
    def body(depth):
        value = "text"
        for _ in range(depth - levels):
            value = [value]
        return encode_group({**GROUP, field: place(value)}, wire_format)

    assert decode_group(body(MAX_DEPTH), wire_format)
    with pytest.raises(WireError, match=f"{field}: nested more than 200 levels") as caught:
        decode_group(body(MAX_DEPTH + 1), wire_format)
    assert caught.value.path == (field,)


@pytest.mark.parametrize("comma", [b"", b",}", b"} {"])
def test_what_follows_a_group_must_be_json(comma):
    body = b'{"tokens":[[1]],"masks":[[1]],"scores":[1.0]'

    with pytest.raises(WireError) as caught:
        decode_group(body + comma)

    assert caught.value.kind == "json_invalid"


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), FINITE)), min_size=1, max_size=4
    )
)
def test_round_trip_keeps_every_digit(rows):
    group = {
        "tokens": [[token for token, _ in row] for row in rows],
        "masks": [[token for token, _ in row] for row in rows],
        "scores": [float(len(row)) for row in rows],
        "advantages": [[number for _, number in row] for row in rows],
    }

    delivered = json.loads(decode_group(encode_group(group)).payload)

    assert {key: delivered[key] for key in group} == group


@pytest.mark.parametrize("scores", [[True, False], [np.True_, 0], np.array([True, False])])
@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
def test_true_and_false_are_scores_in_both_formats(scores, wire_format):
    found = decode_group(encode_group({**GROUP, "scores": scores}, wire_format), wire_format)

    assert (found.min_score, found.max_score) == (0.0, 1.0)
    if wire_format == "json":
        assert json.loads(found.payload)["scores"] == [1.0, 0.0]


def test_decode_converts_laxly_into_canonical_numbers():
    body = b'{"tokens":[["1",2.0]],"masks":[[1,2]],"scores":["0.5"],"ref_logprobs":[[0,-1]]}'

    group = json.loads(decode_group(body).payload)

    assert group["tokens"] == [[1, 2]]
    assert group["scores"] == [0.5]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantages", [[1.0], [2.0]]),
        ("overrides", [{}]),
        ("ref_logprobs", [[0.0, 0.0, 0.0]]),
    ],
)
def test_optional_fields_that_do_not_line_up_are_loose(field, value):
    assert decode_group(json.dumps({**GROUP, field: value}).encode()).is_loose is True


def test_flat_advantages_are_not_loose():
    body = json.dumps({**GROUP, "advantages": [0.5, 1]}).encode()

    assert decode_group(body).is_loose is False
    assert json.loads(decode_group(body).payload)["advantages"] == [0.5, 1.0]


def test_decode_groups_names_the_position_of_the_malformed_group():
    body = json.dumps([GROUP, {**GROUP, "scores": [1.0]}]).encode()

    with pytest.raises(WireError, match="scores: 1 entries, tokens has 2") as caught:
        decode_groups(body)

    assert caught.value.path == (1, "scores")


def test_decode_type_error_names_the_path():
    with pytest.raises(WireError, match=r"tokens\[0\]\[1\]: Expected int, got str") as caught:
        decode_group(b'{"tokens":[[1,"x"]],"masks":[[1,1]],"scores":[1]}')

    assert caught.value.path == ("tokens", 0, 1)


def test_encode_groups_is_what_decode_groups_reads():
    assert [d.num_tokens for d in decode_groups(encode_groups([GROUP, GROUP]))] == [4, 4]


def test_batch_pieces_splice_payloads():
    payload = encode_group(GROUP)

    body = b"".join(batch_pieces([StoredPayload("json", payload)] * 2, envelope={"batch_id": "3"}))

    assert json.loads(body) == {"batch": [json.loads(payload)] * 2, "batch_id": "3"}
    assert b"".join(batch_pieces([])) == b'{"batch":[]}'
    assert b"".join(batch_pieces(None)) == b'{"batch":null}'


def test_encode_group_converts_numpy_and_models():
    class Message(BaseModel):
        role: str
        content: str

    group = {
        "tokens": [np.array([1, 2])],
        "masks": [np.array([-100, 2])],
        "scores": [np.float64(0.5)],
        "messages": [[Message(role="user", content="hi")]],
    }

    written = json.loads(encode_group(group))

    assert written["tokens"] == [[1, 2]]
    assert written["scores"] == [0.5]
    assert written["messages"] == [[{"role": "user", "content": "hi"}]]


ARRAY_GROUP = {
    "tokens": [[1, 2], [1, 3]],
    "masks": [[-100, 2], [-100, 3]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5], [1.0, -0.25]],
    "advantages": [0.5, -0.5],
    "ref_logprobs": [[-1.0, -2.0], [-1.0, -4.0]],
    "distill_token_ids": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
}


def narrow(values):
    """Return an array of 32 bits."""
    array = np.array(values)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int32)


def tensor(values):
    return pytest.importorskip("torch").tensor(values)


def leaves(values, convert):
    return [leaves(each, convert) if isinstance(each, list) else convert(each) for each in values]


@pytest.mark.parametrize("wire_format", ["json", "binary"])
@pytest.mark.parametrize("field", ARRAY_GROUP)
@pytest.mark.parametrize("convert", [narrow, tensor], ids=["numpy", "torch"])
def test_arrays_and_their_scalars_are_sent_as_lists_are(convert, field, wire_format):
    expected = encode_group(ARRAY_GROUP, wire_format)
    values = ARRAY_GROUP[field]

    for form in (
        convert(values),
        [convert(each) for each in values],
        leaves(values, lambda number: convert(number)[()]),
    ):
        assert encode_group({**ARRAY_GROUP, field: form}, wire_format) == expected


def test_encode_group_names_a_tensor_whose_numbers_cannot_be_read():
    torch = pytest.importorskip("torch")
    unreadable = torch.empty(2, device="meta")

    with pytest.raises(GroupError, match="advantages: cannot be sent: a Tensor has no JSON form: "):
        encode_group({**ARRAY_GROUP, "advantages": unreadable})
    with pytest.raises(GroupError, match="scores: its numbers cannot be read: "):
        encode_group({**ARRAY_GROUP, "scores": unreadable})


def test_encode_group_names_the_field_it_cannot_write():
    with pytest.raises(
        GroupError, match="images: cannot be sent: a value of type type has no JSON form"
    ):
        encode_group({**GROUP, "images": object})


def test_encode_group_refuses_a_malformed_group():
    with pytest.raises(GroupError, match=r"masks\[0\]: 1 entries, tokens\[0\] has 3"):
        encode_group({**GROUP, "masks": [[1], [4]]})

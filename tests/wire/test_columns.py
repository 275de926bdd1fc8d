"""Opaque columns and the versions of tokens: the same bytes in both formats and between them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from atroposlib.errors import GroupError
from atroposlib.scored_data import merge_items
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
from atroposlib.wire.columns import COLUMN_TYPES, MAX_COLUMNS, check_column_text

FORMATS: tuple[WireFormat, ...] = ("json", "msgpack")
LENGTHS = (3, 2)
round_trips = settings(max_examples=100)


def base_group(lengths: Any = LENGTHS, **extra: Any) -> dict[str, Any]:
    tokens = [list(range(1, length + 1)) for length in lengths]
    return {
        "tokens": tokens,
        "masks": [[-100] * length for length in lengths],
        "scores": [0.5] * len(lengths),
        **extra,
    }


@st.composite
def columns_of_arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a group with columns of every type and shape."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    group = base_group(lengths)
    for name in draw(st.sets(st.sampled_from(["routed_experts", "_w2", "K"]), min_size=1)):
        dtype = np.dtype("<" + draw(st.sampled_from(COLUMN_TYPES)))
        shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
        finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
        numbers = arrays_of.from_dtype(dtype, **finite)
        rows = [draw(arrays_of.arrays(dtype, (n, *shape), elements=numbers)) for n in lengths]
        group.setdefault("columns", {})[name] = rows
    return group


def delivered(payload: StoredPayload, wire_format: WireFormat) -> dict[str, Any]:
    body = b"".join(batch_pieces([payload], wire_format))
    group: dict[str, Any] = decode_batch(body, wire_format)["batch"][0]
    return group


@round_trips
@given(group=columns_of_arrays())
def test_arrays_keep_type_and_bytes_in_the_binary_format(group: dict[str, Any]) -> None:
    sent = encode_group(group, "msgpack")

    decoded = decode_group(sent, "msgpack")

    assert decoded.payload == sent
    read = delivered(StoredPayload("msgpack", decoded.payload), "msgpack")["columns"]
    for name, rows in group["columns"].items():
        for row, found in zip(rows, read[name], strict=True):
            assert found.tobytes() == row.tobytes()
            if row.size:
                assert (found.dtype, found.shape) == (row.dtype, row.shape)


@round_trips
@given(group=columns_of_arrays())
def test_numbers_are_the_same_across_formats(group: dict[str, Any]) -> None:
    blob = StoredPayload("msgpack", decode_group(encode_group(group, "msgpack"), "msgpack").payload)
    text = StoredPayload("json", decode_group(encode_group(group)).payload)
    plain = {name: [row.tolist() for row in rows] for name, rows in group["columns"].items()}

    assert repr(delivered(text, "json")["columns"]) == repr(plain)
    assert repr(delivered(blob, "json")["columns"]) == repr(plain)
    for payload in (blob, text):
        read = delivered(payload, "msgpack")["columns"]
        for name, rows in plain.items():
            found = [row.tolist() for row in read[name]]
            assert repr(found) == repr(rows)
    # JSON has no types: a second conversion changes nothing any more.
    converted = StoredPayload("msgpack", convert_payload(text, "msgpack"))
    assert convert_payload(converted, "json") == text.content


def test_text_of_a_json_column_keeps_every_byte() -> None:
    given_text = b'{"w":[ [1.50,-0.0 ,1e-7], [2,3]],"ids":[[9007199254740993,1,2],[3,-4]]}'
    body = encode_group(base_group())[:-1] + b',"columns":' + given_text + b"}"

    payload = decode_group(body).payload

    assert payload.endswith(b',"columns":' + given_text + b"}")


def test_json_column_that_occurs_twice_is_refused() -> None:
    body = encode_group(base_group())[:-1]
    hidden = b',"columns":{"w":[[1e999,"x",[]],[]],"w":[[1,2,3],[4,5]]}}'

    with pytest.raises(GroupError, match="columns: a name occurs twice"):
        decode_group(body + hidden)


@pytest.mark.parametrize("others", [{}, {"a_key_of_an_older_client": 1}])
def test_columns_may_be_null_beside_unknown_keys(others: dict[str, int]) -> None:
    body = json.dumps([{**base_group(), "columns": None, "traces": None, **others}]).encode()

    (group,) = decode_groups(body)

    assert "columns" not in json.loads(group.payload)
    assert "traces" not in json.loads(group.payload)


def test_column_may_be_one_array_or_lists() -> None:
    whole = np.arange(12, dtype=np.uint16).reshape(2, 3, 2)
    one = base_group((3, 3), columns={"experts": whole})
    listed = base_group((3, 3), columns={"experts": list(whole)})
    as_lists = base_group((3, 3), columns={"experts": whole.tolist()})

    assert encode_group(one, "msgpack") == encode_group(listed, "msgpack")
    assert encode_group(one) == encode_group(as_lists)
    found = delivered(StoredPayload("msgpack", encode_group(as_lists, "msgpack")), "msgpack")
    assert found["columns"]["experts"][0].dtype == np.uint8  # the smallest type, as of any list
    assert np.array_equal(np.array(found["columns"]["experts"]), whole)


def test_arrays_in_any_layout_are_written_in_c_order() -> None:
    rows = [np.arange(12, dtype=">i4").reshape(4, 3).T[:length] for length in LENGTHS]
    group = base_group(columns={"k": rows})

    found = delivered(StoredPayload("msgpack", encode_group(group, "msgpack")), "msgpack")

    assert found["columns"]["k"][0].dtype == np.dtype("<i4")
    assert [row.tolist() for row in found["columns"]["k"]] == [row.tolist() for row in rows]


WRONG = {
    "columns: the name 'a b' is invalid": {"a b": [[1] * 3, [1] * 2]},
    "columns.e: 1 entries, tokens has 2": {"e": [[1] * 3]},
    "columns.e[1]: 3 entries, tokens[1] has 2": {"e": [[1] * 3, [1] * 3]},
    "columns.e[0]: expected an array of finite": {"e": [[[1], [1, 2], [1]], [[1], [1]]]},
    "columns.e[1]: entries of shape": {"e": [[[1]] * 3, [[1, 2]] * 2]},
    "columns: 33 columns, expected at most": {
        f"c{i}": [[1] * 3, [1] * 2] for i in range(MAX_COLUMNS + 1)
    },
    "columns.e[0]: expected an array of finite numbers": {"e": [["1"] * 3, [1] * 2]},
}


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("message", WRONG)
def test_wrong_columns_are_refused_with_their_path(message: str, wire_format: WireFormat) -> None:
    with pytest.raises(GroupError) as refused:
        encode_group(base_group(columns=WRONG[message]), wire_format)

    assert message in str(refused.value)


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(
    wire_format: WireFormat, dtype: str, number: float
) -> None:
    rows = [np.zeros(3, dtype), np.full(2, number, dtype)]

    with pytest.raises(GroupError, match=r"columns\.e\[1\]: .*finite"):
        encode_group(base_group(columns={"e": rows}), wire_format)


def test_five_dimensions_and_other_types_are_refused() -> None:
    deep = [np.zeros((length, 1, 1, 1)) for length in LENGTHS]
    with pytest.raises(GroupError, match="dimensions, expected at most 4"):
        encode_group(base_group(columns={"e": deep}), "msgpack")
    with pytest.raises(GroupError, match="at most 4 dimensions"):
        encode_group(base_group(columns={"e": deep}))
    mixed = [np.zeros(3, np.uint8), np.zeros(2, np.int16)]
    with pytest.raises(GroupError, match=r"columns\.e: arrays of type i2, u1, expected one of"):
        encode_group(base_group(columns={"e": mixed}), "msgpack")


def changed_blob(**changes: Any) -> bytes:
    """Return a binary group whose column is written with other entries."""
    fields = msgspec.msgpack.decode(
        encode_group(
            base_group(columns={"e": [np.zeros((n, 2), "u1") for n in LENGTHS]}), "msgpack"
        )
    )
    fields["columns"]["e"] |= changes
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": b"123"}, r"columns\.e: 3 bytes of data, 5 tokens .* take 10"),
        ({"dtype": "u8"}, r"columns\.e: type 'u8' is not one of"),
        ({"dtype": "bits"}, r"columns\.e: type 'bits' is not one of"),
        ({"shape": [0]}, r"columns\.e: entries of shape \[0\]"),
        ({"shape": [-1]}, r"columns\.e: entries of shape \[-1\]"),
        ({"shape": [1, 1, 2]}, r"columns\.e: 5 dimensions"),
        ({"shape": [2**30]}, r"columns\.e: entries of shape"),
        ({"dtype": "f2", "shape": [], "data": b"\x00\x7c" * 5}, r"columns\.e\[0\]: .* not finite"),
    ],
)
def test_damaged_columns_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_group(changed_blob(**changes), "msgpack")


def test_unknown_keys_of_a_column_are_dropped() -> None:
    payload = decode_group(changed_blob(unit="expert"), "msgpack").payload

    zeros = base_group(columns={"e": [np.zeros((n, 2), "u1") for n in LENGTHS]})
    assert payload == encode_group(zeros, "msgpack")


@pytest.mark.parametrize("wire_format", FORMATS)
def test_group_without_columns_has_no_key(wire_format: WireFormat) -> None:
    for nothing in ({}, None):
        body = encode_group(base_group(columns=nothing), wire_format)
        assert body == encode_group(base_group(), wire_format)
    body = encode_group(base_group())[:-1] + b',"columns":{}}'
    assert decode_group(body).payload == encode_group(base_group())


def test_compressed_columns_are_the_same() -> None:
    rows = [np.arange(length, dtype="i2") for length in LENGTHS]
    packed = encode_group(base_group(columns={"e": rows}), "msgpack", zstd=True)

    assert decode_group(packed, "msgpack").payload == packed
    found = delivered(StoredPayload("msgpack", packed), "msgpack")
    assert [row.tolist() for row in found["columns"]["e"]] == [row.tolist() for row in rows]


RUNS = [[[None, 1], [7, 2]], None]


@pytest.mark.parametrize("sent_as", FORMATS)
@pytest.mark.parametrize("taken_as", FORMATS)
def test_versions_of_tokens_arrive_as_sent(sent_as: WireFormat, taken_as: WireFormat) -> None:
    body = encode_group(base_group(token_versions=RUNS), sent_as)

    payload = decode_group(body, sent_as).payload

    assert payload == body
    assert delivered(StoredPayload(sent_as, payload), taken_as)["token_versions"] == RUNS


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([[[7, 3]]], "token_versions: 1 entries, tokens has 2"),
        ([[[7, 3]], [[7, 3]]], r"token_versions\[1\]: runs of 3 tokens, tokens\[1\] has 2"),
        ([[[7, 3]], [["8", 2]]], r"token_versions\[1\]\[0\]: expected \[version or null"),
        ([[[7, 3]], [[8, 3], [8, -1]]], r"token_versions\[1\]\[1\]: expected"),
        ([[[7, 3]], 5], r"token_versions\[1\]: expected a list of runs or null"),
    ],
)
@pytest.mark.parametrize("wire_format", FORMATS)
def test_runs_that_do_not_cover_their_tokens_are_refused(
    runs: Any, message: str, wire_format: WireFormat
) -> None:
    with pytest.raises(WireError, match=message):
        decode_group(encode_group(base_group(token_versions=runs), wire_format), wire_format)


def test_merging_keeps_columns_that_every_trajectory_has() -> None:
    items: list[dict[str, Any]] = [
        {"tokens": [1], "masks": [1], "scores": 1.0, "columns": {"a": [5], "b": [6]}},
        {"tokens": [2], "masks": [2], "scores": 0.0, "columns": {"a": [7]}},
    ]
    items[1]["token_versions"] = [[3, 1]]

    group, dropped = merge_items(items)

    assert group["columns"] == {"a": [[5], [7]]}
    assert group["token_versions"] == [None, [[3, 1]]]
    assert dropped == ["columns.b"]
    assert json.loads(encode_group(group))["columns"] == group["columns"]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("[" + ",".join(["[0]"] * 200_000) + "]", "more than 3 entries"),
        ("[[" + ",".join(["[0]"] * 400) + "]]", "expected at most 100 numbers"),
    ],
)
def test_rows_with_far_too_many_numbers_are_not_decoded(
    row: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "atroposlib.wire.columns.MAX_ENTRY_NUMBERS", 100 if "100" in named else 10**6
    )
    text = f'{{"a":[{row},[0,0]]}}'.encode()

    with pytest.raises(GroupError, match=named):
        check_column_text(text, LENGTHS)

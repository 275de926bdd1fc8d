"""Exact deltas of pieces, the manifest, and the choice of a chain."""

from __future__ import annotations

import itertools
import json
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from example_trainer.weights.format import (
    DamagedWeightsError,
    Frame,
    Manifest,
    StoredFile,
    TensorSpec,
    VersionEntry,
    WeightsError,
    choose_chain,
    decode_piece,
    encode_piece,
    is_anchor_due,
    kept_entries,
    pack_index,
    parse_header,
    parse_index,
    parse_manifest,
    pieces_of,
    weights_header,
)
from example_trainer.weights.store import StoreError


@st.composite
def pairs_of_pieces(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """Width, and two pieces that differ in some elements, by a little or in every bit."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.integers(0, 400))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = generator.integers(0, 256, size * width, dtype=np.uint8)
    new = old.view(f"<u{width}").copy()
    hits = generator.random(size) < draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
    step = generator.integers(0, 256, size * width, dtype=np.uint8).view(new.dtype)
    if draw(st.booleans()):
        step = generator.integers(0, 3, size).astype(new.dtype) - new.dtype.type(1)
    new[hits] += step[hits]
    return width, old, new.view(np.uint8)


@settings(max_examples=200)
@given(pairs_of_pieces())
def test_decoded_piece_has_the_bits_of_the_new_one(case):
    width, old, new = case

    frame, num_changed = encode_piece(old, new, width)

    differs = old.view(f"<u{width}") != new.view(f"<u{width}")
    assert num_changed == int(differs.sum())
    assert bool(frame) == bool(num_changed)
    if frame:
        assert decode_piece(old, frame, width).tobytes() == new.tobytes()


@settings(max_examples=200)
@given(pairs_of_pieces(), st.data())
def test_damaged_frame_is_an_error_or_other_bytes_and_never_a_crash(case, data):
    width, old, new = case
    frame, _ = encode_piece(old, new, width)
    if not frame:
        return
    place = data.draw(st.integers(0, len(frame) - 1))
    damaged = bytearray(frame)
    damaged[place] ^= data.draw(st.integers(1, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]

    try:
        restored = decode_piece(old, bytes(damaged), width)
    except DamagedWeightsError:
        return
    assert len(restored) == len(old)


def test_one_unit_in_the_last_place_takes_a_fraction_of_the_tensor():
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 100_000).astype("<u2")
    hits = generator.random(len(old)) < 0.01
    new = old + hits.astype("<u2")

    frame, _ = encode_piece(old.view(np.uint8), new.view(np.uint8), 2)

    # The entropy of the positions is 0.081 bits per element of 16 bits: half a percent.
    assert len(frame) < 0.009 * old.nbytes


def test_header_orders_tensors_by_width_and_name_and_can_be_read():
    specs = [
        TensorSpec("b", "BF16", (3,), 0, 6),
        TensorSpec("c", "F32", (2,), 6, 14),
        TensorSpec("a", "F32", (1,), 14, 18),
    ]

    header, placed = weights_header(specs)

    assert [(spec.name, spec.start) for spec in placed] == [("a", 0), ("c", 4), ("b", 12)]
    assert len(header) % 8 == 0
    assert parse_header(header[8:]) == placed


def test_pieces_cover_every_byte_once():
    specs = [
        TensorSpec("a", "F32", (2**23,), 0, 2**25),
        TensorSpec("empty", "F32", (0,), 2**25, 2**25),
        TensorSpec("b", "F32", (3,), 2**25, 2**25 + 12),
    ]

    pieces = list(pieces_of(specs))

    assert [(piece.tensor, piece.number) for piece in pieces] == [(0, 0), (0, 1), (2, 0)]
    assert pieces[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert pieces[-1].stop == 2**25 + 12


def test_type_of_half_a_byte_is_compared_by_bytes():
    assert TensorSpec("packed", "F4", (8,), 0, 4).width == 1


def test_index_is_read_back():
    frames = [Frame(0, 0, 0, 10), Frame(2, 1, 10, 5)]
    content = bytes(15) + pack_index("base", "weights", frames)

    index = parse_index(memoryview(content), num_pieces=2)

    assert index.base_sha256 == "base"
    assert index.frames == {(0, 0): frames[0], (2, 1): frames[1]}


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)])
def test_something_else_than_a_delta_is_damaged(content):
    with pytest.raises(DamagedWeightsError, match="not a delta file"):
        parse_index(memoryview(content), num_pieces=1)


DIGEST = 64 * "0"


def entry(serial: int, *, delta: int | None = 10, anchor: int | None = None) -> VersionEntry:
    return VersionEntry(
        serial=serial,
        version=serial,
        weights_sha256=f"w{serial}",
        weights_bytes=1000,
        base_sha256=None if delta is None else f"w{serial - 1}",
        delta=None
        if delta is None
        else StoredFile(name=f"d{serial}", num_bytes=delta, sha256=DIGEST),
        anchor=None
        if anchor is None
        else StoredFile(name=f"a{serial}", num_bytes=anchor, sha256=DIGEST),
    )


def shown(chain):
    if chain is None:
        return None
    start = chain.anchor.serial if chain.anchor else "local"
    return [start, *(each.serial for each in chain.deltas)]


VERSIONS = [entry(4, anchor=1000), entry(5), entry(6), entry(7, anchor=1000), entry(8)]


@pytest.mark.parametrize(
    ("local", "damaged", "expected"),
    [
        (None, (), [7, 8]),
        ("w8", (), ["local"]),
        ("w7", (), ["local", 8]),
        ("w5", (), ["local", 6, 7, 8]),
        ("w3", (), ["local", 4, 5, 6, 7, 8]),  # the base of the oldest delta
        ("w1", (), [7, 8]),
        ("w5", ("d6",), [7, 8]),
        ("w7", ("d8",), None),
        (None, ("a7",), [4, 5, 6, 7, 8]),
        (None, ("a7", "a4"), None),
        (None, ("a7", "d6"), None),
    ],
)
def test_chain_has_the_fewest_bytes_of_intact_files(local, damaged, expected):
    assert shown(choose_chain(VERSIONS, local, damaged=damaged)) == expected


def test_anchor_is_taken_where_the_deltas_are_larger():
    versions = [entry(1, anchor=1000), entry(2, delta=900), entry(3, delta=900, anchor=1000)]

    assert shown(choose_chain(versions, "w1")) == [3]


@pytest.mark.parametrize(
    ("versions", "delta_bytes", "due"),
    [
        ([], 0, True),
        ([entry(1, anchor=1000)], 10, False),
        ([entry(1, anchor=1000), entry(2), entry(3)], 10, True),  # every 3 versions
        ([entry(1, anchor=1000)], 501, True),  # more than half
        ([entry(1, anchor=1000), entry(2, delta=300)], 201, True),
        ([entry(1, anchor=1000), entry(2, delta=300)], 200, False),
    ],
)
def test_anchor_is_due_after_some_versions_or_large_deltas(versions, delta_bytes, due):
    assert is_anchor_due(versions, delta_bytes, every=3, share=0.5) is due


def test_kept_versions_begin_with_the_anchor_they_need():
    assert [each.serial for each in kept_entries(VERSIONS, 2)] == [7, 8]
    assert [each.serial for each in kept_entries(VERSIONS, 3)] == [4, 5, 6, 7, 8]
    assert kept_entries(VERSIONS, 9) == VERSIONS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format": 1}',
        json.dumps({"format": 2}).encode(),
        Manifest(run="r", architecture="a", epoch=1, versions=[])
        .model_dump_json(exclude_none=True)
        .encode(),
        Manifest(run="r", architecture="a", epoch=1, versions=[entry(1), entry(3)])
        .model_dump_json(exclude_none=True)
        .encode(),
    ],
)
def test_unusable_manifest_is_an_error_that_says_so(content):
    with pytest.raises(DamagedWeightsError, match="the manifest"):
        parse_manifest(content)


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "a/b",
        ".hidden",
        "/etc/passwd",
        "",
        "pytorch_model.bin",
        "model.safetensors",
    ],
)
def test_manifest_cannot_name_weights_or_files_outside_the_folder(name):
    manifest = {
        "format": 1,
        "run": "r",
        "architecture": "a",
        "epoch": 1,
        "versions": [json.loads(entry(1, anchor=1).model_dump_json())],
        "files": {name: {"name": "files/x", "num_bytes": 0, "sha256": DIGEST}},
    }

    with pytest.raises(DamagedWeightsError, match="the manifest"):
        parse_manifest(json.dumps(manifest).encode())


@pytest.mark.parametrize(
    "wrong", [{"versions": [0] * 20_000}, {"files": {str(i): 0 for i in range(20_000)}}]
)
def test_manifest_with_many_bad_entries_keeps_one_error(wrong):
    """Millions of errors, each of hundreds of bytes, fit into a manifest."""
    fields = {"run": "r", "architecture": "a", "epoch": 1, "versions": [entry(1)], **wrong}

    with pytest.raises(ValidationError) as refused:
        Manifest.model_validate(fields)

    assert refused.value.error_count() == 1


@pytest.mark.parametrize("name", ["../x", "data/../../x", "/etc/passwd", "data//x", "data/", ""])
def test_stored_names_stay_below_the_store(name):
    with pytest.raises(ValueError, match="name"):
        StoredFile(name=name, num_bytes=0, sha256=DIGEST)


@pytest.mark.parametrize("field", ["version", "serial", "weights_bytes"])
def test_numbers_of_a_manifest_have_at_most_64_bits(field):
    fields = json.loads(entry(1, anchor=1).model_dump_json())

    with pytest.raises(ValueError, match=field):
        VersionEntry.model_validate({**fields, field: 10**400})


def test_run_of_a_manifest_is_a_word_that_terminals_can_show():
    with pytest.raises(ValueError, match="run"):
        Manifest(run="\x1b[2J", architecture="a", epoch=1, versions=[entry(1)])


def header_of(*places: object, shape: object = (4,)) -> bytes:
    tensors = {f"t{i}": {"dtype": "U8", "shape": shape, "data_offsets": place}
               for i, place in enumerate(places)}  # fmt: skip
    return json.dumps(tensors).encode()


@pytest.mark.parametrize(
    "header",
    [
        header_of([0, 4], [0, 4]),
        header_of([0, 4], [8, 12]),
        header_of([4, 8]),
        header_of([0, -4]),
        header_of([0, 4.0]),
        header_of(["0", 4], [4, 8]),
        header_of([0, 4], shape=(-4,)),
        header_of([0, 4], shape=(4.0,)),
        header_of([0, 4], shape=(True, 4)),
        header_of([0, 4], shape="4"),
        header_of([0, 4], shape=(2**63,)),
        header_of([0, 4], shape=65 * (1,)),
        header_of([0, 4], shape=None),
        header_of([False, 4]),
        header_of([0, 4]).replace(b"[4]", b"[1e999]"),
        b'{"a":' * 100_000,
    ],
)
def test_tensors_with_wrong_places_or_shapes_are_not_a_header(header):
    with pytest.raises(DamagedWeightsError, match="not a safetensors header"):
        parse_header(header)


def test_tensor_of_many_dimensions_is_read():
    shape = (*(63 * (1,)), 4)

    assert parse_header(header_of([0, 4], shape=shape)) == [TensorSpec("t0", "U8", shape, 0, 4)]


def test_decompression_allocates_no_more_than_the_piece():
    plane = zstandard.ZstdCompressor().compress(bytes(2**26))
    head = struct.pack("<BBI", 2, 1, 4) + struct.pack("<I", len(plane))

    tracemalloc.start()
    try:
        with pytest.raises(DamagedWeightsError, match="at most 4"):
            decode_piece(np.zeros(4, np.uint8), head + plane, 1)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def index_of(content: bytes) -> memoryview:
    packed = zstandard.ZstdCompressor().compress(content)
    return memoryview(packed + struct.pack("<I8s", len(packed), b"ATWDELT1"))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        json.dumps(
            {"format": 1, "piece_bytes": 2**24, "base_sha256": "", "weights_sha256": "",
             "frames": [[0, 0, 1.5]]}
        ).encode(),
    ],
)  # fmt: skip
def test_malformed_index_is_damaged(content):
    with pytest.raises(DamagedWeightsError, match="not a delta file"):
        parse_index(index_of(content), num_pieces=2000)


def index_with(frames: list[object]) -> memoryview:
    content = {"format": 1, "piece_bytes": 2**24, "base_sha256": "", "weights_sha256": ""}
    return index_of(json.dumps({**content, "frames": frames}).encode())


@pytest.mark.parametrize("frame", [[0, 0, -1], [0, 0, True], [0, -1, 1], ["0", 0, 1], [0, 0], 7])
def test_malformed_frame_is_damaged(frame):
    with pytest.raises(DamagedWeightsError, match="not a delta file"):
        parse_index(index_with([frame]), num_pieces=1)


def test_index_has_at_most_one_frame_per_piece():
    frames = [[i, 0, 1] for i in range(3)]

    assert len(parse_index(index_with(frames), num_pieces=3).frames) == 3
    with pytest.raises(DamagedWeightsError, match="3 frames, expected at most 2"):
        parse_index(index_with(frames), num_pieces=2)


def test_index_of_millions_of_frames_is_refused_before_it_is_decompressed():
    content = index_with([[i, 1, 0] for i in range(300_000)])

    tracemalloc.start()
    try:
        with pytest.raises(DamagedWeightsError, match="bytes, expected at most 1096"):
            parse_index(content, num_pieces=1)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_index_of_weights_with_the_longest_numbers_is_read():
    frames = [[2**63 - 1 - i, 2**63 - 1, 2**63 - 1] for i in range(1000)]

    assert len(parse_index(index_with(frames), num_pieces=1000).frames) == 1000


def test_index_of_many_pieces_is_not_larger_than_a_header(monkeypatch):
    monkeypatch.setattr("example_trainer.weights.format._MAX_HEADER_BYTES", 1000)

    with pytest.raises(DamagedWeightsError, match="at most 1000"):
        parse_index(index_of(b" " * 10_000), num_pieces=10**6)


def test_text_of_an_index_is_quoted_in_errors():
    content = json.dumps({"format": "\x1b[31mX\nversion 1 is fine", "piece_bytes": 1}).encode()

    with pytest.raises(DamagedWeightsError) as refused:
        parse_index(index_of(content), num_pieces=1)

    assert str(refused.value).isprintable()


@pytest.mark.parametrize("kind", [WeightsError, DamagedWeightsError, StoreError])
def test_errors_are_one_line_of_visible_characters_of_bounded_length(kind):
    message = str(kind("\x1b[31mred\r\n2026-01-01 INFO version 1 is fine" + 10_000 * "x"))

    assert message.isprintable()
    assert len(message) <= 2000

"""Files of a weights store: the manifest, exact deltas of tensors, and the choice of a chain.

    version 1 ──delta──> version 2 ──delta──> ... ──delta──> version N
    anchor (whole safetensors)                     anchor

A delta holds, for each changed piece of a tensor, the difference of its elements as unsigned
integers, modulo their width. Adding it to the base restores every bit, for any element type.
Elements that the optimizer changed by one unit in the last place have a difference of 1 or -1,
which compresses better than an exclusive or of the bits (see `benchmarks/weights.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atroposlib.errors import AtroposError
from atroposlib.utils.text import inert_line

__all__ = [
    "FORMAT",
    "MOST_FILE_BYTES",
    "MOST_MANIFEST_BYTES",
    "NEVER_PUBLISHED",
    "PIECE_BYTES",
    "Chain",
    "DamagedWeightsError",
    "DeltaIndex",
    "Frame",
    "Manifest",
    "Piece",
    "StoredFile",
    "TensorSpec",
    "VersionEntry",
    "WeightsError",
    "architecture_of",
    "choose_chain",
    "decode_piece",
    "encode_piece",
    "header_size",
    "is_anchor_due",
    "is_published_name",
    "kept_entries",
    "pack_index",
    "parse_header",
    "parse_index",
    "parse_manifest",
    "pieces_of",
    "weights_header",
]

FORMAT = 1
NEVER_PUBLISHED = (".safetensors", ".bin", ".pt", ".pth", ".index.json", "atropos_version.json")
"""Ends of names of weights, pickled ones among them, and of records of a version."""
MOST_FILE_BYTES = 64 * 2**20
"""Of a config or a tokenizer."""
MOST_MANIFEST_BYTES = 2**24
"""Enough for 20,000 versions."""
_MAX_FILES = 10_000
"""Configs and tokenizers in a manifest."""
PIECE_BYTES = 2**24
"""Tensors are compared and restored in pieces of this size, which bounds the memory."""
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
_MAX_DIMENSIONS = 64  # the limit of PyTorch
_MAX_SIZE = 2**63 - 1
_MAX_INDEX_BYTES = 1024
"""Of the JSON of an index without its frames."""
_MAX_FRAME_BYTES = 72
"""Of a frame in that JSON: three numbers of at most 19 digits."""
_MAGIC = b"ATWDELT1"
_TAIL = struct.Struct("<I8s")
_FRAME = struct.Struct("<BBI")
_PLANE = struct.Struct("<I")
_GAPS, _PLANES = 1, 2
_MOST_CHANGED_FOR_GAPS = 0.5
_MAX_MESSAGE_CHARACTERS = 2000
_LEVEL = 1
"""Of zstd: level 9 gains less than a tenth of the size and takes several times as long."""

Bytes = NDArray[np.uint8]


class WeightsError(AtroposError, RuntimeError):
    """A version cannot be published, fetched or applied.

    The message is one line of visible characters, since it may quote files of the store.
    """

    def __init__(self, message: str) -> None:
        super().__init__(inert_line(message, max_characters=_MAX_MESSAGE_CHARACTERS))


class DamagedWeightsError(WeightsError):
    """A file's content is not what its manifest, or its format, says."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name
        """File of the store."""


class TensorSpec(NamedTuple):
    """A tensor in a safetensors file; `start` and `stop` are byte offsets in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def width(self) -> int:
        """Bytes of the unsigned integers as which elements are compared."""
        size = math.prod(self.shape)
        width = self.num_bytes // size if size else 1
        # Types below one byte, as those of 4 bits, are compared byte by byte.
        return width if width in (1, 2, 4, 8) and width * size == self.num_bytes else 1


class Piece(NamedTuple):
    """Bytes `start` to `stop` of the data section, in the tensor of this index."""

    tensor: int
    number: int
    start: int
    stop: int
    width: int


class Frame(NamedTuple):
    """Place of a compressed piece in a delta file."""

    tensor: int
    piece: int
    offset: int
    num_bytes: int


def parse_header(header: bytes) -> list[TensorSpec]:
    """Return the tensors of a safetensors file, by offset, from its JSON header.

    Raises:
        DamagedWeightsError: the header is not that of a safetensors file.
    """
    try:
        entries = json.loads(header)
        specs = [
            TensorSpec(name, str(e["dtype"]), _shape(e["shape"]), *map(_size, e["data_offsets"]))
            for name, e in entries.items()
            if name != "__metadata__"
        ]
        specs.sort(key=lambda spec: (spec.start, spec.stop, spec.name))
        ends = [0, *(spec.stop for spec in specs)]
        # As safetensors requires; with overlaps, a small file would become a large one.
        for spec, end in zip(specs, ends[:-1], strict=True):
            if spec.start != end or spec.stop < spec.start:
                raise ValueError(f"{spec.name} is not directly after the tensor before it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedWeightsError(f"not a safetensors header: {error!r}") from error
    return specs


def _shape(numbers: list[object]) -> tuple[int, ...]:
    # Without limits, the product of many long numbers would take minutes.
    if len(numbers) > _MAX_DIMENSIONS:
        raise ValueError(f"{len(numbers)} dimensions, expected at most {_MAX_DIMENSIONS}")
    return tuple(map(_size, numbers))


def _size(number: object) -> int:
    """Return a number of a JSON document if it can be a size, a place or a count."""
    if type(number) is not int or not 0 <= number <= _MAX_SIZE:
        raise ValueError("expected integers from 0 to 2**63 - 1")
    return number


def weights_header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[TensorSpec]]:
    """Return the first bytes of a safetensors file with these tensors, and their new places.

    The order depends on names and types only, so that equal weights make equal files. Wider types
    are first, so that every tensor is aligned.
    """
    placed: list[TensorSpec] = []
    start = 0
    for spec in sorted(specs, key=lambda spec: (-spec.width, spec.name)):
        placed.append(spec._replace(start=start, stop=start + spec.num_bytes))
        start += spec.num_bytes
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec in placed:
        offsets = [spec.start, spec.stop]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, placed


def header_size(first_bytes: bytes) -> int:
    """Return the size of the JSON header of a safetensors file from its first 8 bytes."""
    size = int.from_bytes(first_bytes, "little") if len(first_bytes) == 8 else 0
    if not 0 < size <= _MAX_HEADER_BYTES:
        raise DamagedWeightsError("not a safetensors file")
    return size


def architecture_of(specs: Sequence[TensorSpec]) -> str:
    """Return a digest of the names, types and shapes of a model's tensors."""
    content = sorted((spec.name, spec.dtype, list(spec.shape)) for spec in specs)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pieces_of(specs: Sequence[TensorSpec]) -> Iterator[Piece]:
    """Yield the pieces of all tensors in the order of the file; they cover it without gaps."""
    for i, spec in enumerate(specs):
        for number, start in enumerate(range(spec.start, spec.stop, PIECE_BYTES)):
            stop = min(start + PIECE_BYTES, spec.stop)
            yield Piece(i, number, start, stop, spec.width)


# Deltas


def encode_piece(base: Bytes, new: Bytes, width: int) -> tuple[bytes, int]:
    """Return the compressed difference of two pieces of equal size, and the elements changed.

    Empty if they are equal. With few changes, it has the gaps between changed elements and their
    differences, otherwise all differences. Both are split into planes: the first bytes of all
    numbers, then the second ones.
    """
    unsigned = np.dtype(f"<u{width}")
    old_elements, elements = base.view(unsigned), new.view(unsigned)
    changed = np.flatnonzero(old_elements != elements)
    if not len(changed):
        return b"", 0
    count = len(changed)
    if count > _MOST_CHANGED_FOR_GAPS * len(elements):
        streams = [_zigzag(elements - old_elements, width)]
        code = _PLANES
    else:
        gaps = (np.diff(changed, prepend=-1) - 1).astype("<u4")
        differences = elements[changed] - old_elements[changed]
        streams = [gaps, _zigzag(differences, width)]
        code = _GAPS
    planes = [plane for stream in streams for plane in _planes(stream)]
    head = _FRAME.pack(code, width, count)
    return head + b"".join(_PLANE.pack(len(plane)) + plane for plane in planes), count


def decode_piece(base: Bytes, frame: bytes | memoryview, width: int) -> Bytes:
    """Return the piece whose difference to `base` was encoded.

    Raises:
        DamagedWeightsError: the frame is not one of a piece of this size.
    """
    try:
        code, frame_width, count = _FRAME.unpack_from(frame)
        size = len(base) // width
        if frame_width != width or count > size or code not in (_GAPS, _PLANES):
            raise ValueError(f"code {code}, width {frame_width}, {count} of {size} elements")
        restored = base.view(f"<u{width}").copy()
        if code == _PLANES:
            differences, _ = _from_planes(frame, _FRAME.size, size, width)
            restored += _unzigzag(differences, width)
        else:
            gaps, place = _from_planes(frame, _FRAME.size, count, 4)
            differences, _ = _from_planes(frame, place, count, width)
            positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
            if count and positions[-1] >= size:
                raise ValueError("a position outside the piece")
            restored[positions] += _unzigzag(differences, width)
    except (ValueError, struct.error, zstandard.ZstdError, IndexError) as error:
        raise DamagedWeightsError(f"a frame of the delta is damaged: {error}") from error
    result: Bytes = restored.view(np.uint8)
    return result


def _zigzag(differences: NDArray[np.unsignedinteger], width: int) -> NDArray[np.unsignedinteger]:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., modulo the width."""
    signed = differences.view(f"<i{width}")
    mapped: NDArray[np.unsignedinteger] = ((signed << 1) ^ (signed >> (8 * width - 1))).view(
        f"<u{width}"
    )
    return mapped


def _unzigzag(mapped: NDArray[np.unsignedinteger], width: int) -> NDArray[np.unsignedinteger]:
    one = mapped.dtype.type(1)
    zero = mapped.dtype.type(0)
    back: NDArray[np.unsignedinteger] = (mapped >> one) ^ (zero - (mapped & one))
    return back


def _planes(numbers: NDArray[np.unsignedinteger]) -> Iterator[bytes]:
    width = numbers.dtype.itemsize
    by_byte = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width)
    for i in range(width):
        plane = np.ascontiguousarray(by_byte[:, i])
        yield zstandard.ZstdCompressor(level=_LEVEL).compress(plane.data) if plane.any() else b""


def _from_planes(
    frame: bytes | memoryview, place: int, count: int, width: int
) -> tuple[NDArray[np.unsignedinteger], int]:
    """Return `count` numbers whose planes start at `place`, and the place after them."""
    numbers = np.zeros((count, width), dtype=np.uint8)
    for i in range(width):
        (size,) = _PLANE.unpack_from(frame, place)
        place += _PLANE.size
        if size:
            part = frame[place : place + size]
            plane = _decompressed(part, count)
            numbers[:, i] = np.frombuffer(plane, dtype=np.uint8)  # raises if it has another size
            place += size
    return numbers.reshape(-1).view(f"<u{width}"), place


def _decompressed(part: bytes | memoryview, limit: int) -> bytes:
    """Return at most `limit` bytes; zstandard allocates the size that the part itself names."""
    size = zstandard.frame_content_size(part)
    if size > limit:
        raise ValueError(f"{size} bytes, expected at most {limit}")
    return zstandard.ZstdDecompressor().decompress(part, max_output_size=limit)


class DeltaIndex(NamedTuple):
    """Content of a delta file: what it applies to, what it results in, where its pieces are."""

    base_sha256: str
    weights_sha256: str
    frames: dict[tuple[int, int], Frame]
    """By tensor and piece number."""


def pack_index(base_sha256: str, weights_sha256: str, frames: Sequence[Frame]) -> bytes:
    """Return the end of a delta file, after its frames."""
    content = {
        "format": FORMAT,
        "piece_bytes": PIECE_BYTES,
        "base_sha256": base_sha256,
        "weights_sha256": weights_sha256,
        "frames": [[frame.tensor, frame.piece, frame.num_bytes] for frame in frames],
    }
    packed = zstandard.ZstdCompressor(level=9).compress(json.dumps(content).encode())
    return packed + _TAIL.pack(len(packed), _MAGIC)


def parse_index(content: memoryview, *, num_pieces: int) -> DeltaIndex:
    """Return the index of a delta file from its whole content.

    Args:
        content: The delta file.
        num_pieces: Pieces of the weights to which it applies, of which each has at most one frame.

    Raises:
        DamagedWeightsError: it is not a delta of this format, or of other weights.
    """
    try:
        size, magic = _TAIL.unpack(content[-_TAIL.size :])
        if magic != _MAGIC:
            raise ValueError("it does not end as a delta")
        packed = content[len(content) - _TAIL.size - size : len(content) - _TAIL.size]
        # A small file could become millions of frames, each of which takes hundreds of bytes.
        limit = _MAX_INDEX_BYTES + _MAX_FRAME_BYTES * num_pieces
        found = json.loads(_decompressed(packed, min(limit, _MAX_HEADER_BYTES)))
        if (found["format"], found["piece_bytes"]) != (FORMAT, PIECE_BYTES):
            raise ValueError(f"format {found['format']!r}, expected {FORMAT}")
        frames = _frames(found["frames"], num_pieces)
        return DeltaIndex(found["base_sha256"], found["weights_sha256"], frames)
    except _NOT_A_DELTA as error:
        raise DamagedWeightsError(f"not a delta file: {error}") from error


def _frames(entries: list[list[object]], num_pieces: int) -> dict[tuple[int, int], Frame]:
    if len(entries) > num_pieces:
        raise ValueError(f"{len(entries)} frames, expected at most {num_pieces}")
    frames: dict[tuple[int, int], Frame] = {}
    offset = 0
    for entry in entries:
        tensor, piece, num_bytes = map(_size, entry)
        frames[tensor, piece] = Frame(tensor, piece, offset, num_bytes)
        offset += num_bytes
    return frames


_NOT_A_DELTA = (
    ValueError, KeyError, TypeError, RecursionError, struct.error, zstandard.ZstdError
)  # fmt: skip


# The manifest


StoredName = Annotated[str, Field(pattern=r"^(?:\w[\w.+\-]*/)*\w[\w.+\-]*$", max_length=256)]
"""Relative to the store, and below it."""


class StoredFile(BaseModel):
    """A file of a store."""

    model_config = ConfigDict(frozen=True)

    name: StoredName
    num_bytes: int = Field(ge=0, le=_MAX_SIZE)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class VersionEntry(BaseModel):
    """A version in the manifest. It has a delta, an anchor, or both."""

    model_config = ConfigDict(frozen=True)

    serial: int = Field(ge=1, le=_MAX_SIZE)
    """Counts the published versions; unlike `version`, it never decreases."""
    version: int = Field(ge=0, le=_MAX_SIZE)
    """Policy version: the optimizer steps of the trainer. A resumed run may repeat some."""
    weights_sha256: str
    """Digest of the whole safetensors file."""
    weights_bytes: int = Field(ge=0, le=_MAX_SIZE)
    base_sha256: str | None = None
    """Weights to which the delta applies, those of the serial before."""
    delta: StoredFile | None = None
    anchor: StoredFile | None = None
    changed_fraction: float | None = None
    """Share of the elements that differ from the base."""
    published_at: float = 0.0
    """Unix time of the publisher's clock."""


def is_published_name(name: str) -> bool:
    """Return whether a manifest may name a file of a checkpoint so: no path, and no weights."""
    return bool(re.fullmatch(r"\w[\w.+\- ]*", name)) and not name.endswith(NEVER_PUBLISHED)


class Manifest(BaseModel):
    """The only file of a store that is overwritten, and the last one that a publisher writes."""

    format: int = FORMAT
    run: str = Field(pattern=r"^\w+$")
    """Random id of the store's run; a follower never mixes two."""
    architecture: str
    """`architecture_of` the weights."""
    epoch: int = Field(ge=0, le=_MAX_SIZE)
    """Counts the publishers that wrote here, one after another."""
    versions: list[VersionEntry] = Field(fail_fast=True)
    """By serial; consecutive."""
    files: dict[str, StoredFile] = {}
    """Config and tokenizer, by the name in a checkpoint."""

    @field_validator("files", mode="before")
    @classmethod
    def _limit_files(cls, value: object) -> object:
        # pydantic keeps an error for each entry.
        if isinstance(value, dict) and len(value) > _MAX_FILES:
            raise ValueError(f"{len(value)} files, expected at most {_MAX_FILES}")
        return value

    @field_validator("files")
    @classmethod
    def _refuse_paths(cls, value: dict[str, StoredFile]) -> dict[str, StoredFile]:
        wrong = [name for name in value if not is_published_name(name)]
        if wrong:
            raise ValueError(f"not a file name: {wrong[0]!r}")
        return value

    @property
    def head(self) -> VersionEntry:
        return self.versions[-1]

    def stored_names(self) -> set[str]:
        """Return the names of all files in use."""
        parts = [part for entry in self.versions for part in (entry.delta, entry.anchor) if part]
        return {file.name for file in [*parts, *self.files.values()]}


def parse_manifest(content: bytes) -> Manifest:
    """Return a manifest.

    Raises:
        DamagedWeightsError: it is not one of this format, or has no versions.
    """
    try:
        found = json.loads(content).get("format")
        if found != FORMAT:
            raise DamagedWeightsError(
                f"the manifest has format {found!r}, this version reads {FORMAT}; use the same "
                "version of atropos-weights on both sides"
            )
        manifest = Manifest.model_validate_json(content)
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise DamagedWeightsError(f"the manifest cannot be read: {first}") from error
    serials = [entry.serial for entry in manifest.versions]
    if not serials or serials != list(range(serials[0], serials[0] + len(serials))):
        raise DamagedWeightsError(f"the manifest lists the serials {serials[:5]}..., not in order")
    return manifest


class Chain(NamedTuple):
    """Files that lead to the newest version: an anchor, unless a local one is used, and deltas."""

    anchor: VersionEntry | None
    deltas: list[VersionEntry]


def choose_chain(
    versions: Sequence[VersionEntry],
    local_sha256: str | None,
    *,
    damaged: Collection[str] = (),
) -> Chain | None:
    """Return the chain to the last version with the fewest bytes; None if there is none.

    Args:
        versions: Entries of the manifest, or those up to the wanted version.
        local_sha256: Weights that the follower has; None: nothing.
        damaged: Names of files that must not be used.
    """
    best: tuple[int, VersionEntry | None, int] | None = None  # bytes, anchor, number of deltas
    deltas: list[VersionEntry] = []
    num_bytes = 0

    def consider(anchor: VersionEntry | None) -> None:
        nonlocal best
        total = num_bytes + (anchor.anchor.num_bytes if anchor and anchor.anchor else 0)
        if best is None or total < best[0]:
            best = total, anchor, len(deltas)

    for entry in reversed(versions):
        if entry.weights_sha256 == local_sha256:
            consider(None)
        if entry.anchor is not None and entry.anchor.name not in damaged:
            consider(entry)
        if entry.delta is None or entry.delta.name in damaged:
            break
        deltas.append(entry)
        num_bytes += entry.delta.num_bytes
    else:
        if deltas and deltas[-1].base_sha256 == local_sha256:  # the version before the oldest
            consider(None)
    return None if best is None else Chain(best[1], deltas[: best[2]][::-1])


def is_anchor_due(
    versions: Sequence[VersionEntry], delta_bytes: int, *, every: int, share: float
) -> bool:
    """Return whether the version after `versions` needs an anchor.

    It does after `every` versions without one, and if the deltas since the last one, with the new
    `delta_bytes`, are larger than `share` of the weights.
    """
    num_bytes = delta_bytes
    for since, entry in enumerate(reversed(versions), start=1):
        if entry.anchor is not None:
            return since >= every or num_bytes > share * entry.weights_bytes
        num_bytes += entry.delta.num_bytes if entry.delta else 0
    return True


def kept_entries(versions: Sequence[VersionEntry], keep: int) -> list[VersionEntry]:
    """Return the last `keep` versions, and those before them from the anchor they need."""
    first = max(0, len(versions) - keep)
    while first > 0 and versions[first].anchor is None:
        first -= 1
    return list(versions[first:])

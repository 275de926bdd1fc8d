"""The output of an export: JSON Lines, a Parquet file, a dataset folder, or a data set on the hub.

Invariants: an existing output is overwritten only on request; it is valid after every write; an
export can be resumed.

JSON Lines grow in place, whole lines per write. Parquet and dataset folders cannot grow. Their
records are kept in `NAME.part.jsonl` in the same folder until the export ends, also when it ends
early. After a crash `--resume` continues from that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import unwritable

__all__ = [
    "Line",
    "Mode",
    "Output",
    "OutputKind",
    "check_repository",
    "content_key",
    "encode_line",
    "kind_of",
    "open_output",
    "push_to_hub",
    "with_score",
]

_SCORE = "score"
_KEY_BYTES = 16
_encoder = msgspec.json.Encoder()
_canonical = msgspec.json.Encoder(order="deterministic")


class Line(NamedTuple):
    """One record as it is written."""

    content: bytes
    """JSON, without the line break."""
    key: bytes
    """Equal for records with equal content, regardless of their score."""
    is_repaired: bool
    """Whether half characters, which no file can hold, were replaced."""


def encode_line(record: Mapping[str, Any], *, score: float | None) -> Line:
    """Write a record.

    Args:
        record: the fields of its format.
        score: added as the field `score`; None leaves it out.
    """
    is_repaired = False
    try:
        key = content_key(record)
    except UnicodeEncodeError:
        record = without_lone_surrogates(record)
        key, is_repaired = content_key(record), True
    fields = record if score is None else with_score(record, score)
    return Line(_encoder.encode(fields), key, is_repaired)


def content_key(record: Mapping[str, Any]) -> bytes:
    """Return what tells records apart: a digest of all fields but the score."""
    said = {name: value for name, value in record.items() if name != _SCORE}
    return hashlib.blake2b(_canonical.encode(said), digest_size=_KEY_BYTES).digest()


def without_lone_surrogates(value: Any) -> Any:
    """Return a value in which halves of surrogate pairs are joined, or replaced where alone."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {
            without_lone_surrogates(name): without_lone_surrogates(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [without_lone_surrogates(entry) for entry in value]
    return value


def with_score(record: Mapping[str, Any], score: float) -> dict[str, Any]:
    """Insert the score after the chosen side of a pair, else at the end."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        fields[name] = value
        if name == "pos":
            fields[_SCORE] = score
    fields.setdefault(_SCORE, score)
    return fields


_SHARD = Path("data") / "train-00000-of-00001.parquet"
# Without a list of its files: `datasets` then finds them by their names and caches by what they
# hold. With one it caches by the folder's name alone, and shows an earlier export of that name.
_CARD = "{num_rows} rows with the columns {columns}.\n"
_ROWS_PER_GROUP = 10_000


def parquet_of(path: Path) -> Path:
    """Return the Parquet file of an output: itself, or the one in the folder."""
    return path / _SHARD if path.is_dir() else path


def read_columns(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an output that `write_columns` made.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(parquet_of(path)) as file:
            for batch in file.iter_batches(_ROWS_PER_GROUP):
                yield from (_without_padding(row) for row in batch.to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} is not an export that can be added to: {error}") from error


def write_columns(records: Sequence[dict[str, Any]], path: Path, *, is_folder: bool) -> None:
    """Write records in place of what is at `path`; a reader sees the old or the new ones.

    Args:
        records: with the same fields all.
        path: file or folder.
        is_folder: whether to make a folder with a card, as the hub has them.

    Raises:
        ConfigError: a field holds values of several kinds, which a column cannot.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        table = pyarrow.Table.from_pylist(list(records))
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{path} cannot be written: a field holds values of several kinds ({error}); "
            "--output jsonl can hold them"
        ) from error
    unfinished = path.with_name(f"{path.name}.tmp")
    if not is_folder:
        parquet.write_table(table, unfinished, row_group_size=_ROWS_PER_GROUP)
        unfinished.replace(path)
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / _SHARD).parent.mkdir(parents=True)
    parquet.write_table(table, unfinished / _SHARD, row_group_size=_ROWS_PER_GROUP)
    card = _CARD.format(num_rows=table.num_rows, columns=", ".join(table.column_names))
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    if path.is_dir():
        # A folder cannot take another's place in one step: file by file it can.
        (unfinished / _SHARD).replace(path / _SHARD)
        (unfinished / "README.md").replace(path / "README.md")
        shutil.rmtree(unfinished)
    else:
        unfinished.replace(path)


def _without_padding(value: Any) -> Any:
    """Drop the nulls that a column adds to objects which lack a field others have."""
    if isinstance(value, dict):
        return {name: _without_padding(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_padding(entry) for entry in value]
    return value


OutputKind = Literal["jsonl", "parquet", "dataset"]
Mode = Literal["new", "append", "resume"]

_NAME_FIELD = "score"


@dataclass
class Existing:
    """The content that an earlier export left in a file."""

    keys: set[bytes] = field(default_factory=set)
    """Content keys of its records."""
    num_records: int = 0
    fields: frozenset[str] | None = None
    """Names of the fields of its first record; None when there is none."""
    broken_lines: list[int] = field(default_factory=list)
    """Numbers of lines that are not records; they are kept."""
    num_cut_bytes: int = 0
    """Half a line at the end, left by a killed export, that was removed."""


class Output:
    """An open output; `open_output` makes one.

    Attributes:
        path: the output.
        existing: what was there before.
        num_written: records written since it was opened.
    """

    def __init__(self, path: Path, kind: OutputKind, file: BinaryIO, existing: Existing) -> None:
        self.path = path
        self.existing = existing
        self.num_written = 0
        self._kind = kind
        self._file = file

    def __contains__(self, key: bytes) -> bool:
        return key in self.existing.keys

    def write(self, lines: Sequence[Line], fields: Iterable[str]) -> None:
        """Add records; once this returns they survive the end of the process.

        Raises:
            ConfigError: the file holds records of another format.
            OSError: the disk is full, or the like; what was written before stays valid.
        """
        if not lines:
            return
        self._check_fields(frozenset(fields) - {_NAME_FIELD})
        self._file.write(b"".join(line.content + b"\n" for line in lines))
        self._file.flush()
        self.existing.keys.update(line.key for line in lines)
        self.num_written += len(lines)

    def close(self) -> None:
        """Finish the output; Parquet and dataset folders come into being here.

        An export without a record leaves no file.

        Raises:
            ConfigError: the records do not fit into columns; they are in `NAME.part.jsonl`.
        """
        if self._file.closed:
            return
        self._file.close()
        part = self.path if self._kind == "jsonl" else _part_of(self.path)
        if not self.num_written and not self.existing.num_records:
            part.unlink()
        elif self._kind != "jsonl":
            write_columns(_records(part), self.path, is_folder=self._kind == "dataset")
            part.unlink()

    def _check_fields(self, fields: frozenset[str]) -> None:
        known = self.existing.fields
        if known is None:
            self.existing.fields = fields
        elif known != fields:
            raise ConfigError(
                f"{self.path} holds records with {', '.join(sorted(known))}, the format asked for "
                f"has {', '.join(sorted(fields))}; take the same --format, or another file"
            )


def kind_of(path: Path, asked: str) -> OutputKind:
    """Return what to write: what was asked for, or with `auto` what the name says."""
    if asked in ("jsonl", "parquet", "dataset"):
        return asked  # type: ignore[return-value]
    if path.suffix == ".parquet":
        return "parquet"
    return "dataset" if path.is_dir() else "jsonl"


def open_output(path: Path, kind: OutputKind, mode: Mode) -> Output:
    """Open an output, making missing folders.

    Args:
        path: file, or folder for `dataset`.
        kind: what to write.
        mode: `new` refuses what exists; `append` and `resume` keep it and add to it.

    Raises:
        ConfigError: there is something already, it is not an export, or nothing can be written.
    """
    part = path if kind == "jsonl" else _part_of(path)
    for found in {path, part}:
        if mode == "new" and found.exists():
            raise ConfigError(
                f"{found} exists and is left as it is; --resume goes on with that export, "
                "--append-to-previous adds to it, or choose another name"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if part != path and path.exists() and not part.exists():
            _write_part(part, read_columns(path))
        existing = _read_existing(part) if part.exists() else Existing()
        file = part.open("xb" if mode == "new" else "ab")
    except OSError as error:
        raise unwritable(path, error, None) from error
    return Output(path, kind, file, existing)


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.jsonl")


def _write_part(part: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write all records or no file: what is half there would be taken for an unfinished export."""
    unfinished = part.with_name(part.name + ".tmp")
    with unfinished.open("wb") as file:
        for record in records:
            file.write(json.dumps(record).encode() + b"\n")
    unfinished.replace(part)


def _records(part: Path) -> list[dict[str, Any]]:
    with part.open("rb") as file:
        return [record for line in file if isinstance(record := _decoded(line), dict)]


def _read_existing(path: Path) -> Existing:
    existing = Existing()
    end = 0  # of the last whole line
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _decoded(line)
            if isinstance(record, dict):
                _take_note(existing, record)
            elif line.strip() and line.endswith(b"\n"):
                existing.broken_lines.append(number)
            if line.endswith(b"\n") or isinstance(record, dict):
                end += len(line)
        size = file.tell()
    if size and not existing.num_records and (existing.broken_lines or not _is_our_half(path)):
        raise ConfigError(f"{path} holds no records of an export; it is left as it is")
    existing.num_cut_bytes = size - end
    _mend_end(path, end)
    return existing


def _is_our_half(path: Path) -> bool:
    """Whether a file without any whole line begins as our records do."""
    with path.open("rb") as file:
        return file.read(2) == b'{"'


def _take_note(existing: Existing, record: dict[str, Any]) -> None:
    existing.keys.add(content_key(record))
    existing.num_records += 1
    if existing.fields is None:
        existing.fields = frozenset(record) - {_NAME_FIELD}


def _mend_end(path: Path, end: int) -> None:
    """Remove half a line at the end; give the last whole one its line break."""
    with path.open("rb+") as file:
        file.truncate(end)
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def check_repository(name: str) -> str:
    """Return the name of a repository if the hub could have it; ConfigError otherwise."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {name}: expected OWNER/NAME ({error})") from error
    return name


def push_to_hub(
    path: Path, repository: str, *, is_public: bool, load: Callable[..., Any] | None = None
) -> None:
    """Upload an export as the split `train`; the account is the one of `hf auth login`.

    Args:
        path: JSONL, Parquet or dataset folder.
        repository: OWNER/NAME; made when missing.
        is_public: whether everybody may read a repository that is made here.
        load: reads the export; `datasets.load_dataset` by default.

    Raises:
        ConfigError: the hub cannot be reached or refuses; the export is unharmed.
    """
    if load is None:
        from datasets import load_dataset

        load = load_dataset
    try:
        load(*_load_arguments(path), split="train").push_to_hub(repository, private=not is_public)
    except Exception as error:  # of three libraries, each with errors of its own
        raise ConfigError(
            f"{path} is written but not on the hub ({type(error).__name__}: {error}); "
            f"when the hub can be reached: hf upload --repo-type dataset {repository} {path}"
        ) from error


def _load_arguments(path: Path) -> tuple[Any, ...]:
    if path.is_dir():
        return (str(path),)
    kind = "parquet" if path.suffix == ".parquet" else "json"
    return (kind, None, None, str(path))

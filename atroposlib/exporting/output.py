"""The output of an export: JSON Lines, a Parquet file, a dataset folder, or a data set on the hub.

Invariants: existing records are never overwritten; a JSON Lines file is valid after every write;
an export can be resumed; two exports do not write to one output at the same time.

Whole lines are appended to JSON Lines. Parquet files and dataset folders are written when the
export ends; until then their records are in `NAME.part.jsonl` next to them. After a crash,
`--resume` continues from that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.utils.text import encodable_texts
from atroposlib.utils.writable import lock_file, unwritable

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
    """One encoded record."""

    content: bytes
    """JSON, without the line break."""
    key: bytes
    """Equal for records with equal content, regardless of their score."""
    is_repaired: bool
    """Whether lone surrogates, which UTF-8 cannot encode, were replaced."""


def encode_line(record: Mapping[str, Any], *, score: float | None) -> Line:
    """Encode a record; a `score` that is not None is added as a field."""
    is_repaired = False
    try:
        key = content_key(record)
    except UnicodeEncodeError:
        record = encodable_texts(record)
        key, is_repaired = content_key(record), True
    fields = record if score is None else with_score(record, score)
    return Line(_encoder.encode(fields), key, is_repaired)


def content_key(record: Mapping[str, Any]) -> bytes:
    """Return a digest of all fields except the score; nulls in objects count as missing.

    Raises:
        UnicodeEncodeError: the record has lone surrogates.
    """
    content = {name: value for name, value in record.items() if name != _SCORE}
    encoded = _canonical.encode(content)
    if b"null" in encoded:  # columns do not distinguish a null from a missing entry
        encoded = _canonical.encode(_without_nulls(content))
    return hashlib.blake2b(encoded, digest_size=_KEY_BYTES).digest()


def with_score(record: Mapping[str, Any], score: float) -> dict[str, Any]:
    """Return a record with its score: after the field `pos` if there is one, else at the end."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        fields[name] = value
        if name == "pos":
            fields[_SCORE] = score
    fields.setdefault(_SCORE, score)
    return fields


_SHARD = Path("data") / "train-00000-of-00001.parquet"
# The card has no list of files: with one, `datasets` caches by the folder's name alone and loads an
# earlier export of that name. Without one, it finds files by name and caches by content.
_CARD = "{num_rows} rows with the columns {columns}.\n"
_ROWS_PER_GROUP = 10_000


def read_columns(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an output of `write_columns`.

    Raises:
        ConfigError: it does not exist or cannot be read.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path / _SHARD if path.is_dir() else path) as file:
            for batch in file.iter_batches(_ROWS_PER_GROUP):
                yield from (_without_nulls(row) for row in batch.to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} is not an export, so nothing can be added: {error}") from error


def write_columns(records: Sequence[dict[str, Any]], path: Path, *, is_folder: bool) -> None:
    """Replace the file or folder at `path`; a reader sees either the old or the new records.

    Args:
        records: Records with the same fields.
        path: File or folder.
        is_folder: Whether to write a folder with a dataset card.

    Raises:
        ConfigError: a field has values that a column cannot store, such as some of several types,
            empty objects, or integers beyond 64 bits.
        OSError: the write failed; an earlier output is unchanged.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    unfinished = path.with_name(f"{path.name}.tmp")
    file = unfinished / _SHARD if is_folder else unfinished
    if is_folder:
        shutil.rmtree(unfinished, ignore_errors=True)
        file.parent.mkdir(parents=True)
    try:
        table = pyarrow.Table.from_pylist(list(records))
        parquet.write_table(table, file, row_group_size=_ROWS_PER_GROUP)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
        _remove(unfinished)
        raise ConfigError(
            f"{path} cannot be written: a field has values that a column cannot store ({error}); "
            "--output jsonl accepts them"
        ) from error
    except OSError:
        _remove(unfinished)
        raise
    if not is_folder:
        unfinished.replace(path)
        return
    card = _CARD.format(num_rows=table.num_rows, columns=", ".join(table.column_names))
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    if path.is_dir():
        # A folder cannot be replaced atomically; its files can.
        (unfinished / _SHARD).replace(path / _SHARD)
        (unfinished / "README.md").replace(path / "README.md")
        shutil.rmtree(unfinished)
    else:
        unfinished.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _without_nulls(value: Any) -> Any:
    """Remove nulls from objects; a column adds them to objects without some of its fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


OutputKind = Literal["jsonl", "parquet", "dataset"]
Mode = Literal["new", "append", "resume"]


@dataclass
class Existing:
    """The content of an output before an export."""

    keys: Counter[bytes] = field(default_factory=Counter)
    """Number of records by content key, new ones included."""
    num_records: int = 0
    fields: frozenset[str] | None = None
    """Field names of the first record, without `score`; None if there are no records."""
    broken_lines: list[int] = field(default_factory=list)
    """Numbers of lines that are not records; they are kept."""
    num_cut_bytes: int = 0
    """Size of an incomplete last line, left by a killed export, that was removed."""


class Output:
    """An open output, made by `open_output`.

    Attributes:
        path: File or folder.
        existing: The content before this export.
        num_written: Records written since the output was opened.
    """

    def __init__(self, path: Path, kind: OutputKind, file: BinaryIO, existing: Existing) -> None:
        self.path = path
        self.existing = existing
        self.num_written = 0
        self._kind = kind
        self._file = file

    def __contains__(self, key: bytes) -> bool:
        return key in self.existing.keys

    @property
    def part(self) -> Path:
        """The JSON Lines file that has the records until the output is closed."""
        return self.path if self._kind == "jsonl" else _part_of(self.path)

    def write(self, lines: Sequence[Line], fields: Iterable[str]) -> None:
        """Append records; they are flushed to the operating system.

        Raises:
            ConfigError: the file has records of another format.
            OSError: the write failed; records written before stay valid.
        """
        if not lines:
            return
        self._check_fields(frozenset(fields) - {_SCORE})
        self._file.write(b"".join(line.content + b"\n" for line in lines))
        self._file.flush()
        self.existing.keys.update(line.key for line in lines)
        self.num_written += len(lines)

    def close(self) -> None:
        """Finish the output: write a Parquet file or dataset folder, remove a file without records.

        Raises:
            ConfigError: the records do not fit into columns; they are in `part`.
            OSError: the output cannot be written; its records are in `part`.
        """
        if self._file.closed:
            return
        is_empty = not self.num_written and not self.existing.num_records
        with self._file:  # locked until the records are in place
            self._file.flush()
            if self._kind != "jsonl" and not is_empty:
                write_columns(_records(self.part), self.path, is_folder=self._kind == "dataset")
        if self._kind != "jsonl" or is_empty:
            self.part.unlink()

    def _check_fields(self, fields: frozenset[str]) -> None:
        known = self.existing.fields
        if known is None:
            self.existing.fields = fields
        elif known != fields:
            raise ConfigError(
                f"{self.path} has records with {', '.join(sorted(known))}, but this --format "
                f"has {', '.join(sorted(fields))}; use the same --format, or another file"
            )


def kind_of(path: Path, wanted: str) -> OutputKind:
    """Return the kind of output; `auto` selects it by the name."""
    if wanted in ("jsonl", "parquet", "dataset"):
        return wanted  # type: ignore[return-value]
    if path.suffix == ".parquet":
        return "parquet"
    return "dataset" if path.is_dir() else "jsonl"


def open_output(path: Path, kind: OutputKind, mode: Mode) -> Output:
    """Open an output, creating missing folders.

    Args:
        path: A file, or a folder for `dataset`.
        kind: Kind of output.
        mode: `new` rejects an existing output; `append` and `resume` add to it.

    Raises:
        ConfigError: the output exists, is not an export, is not writable, or another export
            writes to it.
    """
    if not path.name or (path.exists() and not (path.is_file() or path.is_dir())):
        raise ConfigError(f"{str(path)!r}: expected the name of a file or folder to write")
    part = path if kind == "jsonl" else _part_of(path)
    for found in {path, part}:
        if mode == "new" and found.exists():
            raise ConfigError(
                f"{found} exists and is left as it is; --resume continues that export, "
                "--append-to-previous adds to it, or choose another name"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if part != path and path.exists() and not part.exists():
            _write_part(part, path)
        file = part.open("xb" if mode == "new" else "ab")
        try:
            _lock(file, path)
            existing = _read_existing(part)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise unwritable(path, error, None) from error
    return Output(path, kind, file, existing)


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.jsonl")


def _write_part(part: Path, path: Path) -> None:
    """Write all records of a Parquet file or folder to its JSON Lines file, or no file.

    An incomplete one would be resumed as an export.
    """
    unfinished = part.with_name(part.name + ".tmp")
    with unfinished.open("ab") as file:
        _lock(file, path)
        file.truncate(0)
        for record in read_columns(path):
            file.write(json.dumps(record).encode() + b"\n")
    unfinished.replace(part)


def _lock(file: BinaryIO, path: Path) -> None:
    refusal = f"another export writes to {path}; wait for its end, or choose another name"
    lock_file(file.fileno(), path, refusal=refusal)


def _records(part: Path) -> list[dict[str, Any]]:
    with part.open("rb") as file:
        return [record for line in file if isinstance(record := _decoded(line), dict)]


def _read_existing(path: Path) -> Existing:
    existing = Existing()
    end = 0  # of the last complete line
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _decoded(line)
            if isinstance(record, dict):
                existing.keys[_existing_key(record)] += 1
                existing.num_records += 1
                existing.fields = existing.fields or frozenset(record) - {_SCORE}
            elif line.strip() and line.endswith(b"\n"):
                existing.broken_lines.append(number)
            if line.endswith(b"\n") or isinstance(record, dict):
                end += len(line)
        size = file.tell()
        file.seek(0)
        is_record_start = file.read(2) == b'{"'
    if size and not existing.num_records and (existing.broken_lines or not is_record_start):
        raise ConfigError(f"{path} has no records of an export; it is left as it is")
    existing.num_cut_bytes = size - end
    _repair_end(path, end)
    return existing


def _existing_key(record: Mapping[str, Any]) -> bytes:
    try:
        return content_key(record)
    except UnicodeEncodeError:  # written by another program
        return content_key(encodable_texts(record))


def _repair_end(path: Path, end: int) -> None:
    """Remove an incomplete last line, or add a missing line break."""
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
    """Return a valid repository name; raises ConfigError for an invalid one."""
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
    """Upload an export as the split `train`, with the account of `hf auth login`.

    Args:
        path: JSON Lines or Parquet file, or dataset folder.
        repository: OWNER/NAME; created if missing.
        is_public: Whether a repository created here is public.
        load: Loads the export; None is `datasets.load_dataset`.

    Raises:
        ConfigError: the hub is unreachable or rejects the upload; the export is unchanged.
    """
    if load is None:
        from datasets import load_dataset

        load = load_dataset
    kind = "parquet" if path.suffix == ".parquet" else "json"
    source = (str(path),) if path.is_dir() else (kind, None, None, str(path))
    try:
        load(*source, split="train").push_to_hub(repository, private=not is_public)
    except Exception as error:  # of three libraries, each with errors of its own
        raise ConfigError(
            f"{path} is written, but its upload failed ({type(error).__name__}: {error}); "
            f"to upload it later: hf upload --repo-type dataset {repository} {path}"
        ) from error

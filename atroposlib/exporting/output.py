"""The file an export writes: never overwritten unasked, valid after every write, resumable.

JSON Lines grow in place, whole lines per write. Parquet and dataset folders cannot grow: their
records are kept in `NAME.part.jsonl` beside them, which becomes the output when the export ends,
also when it ends early; after a crash it is what `--resume` goes on with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from atroposlib.errors import ConfigError
from atroposlib.exporting.columns import read_columns, write_columns
from atroposlib.exporting.lines import Line, content_key
from atroposlib.utils.writable import unwritable

__all__ = ["Existing", "Mode", "Output", "OutputKind", "kind_of", "open_output"]

OutputKind = Literal["jsonl", "parquet", "dataset"]
Mode = Literal["new", "append", "resume"]

_NAME_FIELD = "score"


@dataclass
class Existing:
    """What an earlier export left in a file."""

    keys: set[bytes] = field(default_factory=set)
    """Content keys of its records."""
    num_records: int = 0
    fields: frozenset[str] | None = None
    """Names of the fields of its first record; None when there is none."""
    broken_lines: list[int] = field(default_factory=list)
    """Numbers of lines that are no records; they are left as they are."""
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

        Args:
            lines: the records.
            fields: names of their fields.

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

        An export without a record leaves nothing behind.

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

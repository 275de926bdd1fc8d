"""Reading data sets from local files, without a hub or a cache."""

from __future__ import annotations

import csv
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.text import encodable_texts
from atroposlib.utils.yaml_text import read_yaml

__all__ = [
    "SUFFIXES",
    "find_split",
    "iter_records",
    "read_records",
    "read_split",
    "read_splits",
    "require_data",
    "split_files",
]

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".yaml")
PARQUET_ROWS = 1000
"""Rows of a Parquet file that are decoded at a time."""
_LARGEST_FIELD = 2**31 - 1
"""Characters of a value in a CSV file."""

SHARD = re.compile(r"-\d{5}-of-(\d{5})(?:-[0-9a-f]+)?")
"""End of the name of one of several files of a split, with their number."""


def find_split(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of the `split_files`."""
    return split_files(folder, names)[0]


def split_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a split, in order.

    They are `<name>.jsonl`, ... (see `SUFFIXES`); or all of `<name>-00000-of-00002.parquet`, ...,
    as the hub stores large splits; or the first one of `<name>-*`.

    Args:
        folder: folder of the data set.
        names: possible names of the split, in the order of the search.

    Raises:
        ConfigError: there is no such file.
    """
    for name in names:
        for suffix in SUFFIXES:
            whole = folder / f"{name}{suffix}"
            found = [whole] if whole.is_file() else sorted(folder.glob(f"{name}-*{suffix}"))
            if found:
                return _shards(name, found) or found[:1]
    wanted = ", ".join(f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    raise ConfigError(f"no data in {folder}: expected one of {wanted}")


def _shards(name: str, files: Sequence[Path]) -> list[Path]:
    """Return the files that are parts of one split; empty if the first one is not such a part."""
    totals = [SHARD.fullmatch(file.stem.removeprefix(name)) for file in files]
    if not totals[0]:
        return []
    total = totals[0][1]
    parts = [file for file, found in zip(files, totals, strict=True) if found and found[1] == total]
    if len(parts) != int(total):
        logger.warning(
            "%s: %d of %d files of the split %s", files[0].parent, len(parts), int(total), name
        )
    return parts


def require_data(path: Path, columns: Sequence[str]) -> None:
    """Check that a path is a file or a folder with a train file, without reading it.

    Raises:
        ConfigError: it is not; the message has the expected `columns`.
    """
    if path.is_dir():
        find_split(path, ["train"])
    elif not path.is_file():
        raise ConfigError(f"no data file {path}; {_expected(columns)}{_sample_hint(path)}")


def iter_records(path: Path) -> Iterator[Any]:
    """Yield the rows of a file with one of the `SUFFIXES`; JSON and YAML are read as a whole.

    A file with another suffix is read as JSON Lines, and so is a `.json` file with several values.

    Raises:
        ValueError: the content is malformed; the message names the line.
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    elif suffix == ".json":
        yield from _json_rows(path.read_text(encoding="utf-8-sig"))
    elif suffix in (".yaml", ".yml"):
        loaded = _parsed_yaml(path.read_text(encoding="utf-8-sig"))
        yield from loaded if isinstance(loaded, list) else [loaded]
    elif suffix == ".csv":
        yield from _table_rows(path)
    else:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            try:
                yield from _json_lines(lines)
            except ValueError as error:
                hint = "" if suffix in SUFFIXES else f"; {_suffix_hint(suffix)}"
                raise ValueError(f"{error}{hint}") from error


def read_records(
    path: Path, columns: Sequence[str], *, optional: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines, JSON, YAML, Parquet or CSV file, reduced to some columns.

    Args:
        path: the file; a `.json` file holds one list of objects, and the values of a `.csv` file,
            whose first line has the columns, are texts.
        columns: required columns.
        optional: optional columns; None replaces a missing value.

    Raises:
        ConfigError: the file is missing, unreadable or empty, or lacks a column.
    """
    expected = _expected(columns)
    if not path.is_file():
        raise ConfigError(f"no data file {path}; {expected}{_sample_hint(path)}")
    try:
        rows = list(iter_records(path))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {expected}") from error
    if not rows:
        raise ConfigError(f"{path} holds no rows; {expected}")
    for number, row in enumerate(rows, 1):
        missing = [c for c in columns if not isinstance(row, dict) or row.get(c) is None]
        if missing:
            raise ConfigError(f"{path}: row {number} has no {', '.join(missing)}; {expected}")
    return [{column: row.get(column) for column in (*columns, *optional)} for row in rows]


def read_split(
    path: Path, names: Sequence[str], columns: Sequence[str], *, optional: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a split of a folder, from all of its `split_files`; or those of a file.

    Args:
        path: the folder, or a file.
        names: possible names of the split, in the order of the search.
        columns: required columns.
        optional: optional columns; None replaces a missing value.

    Raises:
        ConfigError: as for `split_files` and `read_records`.
    """
    files = split_files(path, names) if path.is_dir() else [path]
    return [row for file in files for row in read_records(file, columns, optional=optional)]


def read_splits(
    path: Path,
    columns: Sequence[str],
    *,
    shuffle_seed: int,
    test_fraction: float = 0.1,
    optional: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the shuffled training and test rows of a folder or of one file.

    Args:
        path: a folder with a file for each split, or one file, a part of which becomes the test
            split. With only one row, both splits have it.
        columns: required columns.
        shuffle_seed: seed of the order and of the split.
        test_fraction: fraction of a single file for the test split, at least one row.
        optional: optional columns; None replaces a missing value.

    Raises:
        ConfigError: a file or column is missing.
    """
    if path.is_dir():
        train = read_split(path, ["train"], columns, optional=optional)
        names = ["test", "validation", "valid", "val"]
        test = read_split(path, names, columns, optional=optional)
        random.Random(shuffle_seed).shuffle(train)
        random.Random(shuffle_seed).shuffle(test)
        return train, test
    rows = read_records(path, columns, optional=optional)
    random.Random(shuffle_seed).shuffle(rows)
    num_test = max(1, round(test_fraction * len(rows)))
    return rows[num_test:] or rows, rows[:num_test]


def _expected(columns: Sequence[str]) -> str:
    return f"expected rows with the columns {', '.join(columns)}" if columns else "expected rows"


def _sample_hint(path: Path) -> str:
    """Return the source of the sample of a shipped environment; empty for another path."""
    if path.parent.name != "data" or not path.name.endswith("_sample"):
        return ""
    return (
        f". This sample is environments/data/{path.name} of the repository: copy it to that place, "
        "or name another file with --env.dataset_path"
    )


def _suffix_hint(suffix: str) -> str:
    read_as = "a file without a suffix" if not suffix else f"a {suffix} file"
    return f"{read_as} is read as JSON Lines; other formats have the suffix {', '.join(SUFFIXES)}"


def _table_rows(path: Path) -> Iterator[dict[str, str | None]]:
    csv.field_size_limit(_LARGEST_FIELD)  # of the process; documents exceed 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as table:
        rows = csv.DictReader(table)
        try:
            for row in rows:
                further = row.pop(None, None)  # type: ignore[call-overload]
                if further and any(further):
                    raise ValueError(
                        f"not a table: line {rows.line_num} has {len(row) + len(further)} values "
                        f"for {len(row)} columns; expected quotes around values with commas"
                    )
                yield row
        except csv.Error as error:
            raise ValueError(f"not a table: line {rows.line_num}: {error}") from error


def _json_rows(text: str) -> Iterator[Any]:
    try:
        loaded = _parsed_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        yield from _json_lines(text.split("\n"))  # the hub has JSON Lines in such files, too
        return
    yield from loaded if isinstance(loaded, list) else [loaded]


def _json_lines(lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parsed(line.rstrip("\n"), number)


def _parsed_yaml(text: str) -> Any:
    import yaml

    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error


def _parsed(line: str, number: int) -> Any:
    try:
        return _parsed_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _parsed_json(text: str) -> Any:
    """Return a JSON value, with U+FFFD for escaped lone surrogates, which no tokenizer accepts."""
    try:
        value = json.loads(text)
        return encodable_texts(value) if "\\ud" in text or "\\uD" in text else value
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error

"""Records as Parquet: one file, or a folder that `datasets.load_dataset` takes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["parquet_of", "read_columns", "write_columns"]

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
    """Write records in place of what is at `path`; whoever looks sees the old or the new one.

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

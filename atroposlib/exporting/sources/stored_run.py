"""Groups of a stored run, read from its SQLite file without its service.

The file may be in use: a reader disturbs nobody. It holds the groups that wait, those in flight and
the last delivered ones.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import RawGroup, lane_of_payload

__all__ = ["find_run", "read_run", "run_names"]

_SUFFIX = ".sqlite3"
_ROWS_PER_READ = 500
_APPLICATION_ID = 0x41_54_52_50


def run_names(data_dir: Path) -> list[str]:
    """Return the names of the runs in a directory, the one changed last first."""
    files = sorted(
        data_dir.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    return [path.name.removesuffix(_SUFFIX) for path in files]


def find_run(run: str, data_dir: Path) -> Path:
    """Return the file of a run.

    Args:
        run: the name of a run in `data_dir`, or the path of its file.
        data_dir: where the service keeps runs.

    Raises:
        ConfigError: there is no such run, or the file is not one of a run.
    """
    path = Path(run) if run.endswith(_SUFFIX) else data_dir / f"{run}{_SUFFIX}"
    if not path.is_file():
        known = ", ".join(run_names(data_dir)[:5])
        hint = f"; {data_dir} has {known}" if known else f"; {data_dir} has no runs"
        raise ConfigError(f"there is no run {run}{hint}; --data-dir names another directory")
    connection = _connect(path)
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} is not the file of a run: {error}") from error
    finally:
        connection.close()
    if application_id != _APPLICATION_ID:
        raise ConfigError(f"{path} is a database of another program")
    return path


def read_run(path: Path) -> Iterator[RawGroup]:
    """Yield the groups of a run in order of arrival; discarded ones are left out."""
    connection = _connect(path)
    after = -1
    try:
        while rows := connection.execute(
            "SELECT group_id, content FROM payload WHERE group_id > ?"
            " AND group_id NOT IN (SELECT group_id FROM garbage) ORDER BY group_id LIMIT ?",
            (after, _ROWS_PER_READ),
        ).fetchall():
            for group_id, content in rows:
                yield RawGroup(f"group {group_id}", lane_of_payload(content), content)
            after = rows[-1][0]
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read behind group {after}: {error}") from error
    finally:
        connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    """Open a file of a run for reading only; one that nobody has open needs no files beside it."""
    is_at_rest = not path.with_name(path.name + "-wal").exists()
    options = "mode=ro&immutable=1" if is_at_rest else "mode=ro"
    uri = f"{path.resolve().as_uri()}?{options}"
    # Generators may be closed by another thread than the one that began to read.
    return sqlite3.connect(uri, uri=True, timeout=10.0, check_same_thread=False)

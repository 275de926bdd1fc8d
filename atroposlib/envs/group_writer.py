"""Writing groups to a JSON Lines file."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from atroposlib.errors import GroupError
from atroposlib.utils.plain_json import encode_mapping

__all__ = ["GroupWriter"]


class GroupWriter:
    """Appends groups to a new JSON Lines file, one flushed line each.

    An existing file is never overwritten: `_1`, `_2`, ... is added to the stem of the path asked
    for. A killed process loses nothing it has written. Safe to call from several threads.

    Args:
        path: where to write; missing parent folders are created.

    Attributes:
        path: the file really written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._file = _create_free(Path(path))
        self._lock = threading.Lock()

    def write(self, group: Mapping[str, Any]) -> None:
        """Add a group as one line and flush it.

        Args:
            group: NumPy numbers and arrays are converted.

        Raises:
            GroupError: a value has no JSON form or is not finite; the message names its key.
                Nothing is written then.
        """
        try:
            line = encode_mapping(group)
        except ValueError as error:
            raise GroupError(f"the group cannot be written to {self.path}: {error}") from error
        with self._lock:  # one group stays one line
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


def _create_free(wanted: Path) -> tuple[Path, TextIO]:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    path, attempt = wanted, 0
    while True:
        try:
            # Mode "x" makes the choice of a name atomic among processes.
            return path, path.open("x", encoding="utf-8")
        except FileExistsError:
            attempt += 1
            path = wanted.with_name(f"{wanted.stem}_{attempt}{wanted.suffix}")

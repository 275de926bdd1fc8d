"""Groups of a JSON Lines file, as `process` writes them, one group per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import RawGroup

__all__ = ["open_jsonl", "read_jsonl"]


def open_jsonl(path: Path) -> Path:
    """Return the path if a file can be read there.

    Raises:
        ConfigError: there is none, or it may not be read.
    """
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"the groups in {path} cannot be read: {error.strerror}") from error


def read_jsonl(path: Path) -> Iterator[RawGroup]:
    """Yield the lines of a file that are not blank; whether each is a group is not looked at."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.strip()
            if content:
                yield RawGroup(f"line {number}", "json", content)

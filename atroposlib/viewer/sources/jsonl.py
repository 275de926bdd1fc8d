"""Groups of a JSON Lines file, which may still be growing."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_line
from atroposlib.viewer.group_index import GroupIndex
from atroposlib.viewer.sources.base import GroupGoneError, Problems, ServiceFigures
from atroposlib.viewer.summaries import searchable_text, summarise

__all__ = ["JsonlSource"]


class JsonlSource:
    """A file with one group a line; lines that are none are told by number, the rest is used.

    Args:
        path: the file.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{path} cannot be read ({reason}); expected a JSON Lines file of groups, "
                "as `process` writes"
            ) from error
        self.title = str(path)
        self._stem = inert_line(path.stem, max_characters=60)
        self.problems = Problems()
        self._descriptor = self._file.fileno()
        self._places = array("q")  # where each group's line begins
        self._lengths = array("q")
        self._offset = 0
        self._number = 1
        self._unfinished_at = -1

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Read on; a last line without its end is looked at again when the file has grown."""
        deadline = time.monotonic() + budget_s
        size = os.fstat(self._descriptor).st_size
        if size < self._offset:
            self.problems.add(f"{self.title} was cut short; start again to see what it holds now")
            self._offset = size
        if size == self._unfinished_at:
            return False
        self._file.seek(self._offset)
        while time.monotonic() < deadline:
            line = self._file.readline()
            if not line:
                return False
            if not line.endswith(b"\n") and not self._is_whole(line):
                self._unfinished_at = self._offset + len(line)
                return False
            self._take(line, index)
        return True

    def load(self, position: int) -> Mapping[str, Any]:
        """Read one group again."""
        line = os.pread(self._descriptor, self._lengths[position], self._places[position])
        try:
            fields = decode_line(line)
        except (ValueError, RecursionError) as error:
            raise GroupGoneError(f"{self.title} was changed: {error}") from error
        if not isinstance(fields, dict):
            raise GroupGoneError(f"{self.title} was changed")
        return fields

    def figures(self) -> ServiceFigures:
        """Return nothing but what could not be read: a file tells no more."""
        notes = [f"{self._unfinished_note()}"] if self._unfinished_at >= 0 else []
        why_empty = (
            "No line of the file is a group; what is wrong with them stands below."
            if self.problems.count
            else "The file is empty so far; groups appear as they are written."
        )
        return ServiceFigures(notes=notes, why_empty=why_empty)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unfinished_note(self) -> str:
        return f"line {self._number} has no end yet: somebody is writing, or was killed doing so"

    def _is_whole(self, line: bytes) -> bool:
        try:
            return bool(line.strip()) and isinstance(decode_line(line), dict)
        except (ValueError, RecursionError):
            return False

    def _take(self, line: bytes, index: GroupIndex) -> None:
        place, number = self._offset, self._number
        self._offset += len(line)
        self._number += line.endswith(b"\n")
        self._unfinished_at = -1
        if not line.strip():
            return
        try:
            fields = decode_line(line)
        except (ValueError, RecursionError) as error:
            self.problems.add(f"line {number}: not JSON ({error})")
            return
        problem = _problem(fields)
        if problem:
            self.problems.add(f"line {number}: {problem}")
            return
        self._places.append(place)
        self._lengths.append(len(line))
        text = searchable_text(fields)
        if text:
            index.texts.add(len(self._places) - 1, text)
        row = summarise(fields, label=f"line {number}")
        if not row.environment:  # `process` names its file after the environment
            row = row._replace(environment=self._stem)
        index.add(row)


def _problem(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return "not a JSON object"
    if not any(isinstance(fields.get(name), list) for name in ("tokens", "messages")):
        return "neither tokens nor messages; expected lists with one entry per rollout"
    if not isinstance(fields.get("scores"), list):
        return "no scores; expected a list with one number per rollout"
    return None

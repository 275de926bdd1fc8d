"""Text of many groups, searched without holding it in memory.

Texts are written, in small letters, one after the other to a file that has no name and goes with
the process. A search walks through it; it may stop after a while and go on later, also over text
that has come since.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from array import array
from bisect import bisect_right

__all__ = ["TextSearch", "TextStore"]

_WINDOW_BYTES = 4 * 2**20


class TextStore:
    """Texts by the position of their group; one thread adds, any number search."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the store
        self._lock = threading.Lock()
        self._owners = array("q")
        self._starts = array("q", [0])

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, position: int, text: str) -> None:
        """Add the text of a group; a second one is searched as well."""
        content = text.lower().encode("utf-8", errors="replace") + b"\n"
        with self._lock:
            self._file.seek(0, 2)
            self._file.write(content)
            self._owners.append(position)
            self._starts.append(self._starts[-1] + len(content))

    def search(self, text: str) -> TextSearch:
        """Begin a search for text, whatever the size of its letters."""
        return TextSearch(self, text.lower().encode("utf-8", errors="replace"))

    def find(self, wanted: bytes, start: int, stop: int) -> list[int]:
        """Return the positions of the groups of entries from `start` to `stop` that have a text."""
        with self._lock:
            self._file.flush()
            starts = self._starts[start : stop + 1]
        first, last = starts[0], starts[-1]
        aligned = first - first % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(
            self._file.fileno(), last - aligned, access=mmap.ACCESS_READ, offset=aligned
        ) as mapped:
            content = mapped[first - aligned : last - aligned]
        found = []
        at = content.find(wanted)
        while at >= 0:
            entry = bisect_right(starts, first + at) - 1
            if first + at + len(wanted) <= starts[entry + 1]:
                found.append(self._owners[start + entry])
                at = content.find(wanted, starts[entry + 1] - first)
            else:
                at = content.find(wanted, at + 1)
        return found

    def end_of_window(self, start: int) -> int:
        """Return the entry before which a window of a few megabytes that begins at `start` ends."""
        with self._lock:
            count = len(self._owners)
            return min(count, max(start + 1, self._entry_at(self._starts[start] + _WINDOW_BYTES)))

    def _entry_at(self, offset: int) -> int:
        return bisect_right(self._starts, offset) - 1


class TextSearch:
    """One search; `found` grows as it goes on."""

    def __init__(self, store: TextStore, wanted: bytes) -> None:
        self.found: set[int] = set()
        """Positions of the groups that have the text."""
        self.num_searched = 0
        """Texts looked at."""
        self._store = store
        self._wanted = wanted
        self._lock = threading.Lock()

    def advance(self, budget_s: float) -> bool:
        """Look at further texts for about so long; return whether all there are were seen."""
        deadline = time.monotonic() + budget_s
        with self._lock:
            while self.num_searched < len(self._store):
                stop = self._store.end_of_window(self.num_searched)
                self.found.update(self._store.find(self._wanted, self.num_searched, stop))
                self.num_searched = stop
                if time.monotonic() > deadline:
                    break
            return self.num_searched >= len(self._store)

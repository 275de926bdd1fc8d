"""One source of groups with all that pages need of it: index, tokenizer, groups read lately.

source ──► reading thread ──► index        pages ◄── viewer ◄── index, source, token reader
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atroposlib.utils.text import inert_line
from atroposlib.viewer.group_index import GroupFilter, GroupIndex, Matches, Order
from atroposlib.viewer.metric_files import drops_in_metrics
from atroposlib.viewer.rollouts import Group, group_of
from atroposlib.viewer.sources.base import GroupSource
from atroposlib.viewer.summaries import GroupSummary, searchable_text
from atroposlib.viewer.token_reader import TokenReader

__all__ = ["Viewer"]

logger = logging.getLogger(__name__)

_BUDGET_S = 0.1
_PAUSE_S = 0.5
_YIELD_S = 0.01
_KEPT_GROUPS = 16
_KEPT_MATCHES = 8


class Viewer:
    """Safe for concurrent use; `close` ends the thread that reads.

    Args:
        source: where groups come from.
        reader: gives tokens their text.
        metrics_dir: folder with the metrics files of environments, or None.

    Attributes:
        is_reading: whether there was more to read at the last look.
    """

    def __init__(
        self, source: GroupSource, reader: TokenReader, *, metrics_dir: Path | None = None
    ) -> None:
        self.source = source
        self.reader = reader
        self.index = GroupIndex()
        self.is_reading = True
        self._metrics_dir = metrics_dir
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._matches: OrderedDict[tuple[GroupFilter, Order], tuple[int, Matches]] = OrderedDict()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._without_text: list[int] = []
        self._num_checked = 0
        self._thread = threading.Thread(target=self._read, name="viewer-reading", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        self._thread.join()
        self.source.close()

    def group(self, position: int) -> Group:
        """Return a whole group.

        Raises:
            GroupGoneError: it can no longer be read.
        """
        with self._lock:
            known = self._groups.pop(position, None)
            if known is not None:
                self._groups[position] = known
                return known
        group = group_of(self.source.load(position))
        with self._lock:
            self._groups[position] = group
            while len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        return group

    def match(self, wanted: GroupFilter, order: Order) -> Matches:
        """List the groups that pass; the same question is answered from memory."""
        version = self.index.version
        with self._lock:
            known = self._matches.get((wanted, order))
        if known is not None and known[0] == version:
            return known[1]
        matches = self.index.match(wanted, order)
        if matches.is_complete:
            with self._lock:
                self._matches[(wanted, order)] = (version, matches)
                while len(self._matches) > _KEPT_MATCHES:
                    self._matches.popitem(last=False)
        return matches

    def neighbour(self, position: int | None, by: int, matches: NDArray[np.int64]) -> int | None:
        """Return the group `by` places further in a listing; stays within it."""
        if not len(matches):
            return position
        places = np.flatnonzero(matches == (-1 if position is None else position))
        if not len(places):
            return int(matches[0 if by >= 0 else -1])
        return int(matches[min(max(int(places[0]) + by, 0), len(matches) - 1)])

    def row(self, position: int) -> GroupSummary:
        """Return the summary of a group, with the start of its tokens where it has no messages."""
        row = self.index[position]
        if row.excerpt or not self.reader.is_ready:
            return row
        try:
            group = self.group(position)
        except LookupError:
            return row
        if not group.rollouts or group.rollouts[0].chat:
            return row
        text = self.reader.text(group.rollouts[0].tokens[:80])
        return row._replace(excerpt=inert_line(text, max_characters=160))

    def metric_drops(self) -> dict[str, float]:
        """Return what environments dropped, by reason; empty without metrics files."""
        return {} if self._metrics_dir is None else drops_in_metrics(self._metrics_dir)

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                self.is_reading = self.source.advance(self.index, _BUDGET_S)
                has_more_text = self._add_texts_of_tokens()
            except Exception:  # a page must go on showing what there is
                logger.exception("reading %s failed; trying on", self.source.title)
                self._stopped.wait(_PAUSE_S)
                continue
            self._stopped.wait(_YIELD_S if self.is_reading or has_more_text else _PAUSE_S)

    def _add_texts_of_tokens(self) -> bool:
        """Let groups without messages be searched by the text of their tokens, a few at a time."""
        if self.is_reading:
            return False
        if not self.reader.is_ready:
            if any(not self.index[i].excerpt for i in range(self._num_checked, len(self.index))):
                self.reader.start()
            return False
        while self._num_checked < len(self.index):
            position = self._num_checked
            self._num_checked += 1
            if self.index[position].excerpt:
                continue
            try:
                fields = self.source.load(position)
            except LookupError:
                continue
            if not searchable_text(fields):
                group = group_of(fields)
                texts = [self.reader.text(rollout.tokens) for rollout in group.rollouts]
                self.index.texts.add(position, "\n".join(texts))
                return True
        return False

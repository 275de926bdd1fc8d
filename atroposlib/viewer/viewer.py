"""A source of groups with its index, tokenizer and cache, and the view of each browser tab.

source ──► reading thread ──► index        pages ◄── viewer ◄── index, source, token reader

Counts of dropped groups, by reason, come from the metrics files of environments.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_line
from atroposlib.viewer.index import (
    ORDERS,
    GroupIndex,
    GroupSummary,
    Matches,
    Order,
    RowFilter,
    searchable_text,
)
from atroposlib.viewer.pages import Color
from atroposlib.viewer.rollouts import Group, group_of
from atroposlib.viewer.sources import GroupSource
from atroposlib.viewer.token_reader import TokenReader

__all__ = [
    "PAGES",
    "ROWS_PER_PAGE",
    "BrowserTab",
    "ViewState",
    "Viewer",
    "drops_in_metrics",
    "filter_of",
]

logger = logging.getLogger(__name__)

_PREFIX = "drops/"
_READ_BYTES = 4 * 2**20
_MAX_FILES = 50


def drops_in_metrics(folder: Path) -> dict[str, float]:
    """Return counts by reason from the last lines of every `metrics.jsonl` under a folder.

    The counts of a file are cumulative, so the last value of each is used.
    """
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("metrics.jsonl"))[:_MAX_FILES]:
        latest: dict[str, float] = {}
        for line in _last_lines(path):
            latest.update(_drops(line))
        for reason, count in latest.items():
            total[f"{path.parent.name}: {reason}"] += count  # type: ignore[assignment]
    return dict(total)


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def _drops(line: bytes) -> dict[str, float]:
    if _PREFIX.encode() not in line:
        return {}
    try:
        metrics = decode_line(line)
    except (ValueError, RecursionError):
        return {}
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        before, prefix, reason = str(name).partition(_PREFIX)
        if prefix and isinstance(value, int | float):
            found[f"{before}{reason}"] = float(value)
    return found


_BUDGET_S = 0.1
_PAUSE_S = 0.5
_YIELD_S = 0.01
_KEPT_GROUPS = 16
_KEPT_MATCHES = 8


class Viewer:
    """Safe for concurrent use; `close` ends the reading thread.

    Args:
        source: source of the groups.
        reader: reader of the tokens.
        metrics_dir: folder with metrics files of environments, or None.
        trace_url: address of a trace with `{trace_id}` in it; None shows ids without links.

    Attributes:
        is_reading: whether the source had more groups at the last read.
    """

    def __init__(
        self,
        source: GroupSource,
        reader: TokenReader,
        *,
        metrics_dir: Path | None = None,
        trace_url: str | None = None,
    ) -> None:
        self.source = source
        self.trace_url = trace_url
        self.reader = reader
        self.index = GroupIndex()
        self.is_reading = True
        self._metrics_dir = metrics_dir
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._matches: OrderedDict[tuple[RowFilter, Order], tuple[int, Matches]] = OrderedDict()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._without_text: list[int] = []
        self._num_checked = 0
        self._thread = threading.Thread(target=self._read, name="viewer-reading", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.source.close()

    def group(self, position: int) -> Group:
        """Return a group.

        Raises:
            GroupGoneError: the group can no longer be read.
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

    def match(self, wanted: RowFilter, order: Order) -> Matches:
        """Return the groups that match, as `GroupIndex.match`; results are cached."""
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

    def neighbor(self, position: int | None, by: int, matches: NDArray[np.int64]) -> int | None:
        """Return the group `by` positions further in a list, or its first or last group."""
        if not len(matches):
            return position
        places = np.flatnonzero(matches == (-1 if position is None else position))
        if not len(places):
            return int(matches[0 if by >= 0 else -1])
        return int(matches[min(max(int(places[0]) + by, 0), len(matches) - 1)])

    def row(self, position: int) -> GroupSummary:
        """Return the summary of a group; without messages, its excerpt is from its tokens."""
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
        return {} if self._metrics_dir is None else drops_in_metrics(self._metrics_dir)

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                self.is_reading = self.source.advance(self.index, _BUDGET_S)
                has_more_text = self._add_texts_of_tokens()
            except Exception:  # the pages keep showing what was read
                logger.exception("reading %s failed; retrying", self.source.title)
                self._stopped.wait(_PAUSE_S)
                continue
            self._stopped.wait(_YIELD_S if self.is_reading or has_more_text else _PAUSE_S)

    def _add_texts_of_tokens(self) -> bool:
        """Add the text of the next group without messages; return whether there may be more."""
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


PAGES = (
    *("overview", "groups", "rollouts", "tokens", "conversation", "compare", "images"),
    *("timeline", "plain"),
)
ROWS_PER_PAGE = 20
NO_FILTER = RowFilter()
_SIGNALS = {"any": "any", "differ": "differ", "all equal": "equal"}
_ANY_ENVIRONMENT = "all"


@dataclass(frozen=True)
class ViewState:
    """The view of one browser tab."""

    page: str = "overview"
    wanted: RowFilter = NO_FILTER
    order: Order = "oldest"
    offset: int = 0
    """First row of the list."""
    group: int | None = None
    """Position of the open group."""
    rollout: int = 0
    other: int | None = None
    """Rollout that the open one is compared with; None for that with the most different score."""
    color: Color = "logprob"
    token: int = 0
    """First token shown."""
    digest: int = 0
    """Hash of the content, to detect changes."""
    page_digest: int = 0
    """Hash of the content without the head."""


class BrowserTab:
    """Holder of the view of one browser tab, whose concurrent events are serialized.

    As a value passed from event to event, the view could lose changes of an overlapping event.
    """

    def __init__(self, view: ViewState) -> None:
        self.view = view
        self.turn = threading.Lock()
        """Held while an event changes and renders the view."""

    def __deepcopy__(self, memo: Any) -> BrowserTab:
        # Gradio copies the initial state for each tab.
        return BrowserTab(self.view)


def filter_of(
    text: Any,
    environment: Any,
    order: Any,
    signal: Any,
    *ranges: Any,
) -> tuple[RowFilter, Order]:
    """Return the filter and the order of the widgets' values.

    Args:
        text: text to search for.
        environment: a name, or `all`.
        order: one of `ORDERS`.
        signal: `any`, `differ` or `all equal`.
        ranges: minimum and maximum of score, tokens and step as typed, in this order; a text that
            is not a number sets no bound. Tokens and steps may have the separators with which
            they are shown, as in `1,234`.
    """
    low, high, shortest, longest, first, last = (*ranges, *[None] * 6)[:6]
    wanted = RowFilter(
        environment=None if environment in (None, "", _ANY_ENVIRONMENT) else str(environment),
        min_score=_number(low),
        max_score=_number(high),
        min_tokens=_whole(shortest),
        max_tokens=_whole(longest),
        min_step=_whole(first),
        max_step=_whole(last),
        text=str(text or "").strip(),
        signal=_SIGNALS.get(str(signal), "any"),  # type: ignore[arg-type]
    )
    chosen: Order = order if order in get_args(Order) else ORDERS[0]
    return wanted, chosen


def _number(value: Any) -> float | None:
    try:
        number = float(str(value).replace(",", ".") if value is not None else "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_GROUPED = re.compile(r"\s*-?\d{1,3}(,\d{3})+\s*")


def _whole(value: Any) -> int | None:
    is_grouped = isinstance(value, str) and _GROUPED.fullmatch(value)
    number = _number(value.replace(",", "") if is_grouped else value)
    return None if number is None else int(number)

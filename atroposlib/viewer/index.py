"""The index of all groups of a source: a summary of each group, and its text for searches.

Filters and orders are computed from arrays, in milliseconds for a hundred thousand groups. One
thread adds rows and others read them; a row is replaced when more is known about its group.

The texts are in an unnamed file, in lower case, which is removed with the process. A search scans
the file. It can pause and continue later, also over text that was added since.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from atroposlib.agent_tasks.trace import AgentTrace, rollout_of_row
from atroposlib.utils.text import inert_line
from atroposlib.viewer.rollouts import Group, group_of, mean_of, text_of_content

__all__ = [
    "ORDERS",
    "GroupIndex",
    "GroupSummary",
    "Matches",
    "Order",
    "RowFilter",
    "TextStore",
    "searchable_text",
    "summarize",
]

_WINDOW_BYTES = 4 * 2**20


class TextStore:
    """Texts by the position of their group; one thread adds, any number search."""

    def __init__(self) -> None:
        # Without a buffer, so that a full disk is noticed by `add`, and by no search.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives with the store
        self._lock = threading.Lock()
        self._owners = array("q")
        self._starts = array("q", [0])

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, position: int, text: str) -> None:
        """Add the text of a group; a second one is searched as well.

        Raises:
            OSError: the disk has no room for it; it is left out.
        """
        content = text.lower().encode("utf-8", errors="replace") + b"\n"
        with self._lock:
            # Not at the end: a full disk may have left a part of a text there.
            self._file.seek(self._starts[-1])
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._owners.append(position)
            self._starts.append(self._starts[-1] + len(content))

    def search(self, text: str) -> TextSearch:
        return TextSearch(self, text.lower().encode("utf-8", errors="replace"))

    def find(self, wanted: bytes, start: int, stop: int) -> list[int]:
        """Return the positions of groups whose text contains `wanted`, for a range of entries."""
        with self._lock:
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
        """Return the end of a window of a few megabytes of entries that begins at `start`."""
        with self._lock:
            end = bisect_right(self._starts, self._starts[start] + _WINDOW_BYTES) - 1
            return min(len(self._owners), max(start + 1, end))


class TextSearch:
    """One search; `found` grows with its progress."""

    def __init__(self, store: TextStore, wanted: bytes) -> None:
        self.found: set[int] = set()
        """Positions of the groups that contain the text."""
        self.num_searched = 0
        """Number of texts searched."""
        self._store = store
        self._wanted = wanted
        self._lock = threading.Lock()

    def advance(self, budget_s: float) -> bool:
        """Search further texts for about `budget_s`; return whether all were searched."""
        deadline = time.monotonic() + budget_s
        with self._lock:
            while self.num_searched < len(self._store):
                stop = self._store.end_of_window(self.num_searched)
                self.found.update(self._store.find(self._wanted, self.num_searched, stop))
                self.num_searched = stop
                if time.monotonic() > deadline:
                    break
            return self.num_searched >= len(self._store)


MAX_EXCERPT_CHARACTERS = 160
_MAX_STEP = 2**53  # exact as a float
_STEP_KEYS = ("step", "policy_version")
_ENV_KEYS = ("env_name", "environment", "env_id")


class GroupSummary(NamedTuple):
    """One row of the list."""

    label: str
    """Name in the source, such as `line 12` or `group 7`."""
    environment: str
    step: int | None
    """Policy version or step of the group; None if unknown."""
    num_rollouts: int
    longest: int
    """Tokens of the longest rollout."""
    num_tokens: int
    scores: tuple[float, ...]
    """Scores that are numbers."""
    excerpt: str
    """Start of the question, or an agent's task, as one sanitized line; empty without text."""


def summarize(
    fields: Mapping[str, Any],
    *,
    label: str,
    environment: str | None = None,
    step: int | None = None,
) -> GroupSummary:
    """Return the summary of a decoded group; None for a value takes that of the group."""
    group = group_of(fields)
    lengths = [len(rollout) for rollout in group.rollouts]
    return GroupSummary(
        label=label,
        environment=environment or _environment(fields),
        step=step if step is not None else _step(fields),
        num_rollouts=len(group.rollouts),
        longest=max(lengths, default=0),
        num_tokens=sum(lengths),
        scores=tuple(group.scores),
        excerpt=_excerpt(group),
    )


def searchable_text(fields: Mapping[str, Any]) -> str:
    """Return all text of a group's messages, shared messages once, and of its agents' turns."""
    group = group_of(fields)
    num_shared = group.num_shared_messages
    texts: list[str] = []
    for i, rollout in enumerate(group.rollouts):
        for message in rollout.chat[num_shared if i else 0 :]:
            texts.append(text_of_content(message.get("content")))
            texts += [str(message[key]) for key in ("reasoning_content", "tool_calls")
                      if message.get(key)]  # fmt: skip
        trace = None if rollout.chat else _trace(group, i)
        if trace is not None:
            turns = (event for event in trace["events"] if event["kind"] == "turn")
            texts += [trace.get("instruction", ""), *(turn.get("text", "") for turn in turns)]
    return "\n".join(texts)


def _trace(group: Group, row: int) -> AgentTrace | None:
    """Return the trace that a sequence carries itself."""
    traced = rollout_of_row(group.fields, row)
    return traced.trace if traced is not None and traced.first_row == row else None


def _excerpt(group: Group) -> str:
    if not group.rollouts:
        return ""
    chat = group.rollouts[0].chat
    asked = [message for message in chat if message.get("role") == "user"] or chat
    text = text_of_content(asked[0].get("content")) if asked else ""
    trace = None if asked else _trace(group, 0)
    if trace is not None:
        text = ": ".join(filter(None, (trace.get("task"), trace.get("instruction"))))
    return inert_line(text, max_characters=MAX_EXCERPT_CHARACTERS)


def _environment(fields: Mapping[str, Any]) -> str:
    for key in _ENV_KEYS:
        value = fields.get(key)
        if isinstance(value, str) and value:
            return inert_line(value, max_characters=60)
        if isinstance(value, int) and not isinstance(value, bool):
            return f"env {value}"
    return ""


def _step(fields: Mapping[str, Any]) -> int | None:
    for key in _STEP_KEYS:
        value = fields.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_STEP:
            return value
    return None


Order = Literal["oldest", "newest", "best", "worst", "spread", "mean", "longest"]
ORDERS: tuple[Order, ...] = get_args(Order)

_NO_STEP = -1
_SEARCH_BUDGET_S = 0.25
_KEPT_SEARCHES = 8


class RowFilter(NamedTuple):
    """A filter of groups; None accepts all values."""

    environment: str | None = None
    min_score: float | None = None
    """Minimum of the highest score."""
    max_score: float | None = None
    """Maximum of the lowest score."""
    min_tokens: int | None = None
    """Minimum tokens of the longest rollout."""
    max_tokens: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    text: str = ""
    """Text that the group contains, ignoring case."""
    signal: Literal["any", "differ", "equal"] = "any"
    """Whether the scores of the group differ."""


class Matches(NamedTuple):
    """The result of a filter."""

    positions: NDArray[np.int64]
    """Matching groups, in order."""
    is_complete: bool
    """Whether all texts were searched."""
    num_searched: int
    """Number of texts searched so far, 0 without a text."""


class GroupIndex:
    """Summaries of groups by position, from 0 in the order of arrival."""

    def __init__(self) -> None:
        self.texts = TextStore()
        self.version = 0
        """Increases when a row is added or replaced."""
        self._rows: list[GroupSummary] = []
        self._lock = threading.Lock()
        self._figures: NDArray[np.float64] = np.empty((0, 6))
        self._figures_version = -1
        self._stale_from = 0
        self._environments: dict[str, int] = {}
        self._searches: OrderedDict[str, TextSearch] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> GroupSummary:
        return self._rows[position]

    @property
    def environments(self) -> list[str]:
        return list(self._environments)

    def add(self, summary: GroupSummary) -> int:
        with self._lock:
            self._environments.setdefault(summary.environment, len(self._environments))
            self._rows.append(summary)
            self.version += 1
            return len(self._rows) - 1

    def replace(self, position: int, summary: GroupSummary) -> None:
        with self._lock:
            self._environments.setdefault(summary.environment, len(self._environments))
            self._rows[position] = summary
            self._stale_from = min(self._stale_from, position)
            self.version += 1

    def match(self, wanted: RowFilter, order: Order = "oldest") -> Matches:
        """Return the groups that match; a text search takes at most 0.25 s per call."""
        environment, low, high, mean, longest, step = self._columns().T
        accepted = np.ones(len(environment), dtype=bool)
        if wanted.environment is not None:
            accepted &= environment == self._environments.get(wanted.environment, -1)
        for column, least, most in (
            (high, wanted.min_score, None),
            (low, None, wanted.max_score),
            (longest, wanted.min_tokens, wanted.max_tokens),
            (step, wanted.min_step, wanted.max_step),
        ):
            accepted &= column >= least if least is not None else True
            accepted &= column <= most if most is not None else True
        if wanted.signal != "any":
            accepted &= (high > low) == (wanted.signal == "differ")
        is_complete, num_searched = True, 0
        if wanted.text:
            search = self._search(wanted.text)
            is_complete = search.advance(_SEARCH_BUDGET_S)
            num_searched = search.num_searched
            has_text = np.zeros(len(accepted), dtype=bool)
            found = np.fromiter(search.found, dtype=np.int64)
            has_text[found[found < len(has_text)]] = True
            accepted &= has_text
        keys = {"best": -high, "worst": low, "spread": low / 2 - high / 2, "mean": -mean,
                "longest": -longest}  # fmt: skip
        positions = np.flatnonzero(accepted).astype(np.int64)
        if order == "newest":
            positions = positions[::-1]
        elif order in keys:
            positions = positions[np.argsort(keys[order][positions], kind="stable")]
        return Matches(positions, is_complete, num_searched)

    def scores_by_environment(self, max_groups: int = 20_000) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self._rows[-max_groups:]:
            found.setdefault(row.environment, []).extend(row.scores)
        return found

    def rewards_by_step(
        self, max_groups: int = 20_000, *, max_points: int = 120
    ) -> dict[str, list[tuple[int, float]]]:
        """Return (step, mean score) of each environment, in ascending order of steps.

        Neighboring steps are merged to at most `max_points`. Groups without a step are left out.
        """
        found: dict[str, dict[int, list[float]]] = {}
        for row in self._rows[-max_groups:]:
            if row.step is not None and row.scores:
                found.setdefault(row.environment, {}).setdefault(row.step, []).extend(row.scores)
        return {name: _thinned(by_step, max_points) for name, by_step in found.items()}

    def _search(self, text: str) -> TextSearch:
        with self._lock:
            search = self._searches.pop(text, None) or self.texts.search(text)
            self._searches[text] = search
            while len(self._searches) > _KEPT_SEARCHES:
                self._searches.popitem(last=False)
            return search

    def _columns(self) -> NDArray[np.float64]:
        """Return (groups, 6): environment, lowest, highest and mean score, longest, step."""
        with self._lock:
            if self._figures_version != self.version:
                kept = min(self._stale_from, len(self._figures))
                fresh = [self._figures_of(row) for row in self._rows[kept:]]
                if fresh:
                    self._figures = np.concatenate([self._figures[:kept], np.array(fresh)])
                self._stale_from = len(self._rows)
                self._figures_version = self.version
            return self._figures

    def _figures_of(self, row: GroupSummary) -> tuple[float, ...]:
        scores = row.scores or (float("nan"),)
        return (
            self._environments[row.environment],
            min(scores),
            max(scores),
            mean_of(scores),
            row.longest,
            _NO_STEP if row.step is None else row.step,
        )


def _thinned(by_step: dict[int, list[float]], max_points: int) -> list[tuple[int, float]]:
    """Return (last step, mean score) per bin of neighboring steps; at most `max_points` bins."""
    steps = sorted(by_step)
    size = -(-len(steps) // max_points)
    points = []
    for i in range(0, len(steps), size):
        scores = [score for step in steps[i : i + size] for score in by_step[step]]
        points.append((steps[i : i + size][-1], mean_of(scores)))
    return points

"""All groups of a source by their figures: which match a filter, in which order.

Filters and orders are answered from arrays, in milliseconds for a hundred thousand groups. Rows are
added by one thread and read by others; a row may be replaced once more is known of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from atroposlib.viewer.summaries import GroupSummary
from atroposlib.viewer.text_store import TextSearch, TextStore

__all__ = ["ORDERS", "GroupFilter", "GroupIndex", "Matches", "Order"]

Order = Literal["oldest", "newest", "best", "worst", "spread", "mean", "longest"]
ORDERS: tuple[Order, ...] = get_args(Order)

_NO_STEP = -1
_SEARCH_BUDGET_S = 0.25
_KEPT_SEARCHES = 8


class GroupFilter(NamedTuple):
    """Which groups to list; None lets all pass."""

    environment: str | None = None
    min_score: float | None = None
    """At least one rollout scored this or more."""
    max_score: float | None = None
    """At least one rollout scored this or less."""
    min_tokens: int | None = None
    """The longest rollout has this many tokens or more."""
    max_tokens: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    text: str = ""
    """Text that must occur, whatever the size of its letters."""
    signal: Literal["any", "differ", "equal"] = "any"
    """Whether the scores of the group differ."""


class Matches(NamedTuple):
    """The answer to a filter."""

    positions: NDArray[np.int64]
    """Matching groups, in order."""
    is_complete: bool
    """False while the text search has not seen every text."""
    num_searched: int
    """Texts searched so far, 0 without a text."""


class GroupIndex:
    """Summaries of groups by position, from 0 in the order they came."""

    def __init__(self) -> None:
        self.texts = TextStore()
        self.version = 0
        """Grows whenever a row is added or replaced."""
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
        """Names of all environments seen."""
        return list(self._environments)

    def add(self, summary: GroupSummary) -> int:
        """Append a group; return its position."""
        with self._lock:
            self._environments.setdefault(summary.environment, len(self._environments))
            self._rows.append(summary)
            self.version += 1
            return len(self._rows) - 1

    def replace(self, position: int, summary: GroupSummary) -> None:
        """Put what is known now in the place of what was."""
        with self._lock:
            self._environments.setdefault(summary.environment, len(self._environments))
            self._rows[position] = summary
            self._stale_from = min(self._stale_from, position)
            self.version += 1

    def match(self, wanted: GroupFilter, order: Order = "oldest") -> Matches:
        """List the groups that pass; a search of much text takes a quarter of a second per call."""
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
        keys = {"best": -high, "worst": low, "spread": low - high, "mean": -mean,
                "longest": -longest}  # fmt: skip
        positions = np.flatnonzero(accepted).astype(np.int64)
        if order == "newest":
            positions = positions[::-1]
        elif order in keys:
            positions = positions[np.argsort(keys[order][positions], kind="stable")]
        return Matches(positions, is_complete, num_searched)

    def scores_by_environment(self, max_groups: int = 20_000) -> dict[str, list[float]]:
        """Return the scores of the latest groups by the name of their environment."""
        found: dict[str, list[float]] = {}
        for row in self._rows[-max_groups:]:
            found.setdefault(row.environment, []).extend(row.scores)
        return found

    def rewards_by_step(
        self, max_groups: int = 20_000, *, max_points: int = 120
    ) -> dict[str, list[tuple[int, float]]]:
        """Return the mean score at each step by the name of the environment, steps ascending.

        Where more than `max_points` steps are known, neighbours share a point. Groups whose step
        nobody told are left out.
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
        """Return (groups, 6): environment, least, most and mean score, longest, step."""
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
            sum(scores) / len(scores),
            row.longest,
            _NO_STEP if row.step is None else row.step,
        )


def _thinned(by_step: dict[int, list[float]], max_points: int) -> list[tuple[int, float]]:
    """Return (last step, mean score) of as many neighbouring steps as leave `max_points`."""
    steps = sorted(by_step)
    size = -(-len(steps) // max_points)
    points = []
    for i in range(0, len(steps), size):
        scores = [score for step in steps[i : i + size] for score in by_step[step]]
        points.append((steps[i : i + size][-1], sum(scores) / len(scores)))
    return points

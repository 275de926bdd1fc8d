"""What a running environment has made lately: groups, tokens, scores and staleness.

Invariants: memory is bounded, whatever the length of the run; adding costs O(1).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["RunFigures"]

RATE_WINDOW_S = 60.0
FEWEST_IN_WINDOW = 8
NUM_RECENT_SCORES = 512
NUM_RECENT_STALENESS = 128


class RunFigures:
    """Recent figures of one environment.

    Args:
        now: clock, seconds.

    Attributes:
        begun_at: when rollouts began, None before.
        num_groups: groups made since then, dropped ones included.
        num_tokens: trained tokens in the well-formed ones of them.
        recent_scores: the latest scores, of dropped groups too.
        recent_staleness: trainer steps between the start of a rollout and its group.
        is_over: whether rollouts have ended.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.begun_at: float | None = None
        self.is_over = False
        self.num_groups = 0
        self.num_tokens = 0
        self.recent_scores: deque[float] = deque(maxlen=NUM_RECENT_SCORES)
        self.recent_staleness: deque[int] = deque(maxlen=NUM_RECENT_STALENESS)
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque()  # when, tokens
        self._counted_from = 0.0
        self._items_begun_at: dict[int, float] = {}
        self._num_items_begun = 0

    def begin(self) -> None:
        """Start the clock: rollouts begin now."""
        if self.begun_at is None:
            self.begun_at = self._counted_from = self._now()

    def begin_item(self) -> int:
        """Note that the rollout of an item begins now; return what `end_item` takes."""
        self._num_items_begun += 1
        self._items_begun_at[self._num_items_begun] = self._now()
        return self._num_items_begun

    def end_item(self, number: int) -> None:
        """Note that the rollout of an item has ended."""
        self._items_begun_at.pop(number, None)

    def end(self) -> None:
        """Note that no rollout runs any more."""
        self.is_over = True

    def add_group(self, group: Any, *, num_tokens: int) -> None:
        """Count a finished group.

        Args:
            group: its scores are kept; whatever else a malformed one has there is ignored.
            num_tokens: trained tokens, 0 when they cannot be counted.
        """
        self.num_groups += 1
        self.num_tokens += num_tokens
        self._arrivals.append((self._now(), num_tokens))
        self._forget_old()
        if isinstance(group, Mapping):
            self.recent_scores.extend(_finite_numbers(group.get("scores")))

    def add_staleness(self, steps: int) -> None:
        """Note how many trainer steps went by while a group was made."""
        self.recent_staleness.append(steps)

    @property
    def elapsed_s(self) -> float:
        """Seconds since rollouts began."""
        return 0.0 if self.begun_at is None else self._now() - self.begun_at

    @property
    def num_items_running(self) -> int:
        """Items whose rollouts have begun and not ended."""
        return len(self._items_begun_at)

    @property
    def oldest_item_s(self) -> float | None:
        """Seconds the longest running item has taken; None when nothing runs."""
        begun_at = min(self._items_begun_at.values(), default=None)
        return None if begun_at is None else self._now() - begun_at

    def rates(self) -> tuple[float, float]:
        """Return groups and tokens per second of the last minute, or of the latest groups."""
        self._forget_old()
        span_s = max(self._now() - self._counted_from, 1e-9)
        return len(self._arrivals) / span_s, sum(n for _, n in self._arrivals) / span_s

    def _forget_old(self) -> None:
        """Keep what arrived in the window, and a few more where little arrives."""
        oldest = self._now() - RATE_WINDOW_S
        while len(self._arrivals) > FEWEST_IN_WINDOW and self._arrivals[0][0] < oldest:
            self._counted_from, _ = self._arrivals.popleft()


def _finite_numbers(values: Any) -> Iterable[float]:
    if not isinstance(values, list | tuple):
        return []
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]

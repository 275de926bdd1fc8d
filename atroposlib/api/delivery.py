"""Which batches are on their way to a trainer; pure.

    hand_out ──► in flight ── acknowledge ──► gone
                    │  ▲
          give_back ▼  │ next_returned
                  returned (delivered again before anything new is formed)

A handout that the service no longer knows (it was reset meanwhile) is answered with False, so a
late acknowledgement changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atroposlib.api.queue import QueuedGroup

__all__ = ["Delivery", "Handout"]


@dataclass(frozen=True)
class Handout:
    """One batch, given to one client."""

    batch_id: int
    groups: tuple[QueuedGroup, ...]

    @property
    def group_ids(self) -> list[int]:
        """Ids of the groups, in order of delivery."""
        return [group.group_id for group in self.groups]


class Delivery:
    """Keeps a batch until its receiver has it; a returned one is the first to leave again."""

    def __init__(self) -> None:
        self._next_id = 0
        self._in_flight: dict[int, Handout] = {}
        self._returned: deque[Handout] = deque()

    @property
    def num_pending(self) -> int:
        """Batches formed but not acknowledged."""
        return len(self._in_flight) + len(self._returned)

    def hand_out(self, groups: Sequence[QueuedGroup]) -> Handout:
        """Put a newly formed batch in flight."""
        handout = Handout(self._next_id, tuple(groups))
        self._next_id += 1
        self._in_flight[handout.batch_id] = handout
        return handout

    def next_returned(self) -> Handout | None:
        """Put the batch that came back first in flight again; None when there is none."""
        if not self._returned:
            return None
        handout = self._returned.popleft()
        self._in_flight[handout.batch_id] = handout
        return handout

    def acknowledge(self, handout: Handout) -> bool:
        """Forget a batch that its receiver has; False when it was not in flight."""
        return self._in_flight.pop(handout.batch_id, None) is not None

    def give_back(self, handout: Handout) -> bool:
        """Queue a batch for redelivery, older ones first; False when it was not in flight."""
        if self._in_flight.pop(handout.batch_id, None) is None:
            return False
        self._returned.append(handout)
        self._returned = deque(sorted(self._returned, key=lambda h: h.batch_id))
        return True

    def clear(self) -> None:
        """Forget every batch; ids go on, so that late answers are recognised."""
        self._in_flight.clear()
        self._returned.clear()

"""Which payloads are kept for inspection, and which nobody needs any more; pure.

Invariant: a payload is given up at most once, and never while its group is among `past` or is the
latest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from atroposlib.api.past import PastGroups
from atroposlib.api.queue import QueuedGroup

__all__ = ["PayloadLedger"]


class PayloadLedger:
    """Follows payloads from the queue through the past to where they may be discarded."""

    def __init__(self, *, max_past_groups: int, max_past_bytes: int) -> None:
        self.past = PastGroups(max_groups=max_past_groups, max_bytes=max_past_bytes)
        """Delivered groups whose payloads can still be looked at."""
        self.latest: QueuedGroup | None = None
        """The group queued last; its payload is kept until another one is."""
        self.latest_is_held = False
        """Whether the latest group is kept for nothing but being the latest."""
        self._discardable: deque[int] = deque()

    @property
    def discardable(self) -> list[int]:
        """Ids of groups whose payloads nobody needs any more."""
        return list(self._discardable)

    def take_discardable(self, limit: int | None = None) -> list[int]:
        """Return, and forget, ids of groups whose payloads nobody needs any more.

        Args:
            limit: the most to return; None for all.
        """
        held = self._discardable
        count = len(held) if limit is None else min(limit, len(held))
        return [held.popleft() for _ in range(count)]

    def give_up(self, group_ids: Iterable[int]) -> None:
        """Note payloads that nobody needs any more."""
        self._discardable.extend(group_ids)

    def note_queued(self, group: QueuedGroup) -> None:
        """Note the group queued last; the one before it is kept for its own sake only."""
        if self.latest_is_held and self.latest is not None:
            self._discardable.append(self.latest.group_id)
        self.latest = group
        self.latest_is_held = False

    def note_delivered(self, groups: Sequence[QueuedGroup]) -> None:
        """Keep delivered groups for inspection; older ones make room for them."""
        for group_id in self.past.add(groups):
            if self.latest is not None and group_id == self.latest.group_id:
                self.latest_is_held = True
            else:
                self._discardable.append(group_id)

    def note_removed(self, groups: Iterable[QueuedGroup]) -> None:
        """Give up groups that were taken out of the run; the latest is kept for its own sake."""
        for group in groups:
            if self.latest is not None and group.group_id == self.latest.group_id:
                self.latest_is_held = True
            else:
                self._discardable.append(group.group_id)

    def give_up_past(self) -> None:
        """Make delivered groups that are kept for inspection discardable, except the latest."""
        for group_id in self.past.clear():
            if self.latest is not None and group_id == self.latest.group_id:
                self.latest_is_held = True
            else:
                self._discardable.append(group_id)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Give up everything: what is elsewhere in the run, by its ids, the past, the latest."""
        self.give_up(group_ids)
        self.give_up(self.past.clear())
        if self.latest_is_held and self.latest is not None:
            self._discardable.append(self.latest.group_id)
        self.latest = None
        self.latest_is_held = False

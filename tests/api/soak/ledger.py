"""Who posted what, what was acknowledged, and what came out: the account of a run under attack."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Delivery", "Kill", "Ledger"]


@dataclass(frozen=True)
class Delivery:
    """One batch that a trainer received in full."""

    number: int
    """Order of arrival over all trainers, comparable with `Kill.num_deliveries`."""
    group_numbers: tuple[int, ...]
    source: str = ""
    """Address of the replica that sent it."""


@dataclass(frozen=True)
class Kill:
    """One process that was killed."""

    num_deliveries: int
    """Batches that had arrived by then."""
    source: str | None
    """Address of a killed replica; None when what was killed serves all of them."""


@dataclass
class Ledger:
    """Numbers every group, and records its fate; safe for many threads.

    A group carries its number as the score of its first sequence.
    """

    acknowledged: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    deliveries: list[Delivery] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    num_queued: int = 0
    """Groups the service still held when everybody had stopped."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def new_number(self) -> int:
        """Number a group before it is posted."""
        return next(self._numbers)

    def acknowledge(self, number: int) -> None:
        """Record that the service said it has the group."""
        with self._lock:
            self.acknowledged.add(number)

    def refuse(self, number: int) -> None:
        """Record that the service said it will not take the group."""
        with self._lock:
            self.refused.add(number)

    def deliver(self, group_numbers: list[int], source: str = "") -> None:
        """Record a batch that arrived and counts."""
        with self._lock:
            number = len(self.deliveries)
            self.deliveries.append(Delivery(number, tuple(group_numbers), source))

    def mark_kill(self, source: str | None = None) -> None:
        """Record that a process was killed now."""
        with self._lock:
            self.kills.append(Kill(len(self.deliveries), source))

    @property
    def delivered(self) -> Counter[int]:
        """How often each group was delivered."""
        return Counter(n for delivery in self.deliveries for n in delivery.group_numbers)

    def faults(self, *, in_flight: int = 1) -> list[str]:
        """Say what does not add up: acknowledged = delivered + queued, each delivered once."""
        delivered = set(self.delivered)
        missing = len(self.acknowledged - delivered) - self.num_queued
        invented = delivered - self.acknowledged
        repeated = self.repeated_without_cause(in_flight=in_flight)
        return [
            text
            for text, is_wrong in (
                (f"{missing} acknowledged groups are neither delivered nor queued", missing),
                (f"{len(invented)} groups came out that nobody was told were taken", invented),
                (f"{len(repeated)} groups came twice without a kill to excuse it", repeated),
            )
            if is_wrong
        ]

    def repeated_without_cause(self, *, in_flight: int = 1) -> set[int]:
        """Groups delivered twice although their batch was not in flight at a kill.

        A batch may come again when its receiver had it but the service was killed before it could
        write that down: one of the last `in_flight` batches that the killed replica sent before
        the kill, or of the first after, since the kill is marked a moment late.
        """
        excused: set[int] = set()
        sources = {delivery.source for delivery in self.deliveries}
        for kill in self.kills:
            for source in sources if kill.source is None else {kill.source}:
                sent = [d for d in self.deliveries if d.source == source]
                before = [d for d in sent if d.number < kill.num_deliveries]
                after = [d for d in sent if d.number >= kill.num_deliveries]
                for delivery in before[len(before) - in_flight :] + after[:in_flight]:
                    excused.update(delivery.group_numbers)
        return {n for n, times in self.delivered.items() if times > 1} - excused

"""Batches in flight, from delivery to acknowledgement; pure.

    hand_out ──► in flight ── acknowledge ──► gone (its step counted)
                    │  ▲
          give_back ▼  │ hand_out_again (next attempt)
                  returned (redelivered before anything new is formed)

Invariants: each delivery of a batch is an *attempt* with its own token. A returned batch can be
acknowledged under its last token until it is redelivered; after that the old token is expired. An
unknown token, such as one from before a reset, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from atroposlib.api.queue import QueuedGroup

__all__ = [
    "AckResult",
    "BatchToken",
    "Delivery",
    "Handout",
    "parse_token",
]

_KEPT_ACKNOWLEDGEMENTS = 4096

AckResult: TypeAlias = Literal["acked", "returned", "repeated", "expired", "unknown"]
"""Result of acknowledging (`acked`) or returning (`returned`) a batch. `repeated`: it had happened
before; `expired`: the batch was redelivered or acknowledged; `unknown`: no such batch."""


class BatchToken(NamedTuple):
    """Names one attempt to deliver one batch; written as `17-1`."""

    batch_id: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.batch_id}-{self.attempt}"


def parse_token(text: str) -> BatchToken | None:
    """Parse a token; None if the text is malformed."""
    batch_id, separator, attempt = text.partition("-")
    if not (separator and _is_number(batch_id) and _is_number(attempt)):
        return None
    return BatchToken(int(batch_id), int(attempt))


def _is_number(text: str) -> bool:
    return len(text) < 19 and text.isascii() and text.isdigit()


class Handout(msgspec.Struct, frozen=True, array_like=True):
    """One delivery of a batch to one client."""

    batch_id: int
    attempt: int
    groups: tuple[QueuedGroup, ...]
    owner: str
    """The replica that delivered it."""
    at: float
    """Unix time of the delivery, in seconds."""
    lease_until: float | None = None
    """Unix time at which the lease expires; None while the body is being sent."""

    @property
    def lease_s(self) -> float | None:
        """Duration of the lease, in seconds; None while the body is being sent."""
        return None if self.lease_until is None else self.lease_until - self.at

    @property
    def token(self) -> str:
        """Token that the receiver acknowledges."""
        return str(BatchToken(self.batch_id, self.attempt))

    @property
    def group_ids(self) -> list[int]:
        """Ids of the groups, in order of delivery."""
        return [group.group_id for group in self.groups]

    @property
    def num_sequences(self) -> int:
        """Sequences in all groups."""
        return sum(group.num_sequences for group in self.groups)


class Delivery:
    """Keeps batches until they are acknowledged; returned ones are redelivered first."""

    def __init__(self) -> None:
        self.next_id = 0
        self.in_flight: dict[int, Handout] = {}
        self.returned: dict[int, Handout] = {}
        self.acknowledged: dict[int, int] = {}
        """Recently acknowledged batches → their attempt, oldest first."""
        self.num_sequences = 0
        """Sequences in unacknowledged batches."""

    @property
    def num_pending(self) -> int:
        """Number of unacknowledged batches."""
        return len(self.in_flight) + len(self.returned)

    @property
    def oldest_returned(self) -> Handout | None:
        """The batch to redeliver next; None if none was returned."""
        return self.returned[min(self.returned)] if self.returned else None

    def pending(self) -> Iterable[Handout]:
        """Every unacknowledged batch."""
        return [*self.in_flight.values(), *self.returned.values()]

    def hand_out(
        self, groups: Sequence[QueuedGroup], *, owner: str, at: float, lease_until: float | None
    ) -> Handout:
        """Put a newly formed batch in flight."""
        handout = Handout(self.next_id, 1, tuple(groups), owner, at, lease_until)
        self.next_id += 1
        self.in_flight[handout.batch_id] = handout
        self.num_sequences += handout.num_sequences
        return handout

    def hand_out_again(
        self, token: BatchToken, *, owner: str, at: float, lease_until: float | None
    ) -> Handout | None:
        """Put a returned batch in flight under its next attempt; None when it is not waiting."""
        before = self.returned.get(token.batch_id)
        if before is None or before.attempt + 1 != token.attempt:
            return None
        del self.returned[token.batch_id]
        again = Handout(token.batch_id, token.attempt, before.groups, owner, at, lease_until)
        self.in_flight[token.batch_id] = again
        return again

    def acknowledge(self, token: BatchToken) -> Handout | None:
        """Remove an acknowledged batch; None if the token is not the current one."""
        handout = self._current(token)
        if handout is None:
            return None
        self._forget(handout)
        self.acknowledged[token.batch_id] = token.attempt
        while len(self.acknowledged) > _KEPT_ACKNOWLEDGEMENTS:
            del self.acknowledged[next(iter(self.acknowledged))]
        return handout

    def give_back(self, token: BatchToken) -> Handout | None:
        """Mark a batch for redelivery; None if the token is not in flight."""
        handout = self.find(token)
        if handout is None:
            return None
        del self.in_flight[token.batch_id]
        self.returned[token.batch_id] = handout
        return handout

    def dissolve(self, batch_id: int) -> tuple[QueuedGroup, ...]:
        """Remove a returned batch and return its groups, which are queued again."""
        handout = self.returned[batch_id]
        self._forget(handout)
        return handout.groups

    def change_groups(
        self, change: Callable[[Iterable[QueuedGroup]], Iterable[QueuedGroup]]
    ) -> None:
        """Replace the descriptions of all groups in batches; sizes must not change."""
        for batches in (self.in_flight, self.returned):
            for batch_id, handout in batches.items():
                groups = tuple(change(handout.groups))
                batches[batch_id] = msgspec.structs.replace(handout, groups=groups)

    def find(self, token: BatchToken) -> Handout | None:
        """Return the batch that is in flight under a token."""
        handout = self.in_flight.get(token.batch_id)
        return handout if handout is not None and handout.attempt == token.attempt else None

    def ack_result(self, token: BatchToken) -> AckResult:
        """Return the result that acknowledging would have, without doing it."""
        if self._current(token) is not None:
            return "acked"
        return (
            "repeated"
            if self.acknowledged.get(token.batch_id) == token.attempt
            else (self._stale_result(token))
        )

    def return_result(self, token: BatchToken) -> AckResult:
        """Return the result that returning would have, without doing it."""
        handout = self._current(token)
        if handout is None:
            return self._stale_result(token)
        return "returned" if token.batch_id in self.in_flight else "repeated"

    def restore(self, in_flight: Iterable[Handout], returned: Iterable[Handout]) -> None:
        """Load the batches of a snapshot into an empty object."""
        self.in_flight = {handout.batch_id: handout for handout in in_flight}
        self.returned = {handout.batch_id: handout for handout in returned}
        self.num_sequences = sum(handout.num_sequences for handout in self.pending())

    def clear(self) -> None:
        """Remove every batch; ids are not reused, so that late acknowledgements are recognized."""
        self.in_flight.clear()
        self.returned.clear()
        self.acknowledged.clear()
        self.num_sequences = 0

    def _current(self, token: BatchToken) -> Handout | None:
        handout = self.in_flight.get(token.batch_id) or self.returned.get(token.batch_id)
        return handout if handout is not None and handout.attempt == token.attempt else None

    def _stale_result(self, token: BatchToken) -> AckResult:
        pending = self.in_flight.get(token.batch_id) or self.returned.get(token.batch_id)
        last = pending.attempt if pending else self.acknowledged.get(token.batch_id, 0)
        return "expired" if 1 <= token.attempt <= last else "unknown"

    def _forget(self, handout: Handout) -> None:
        self.in_flight.pop(handout.batch_id, None)
        self.returned.pop(handout.batch_id, None)
        self.num_sequences -= handout.num_sequences

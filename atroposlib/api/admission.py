"""Limits of a run: which groups are admitted, and how many more may be started; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from atroposlib.api.schemas import MAX_BATCH_SIZE
from atroposlib.errors import GroupError, TrajectoryApiError

__all__ = [
    "Admission",
    "BusyError",
    "KeyReusedError",
    "OversizedGroupError",
    "Placement",
    "QueueFullError",
    "RunLimits",
    "Waiting",
    "check_room",
    "check_sizes",
    "room_for",
]


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run; 0 means no limit unless the field says otherwise."""

    max_queue_sequences: int = 0
    """Sequences that may wait in the queue and in buffers."""
    max_queue_bytes: int = 0
    """Payload bytes that may wait in the queue and in buffers."""
    max_staleness_steps: int = 0
    """Maximum number of trainer steps while a group waits."""
    env_expiry_s: float = 600.0
    """Seconds of silence after which an environment counts as disconnected; 0: never."""
    max_waiting_requests: int = 4096
    """Maximum number of requests that wait for a batch at a time; 0: no limit."""
    max_batches_in_flight: int = 1024
    """Maximum number of delivered, unacknowledged batches at a time; 0: no limit."""
    keep_past_groups: int = 256
    """Delivered groups kept for inspection; 0 keeps none."""
    keep_past_bytes: int = 256 * 1024 * 1024
    """Payload bytes of delivered groups kept for inspection; 0 keeps none."""


class QueueFullError(TrajectoryApiError):
    """The queue has no room for these groups; retry after `retry_after_s`."""


class BusyError(TrajectoryApiError):
    """Too many waiting requests, or unacknowledged batches; retry after `retry_after_s`."""


class KeyReusedError(TrajectoryApiError):
    """An idempotency key was reused with another body."""


class OversizedGroupError(GroupError):
    """A group holds more sequences than a batch, so it could never be delivered.

    Attributes:
        index: Position of the group among those of its request.
    """

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class Placement(NamedTuple):
    """Placement of a posted group: queued or buffered."""

    buffered_sequences: int | None
    """Sequences left in the sender's buffer; None when the group went straight to the queue."""


class Admission(NamedTuple):
    """The outcome of one request that posts groups."""

    placements: list[Placement]
    """[groups] placements, in the order of the request."""
    is_repeat: bool = False
    """Whether the request had been stored before; the placements are then the earlier ones."""
    is_key_reused: bool = False
    """Whether its key had been used for another body; nothing was stored."""


class Waiting(NamedTuple):
    """Sequences and bytes that wait for a trainer."""

    num_sequences: int
    num_bytes: int


def check_sizes(sizes: Iterable[int], *, batch_size: int) -> None:
    """Reject groups that are larger than a batch.

    Args:
        sizes: sequences per group of a request.
        batch_size: sequences per batch; 0 before a trainer registered.

    Raises:
        OversizedGroupError: names the first group that is too large.
    """
    limit = batch_size or MAX_BATCH_SIZE
    for index, size in enumerate(sizes):
        if size > limit:
            raise OversizedGroupError(
                f"tokens: {size} sequences, a batch holds {limit}, so the group could never leave; "
                "post smaller groups, or register the trainer with a larger batch_size",
                index=index,
            )


def check_room(
    limits: RunLimits, *, waiting: Waiting, arriving: Waiting, retry_after_s: float
) -> None:
    """Reject groups for which there is no room.

    A request larger than a whole limit is admitted when nothing waits; otherwise it could never be
    admitted.

    Raises:
        QueueFullError: the groups and those that wait exceed a limit; the message names it.
    """
    if waiting.num_sequences <= 0:
        return
    for limit, held, more, unit in (
        (limits.max_queue_sequences, waiting.num_sequences, arriving.num_sequences, "sequences"),
        (limits.max_queue_bytes, waiting.num_bytes, arriving.num_bytes, "bytes"),
    ):
        if limit and held + more > limit:
            raise QueueFullError(
                f"{held} {unit} wait for the trainer and {more} more would exceed the limit of "
                f"{limit}; send them again in {retry_after_s:g} s",
                status=503,
                retry_after_s=retry_after_s,
            )


def room_for(
    limits: RunLimits, *, waiting: Waiting, pending_sequences: int, batch_size: int
) -> int | None:
    """Return how many sequences may still be produced; None without a limit.

    Staleness is bounded by the number of batches ahead of a new group: with `max_staleness_steps`
    batches ahead of it, it is that many steps old when it is delivered.

    Args:
        limits: the bounds.
        waiting: sequences and bytes in the queue and in buffers.
        pending_sequences: sequences of batches formed but not acknowledged.
        batch_size: sequences per batch; 0 before a trainer registered.
    """
    rooms = []
    if limits.max_queue_sequences:
        rooms.append(limits.max_queue_sequences - waiting.num_sequences)
    if limits.max_queue_bytes and waiting.num_sequences > 0:
        bytes_per_sequence = max(1.0, waiting.num_bytes / waiting.num_sequences)
        rooms.append(int((limits.max_queue_bytes - waiting.num_bytes) / bytes_per_sequence))
    if limits.max_staleness_steps and batch_size:
        bound = batch_size * (limits.max_staleness_steps + 1)
        rooms.append(bound - waiting.num_sequences - pending_sequences)
    return max(0, min(rooms)) if rooms else None

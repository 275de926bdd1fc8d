"""Admission in the order in which rollouts were started; pure.

An environment numbers its rollouts. A group carries the number of its rollout, its *ticket*, and is
held until every earlier ticket is settled. A rollout without a group returns its ticket.

    rollout ──► ticket 7 ──► group ─────────────► held ── in turn ──► queue
                         └─► none: returned ────────┘

Environments take turns in proportion to their weights, and in the order of their names. So the
order of the queue depends on the tickets, and not on how long a rollout took.

Invariants: a held group is released once; the next ticket of an environment only grows. A group
whose ticket was settled before, by its return or its expiry, is *late*: it is not held, and neither
is a group whose environment has disconnected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from atroposlib.api.environments import MIN_ENV_WEIGHT, EnvRecord
from atroposlib.api.queue import QueuedGroup, Waiting
from atroposlib.errors import GroupError
from atroposlib.wire import DecodedGroup, StoredPayload, convert_payload

MAX_TICKETS_AHEAD = 65_536
"""Maximum distance of a ticket from the next one of its environment."""
_MAX_TICKET = 2**53 - 1


class Ticket(NamedTuple):
    """Number of one rollout of one environment; written as `3-17`."""

    env_id: int
    number: int

    def __str__(self) -> str:
        return f"{self.env_id}-{self.number}"


def parse_ticket(text: str) -> Ticket:
    """Parse the value of the header `Rollout-Ticket`.

    Raises:
        GroupError: the text is not a ticket.
    """
    parts = text.split("-")
    if len(parts) == 2 and all(p.isascii() and p.isdigit() and len(p) < 17 for p in parts):
        ticket = Ticket(int(parts[0]), int(parts[1]))
        if max(ticket) <= _MAX_TICKET:
            return ticket
    raise GroupError(
        "Rollout-Ticket: expected the environment id and the number of the rollout, such as 3-17"
    )


TIME_DEPENDENT_FIELDS = ("env_id", "policy_version", "token_versions", "traces", "traceparent")
"""Fields of a group that may differ between two runs with the same tickets and the same tokens."""


def repeatable_digest(group: DecodedGroup) -> int:
    """Return a 64-bit digest of a group without `TIME_DEPENDENT_FIELDS`."""
    stored = StoredPayload(group.wire_format, group.payload)
    fields = msgspec.json.decode(convert_payload(stored, "json"))
    kept = {name: value for name, value in fields.items() if name not in TIME_DEPENDENT_FIELDS}
    return xxh3_64_intdigest(msgspec.json.encode(kept, order="sorted"))


class TicketStream(msgspec.Struct):
    """The tickets of one environment."""

    env_id: int
    name: str
    weight: float
    pace: float
    """Tickets settled, divided by the weight; the environment with the lowest is next."""
    next_number: int = 0
    is_connected: bool = True
    held: dict[int, list[QueuedGroup]] = {}
    """Settled tickets that wait for their turn, with their groups; a returned one has none."""

    @property
    def turn(self) -> tuple[float, str, int]:
        return self.pace, self.name, self.env_id


class TicketDesk:
    """The tickets of a run; empty if no environment numbers its rollouts.

    Attributes:
        num_envs: environments that must have sent a ticket before the first group is released.
        is_used: whether groups are admitted in the order of tickets.
        waiting: sequences and bytes that are held; each status request reads it.
    """

    def __init__(self) -> None:
        self.num_envs = 0
        self.is_used = False
        self.waiting = Waiting(0, 0)
        self._streams: dict[int, TicketStream] = {}
        self._is_open = False

    def require(self, num_envs: int) -> None:
        """Wait for at least `num_envs` environments; 0 changes nothing."""
        self.num_envs = max(self.num_envs, num_envs)
        self.is_used = self.num_envs > 0

    def has_joined(self, env_id: int) -> bool:
        """Whether an environment has sent a ticket."""
        return env_id in self._streams

    @property
    def streams(self) -> list[TicketStream]:
        return list(self._streams.values())

    def __iter__(self) -> Iterator[QueuedGroup]:
        """Iterate over the groups that are held."""
        for stream in self._streams.values():
            for groups in stream.held.values():
                yield from groups

    def held_of(self, env_id: int) -> list[QueuedGroup]:
        """Return the groups of one environment that are held."""
        stream = self._streams.get(env_id)
        return [] if stream is None else [g for groups in stream.held.values() for g in groups]

    @property
    def blocking(self) -> Ticket | None:
        """The ticket for which held groups wait; None if no group is held."""
        if not self._is_open or not any(stream.held for stream in self._streams.values()):
            return None
        stream = self._next_stream()
        return None if stream is None else Ticket(stream.env_id, stream.next_number)

    def counted(
        self, ticket: Ticket, waiting: Waiting, arriving: Waiting
    ) -> tuple[Waiting, Waiting]:
        """Return what waits and what arrives, as the limits of the queue count them.

        Groups with the next ticket of their environment are those for which others are held. Only
        the queue itself keeps them out, once it is full.
        """
        if ticket.number != self._next_number(ticket.env_id):
            return waiting, arriving
        return waiting.plus(self.waiting, -1), Waiting(1, 1)

    def _next_number(self, env_id: int) -> int:
        stream = self._streams.get(env_id)
        return 0 if stream is None else stream.next_number

    def check(self, ticket: Ticket) -> None:
        """Raise `GroupError` if a ticket is too far ahead of the next one."""
        first = self._next_number(ticket.env_id)
        if ticket.number - first > MAX_TICKETS_AHEAD:
            raise GroupError(
                f"Rollout-Ticket: {ticket} is more than {MAX_TICKETS_AHEAD} after the next ticket "
                f"of its environment, {first}; number rollouts from 0 after a registration"
            )

    def settle(
        self, number: int, env: EnvRecord, groups: list[QueuedGroup]
    ) -> list[list[QueuedGroup]] | None:
        """Hold the groups of a ticket, none if it was returned; return those whose turn it is.

        Returns:
            The groups of each ticket that is released, in order; None if the ticket is late, or
            tickets are not used.
        """
        if not self.is_used:
            return None
        stream = self._streams.get(env.env_id) or self._join(env)
        if number < stream.next_number or number in stream.held:
            return None
        if not stream.is_connected:
            return [groups, *self._release()]
        stream.held[number] = groups
        self.waiting = self.waiting.plus(Waiting.of(groups))
        return self._release()

    def disconnect(self, env_id: int) -> tuple[list[list[QueuedGroup]], int]:
        """Let an environment miss its turns.

        Returns:
            The groups of each ticket that is released, its own first; and how many of its tickets
            before the last held one were not settled, and have expired.
        """
        stream = self._streams.get(env_id)
        if stream is None or not stream.is_connected:
            return [], 0
        stream.is_connected = False
        own = [stream.held[number] for number in sorted(stream.held)]
        end = max(stream.held, default=stream.next_number - 1) + 1
        num_expired = end - stream.next_number - len(own)
        self.waiting = self.waiting.plus(Waiting.of(self.held_of(env_id)), -1)
        stream.held, stream.next_number = {}, end
        return own + self._release(), num_expired

    def reconnect(self, env_id: int) -> None:
        stream = self._streams.get(env_id)
        if stream is not None:
            stream.pace = max(stream.pace, self._lowest_pace())
            stream.is_connected = True

    def restore(self, num_envs: int, is_open: bool, streams: list[TicketStream]) -> None:
        self.require(num_envs)
        self._is_open = is_open
        self._streams = {stream.env_id: stream for stream in streams}
        self.waiting = Waiting.of(self)

    @property
    def is_open(self) -> bool:
        """Whether `num_envs` environments have sent a ticket."""
        return self._is_open

    def _join(self, env: EnvRecord) -> TicketStream:
        weight = max(MIN_ENV_WEIGHT, env.weight)
        pace = self._lowest_pace() if self._is_open else 0.0
        stream = TicketStream(
            env.env_id, env.desired_name, weight, pace, is_connected=env.is_connected, held={}
        )
        self._streams[env.env_id] = stream
        self._is_open = self._is_open or len(self._streams) >= self.num_envs
        return stream

    def _lowest_pace(self) -> float:
        return min((s.pace for s in self._streams.values() if s.is_connected), default=0.0)

    def _next_stream(self) -> TicketStream | None:
        connected = (stream for stream in self._streams.values() if stream.is_connected)
        return min(connected, key=lambda stream: stream.turn, default=None)

    def _release(self) -> list[list[QueuedGroup]]:
        released: list[list[QueuedGroup]] = []
        while self._is_open:
            stream = self._next_stream()
            if stream is None or stream.next_number not in stream.held:
                break
            groups = stream.held.pop(stream.next_number)
            self.waiting = self.waiting.plus(Waiting.of(groups), -1)
            released.append(groups)
            stream.next_number += 1
            stream.pace += 1.0 / stream.weight
        return released

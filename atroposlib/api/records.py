"""The records of the log of a run, and their bytes.

The state of a run results from applying its records in order (`state`). Times, ids and choices are
part of the records, so that applying them again, later or in another process, gives the same state.

There are two kinds. *Guarded* records remove groups or change the run; their writer has applied
every guarded record before them. The others commute with them: they carry the *epoch*, the number
of resets their writer had applied, and are ignored by a run that has been reset since.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, get_args

import msgspec

from atroposlib.api.queue import QueuedGroup
from atroposlib.errors import ConfigError

_FORMAT = b"\x01"
"""First byte of every record; incremented by a change that older readers would misread."""

ReturnReason = Literal["lost", "refused", "expired", "owner_gone"]
"""Reason for which a batch was returned: its body did not arrive, its receiver returned it, its
lease expired, or no replica is sending it: its replica has stopped, or could not confirm that the
delivery was written."""

PayloadFlaw = Literal["missing", "damaged"]
"""Reason for which a group cannot be delivered: its payload in the store is missing or damaged."""


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all records: a MessagePack array that starts with the name of the record."""

    is_guarded: ClassVar[bool] = True


class TrainerRegistered(_Record, frozen=True, tag="trainer_registered"):
    """A trainer started the run, joined it, or replaced its settings."""

    settings: dict[str, Any]  # the fields of `schemas.Registration`
    trainer_id: str
    """128-bit number in hexadecimal."""
    at: float


class ConsumerLeft(_Record, frozen=True, tag="consumer_left"):
    """A consumer has ended; another one or a trainer may register."""

    trainer_id: str
    at: float


class TrainerStarted(_Record, frozen=True, tag="trainer_started"):
    """A trainer requested a batch for the first time."""

    is_guarded: ClassVar[bool] = False
    epoch: int


class EnvRegistered(_Record, frozen=True, tag="env_registered"):
    """An environment joined the run."""

    env_id: int
    request: dict[str, Any]  # the fields of `schemas.RegisterEnv`
    at: float
    ordered_envs: int = 0
    """`RunLimits.ordered_envs` of the replica at the registration."""


class EnvDisconnected(_Record, frozen=True, tag="env_disconnected"):
    """An environment disconnected, or timed out."""

    env_id: int
    is_expired: bool
    at: float


class EnvRevived(_Record, frozen=True, tag="env_revived"):
    """An environment that had timed out sent a request again."""

    env_id: int
    at: float


class EnvsSeen(_Record, frozen=True, tag="envs_seen"):
    """Heartbeats of all environments, written at intervals."""

    is_guarded: ClassVar[bool] = False
    epoch: int
    seen: dict[int, float]


class GroupsAdmitted(_Record, frozen=True, tag="groups_admitted"):
    """Groups of one request were stored."""

    is_guarded: ClassVar[bool] = False
    epoch: int
    groups: list[QueuedGroup]
    at: float
    num_loose: int = 0
    """Groups in which the lengths of an optional field differ from those of `tokens`."""
    key: str | None = None
    """Idempotency key of the request."""
    digest: int = 0
    """Digest of the body, to distinguish a repetition from another use of the key."""
    num_from_text: int = 0
    """Groups whose tokens were encoded from text."""
    ticket: int | None = None
    """Number of the rollout, in admission by tickets."""
    contents: list[int] = []
    """[groups] digests without what depends on time (`repeatable_digest`), if there is a ticket."""


class TicketReturned(_Record, frozen=True, tag="ticket_returned"):
    """A rollout ended without a group, or the wait for its group has ended."""

    is_guarded: ClassVar[bool] = False
    epoch: int
    env_id: int
    number: int
    is_expired: bool
    at: float


class BatchFormed(_Record, frozen=True, tag="batch_formed"):
    """Groups left the queue as a new batch, which was delivered."""

    batch_id: int
    group_ids: list[int]
    owner: str
    """The replica that delivered the batch."""
    at: float
    lease_until: float | None = None
    """Unix time at which the lease expires; None while the body is being sent."""
    key: str | None = None
    """Idempotency key of the request."""


class BatchHandedOut(_Record, frozen=True, tag="batch_handed_out"):
    """A returned batch was redelivered."""

    batch_id: int
    attempt: int
    owner: str
    at: float
    lease_until: float | None = None
    key: str | None = None


class BatchAcknowledged(_Record, frozen=True, tag="batch_acknowledged"):
    """A batch was acknowledged and counts as a step."""

    batch_id: int
    attempt: int
    at: float


class BatchPassedOver(_Record, frozen=True, tag="batch_passed_over"):
    """A batch was acknowledged without a step: not trained on, or already counted.

    This is a separate record so that an older service stops instead of counting a step.
    """

    batch_id: int
    attempt: int
    at: float


class BatchesReturned(_Record, frozen=True, tag="batches_returned"):
    """Batches were returned and will be redelivered before a new one is formed."""

    batches: list[tuple[int, int]]
    """(batch_id, attempt) of each."""
    reason: ReturnReason
    at: float


class PolicyVersionSet(_Record, frozen=True, tag="policy_version_set"):
    """The trainer reported a new policy version."""

    is_guarded: ClassVar[bool] = False
    epoch: int
    version: int


class GroupsRemoved(_Record, frozen=True, tag="groups_removed"):
    """An operator removed waiting groups."""

    group_ids: list[int]
    at: float


class GroupsSetAside(_Record, frozen=True, tag="groups_set_aside"):
    """Some groups of a batch cannot be delivered; its other groups are queued again."""

    batch_id: int
    attempt: int
    flaws: list[tuple[int, PayloadFlaw]]
    """(group_id, flaw) of each group that is removed from the run."""
    at: float


class RunReset(_Record, frozen=True, tag="run_reset"):
    """The run was reset."""

    at: float


Record: TypeAlias = (
    TrainerRegistered
    | ConsumerLeft
    | TrainerStarted
    | EnvRegistered
    | EnvDisconnected
    | EnvRevived
    | EnvsSeen
    | GroupsAdmitted
    | TicketReturned
    | BatchFormed
    | BatchHandedOut
    | BatchAcknowledged
    | BatchPassedOver
    | BatchesReturned
    | PolicyVersionSet
    | GroupsRemoved
    | GroupsSetAside
    | RunReset
)

RecordType: TypeAlias = type[_Record]


class UnreadableRecordError(ConfigError):
    """A record is damaged, or was written by a later version of the service.

    Attributes:
        record_type: Type of the record; None if it is unknown to this version.
    """

    def __init__(self, message: str, record_type: RecordType | None = None) -> None:
        super().__init__(message)
        self.record_type = record_type


def kind_of(record_type: RecordType) -> str:
    """Return the name under which a record is written."""
    return str(record_type.__struct_config__.tag)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Encode a record for the log."""
    return _FORMAT + _encoder.encode(record)


_types_by_tag = {_encoder.encode(kind_of(each)): each for each in get_args(Record)}


def decode_record(content: bytes) -> Record:
    """Decode a record of the log.

    Raises:
        UnreadableRecordError: the record is damaged, or was written by a later version.
    """
    if content[:1] != _FORMAT:
        raise UnreadableRecordError(
            f"the run holds a record of format {content[:1].hex() or 'none'}, this service reads "
            f"{_FORMAT.hex()}; serve the run with the version that wrote it, or start another run"
        )
    try:
        return _decoder.decode(memoryview(content)[1:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableRecordError(
            f"the run holds a record this service cannot read ({error}); serve the run with the "
            "version that wrote it, or start another run",
            # The tag follows the format byte and the header of the array.
            next((each for tag, each in _types_by_tag.items() if content.startswith(tag, 2)), None),
        ) from error

"""How groups come into a run: repeated requests, room, ids, one record for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atroposlib.api.admission import (
    Admission,
    KeyReusedError,
    RunLimits,
    Waiting,
    check_room,
    check_sizes,
)
from atroposlib.api.idempotency import check_key
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.queued_group import UNKNOWN_VERSION, checksum_of
from atroposlib.api.records import BatchFormed, GroupsAdmitted, Record
from atroposlib.api.run_log import RunLog
from atroposlib.api.run_state import RunState
from atroposlib.api.store.base import Payload, RunStore
from atroposlib.wire import DecodedGroup

__all__ = ["AdmissionDesk"]

_MAX_DIGEST = (1 << 64) - 1
_RETRY_AFTER_BOUNDS_S = (1.0, 30.0)
_RETRY_AFTER_S = 5.0


class AdmissionDesk:
    """Admits groups to a run.

    Invariant: what is being written counts as waiting, so that requests that come together cannot
    exceed a limit together.
    """

    def __init__(
        self,
        log: RunLog,
        state: RunState,
        store: RunStore,
        *,
        limits: RunLimits,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._limits = limits
        self._state = state
        self._store = store
        self._clock = clock
        self._arriving = Waiting(0, 0)
        self._formed_at = (0.0, 0.0)
        """When the last batch but one was formed, and the last one."""

    def note(self, record: Record) -> None:
        """Learn from an applied record how fast batches leave."""
        if isinstance(record, BatchFormed):
            self._formed_at = (self._formed_at[1], record.at)

    async def admit(
        self, groups: Sequence[DecodedGroup], *, key: str | None = None, digest: int = 0
    ) -> Admission:
        """Store groups, all or none, then queue or buffer each in order.

        Cancelling before it returns admits all of them or none.

        Args:
            groups: the groups of one request.
            key: idempotency key of the request; with a key that was used before, nothing is
                stored and the answer is the former one.
            digest: of the body, to tell a repetition from another use of the key; the lowest 64
                bits count.

        Raises:
            GroupError: the key is empty or too long.
            KeyReusedError: the key was used for another body.
            OversizedGroupError: a group holds more than a batch; nothing is stored.
            QueueFullError: there is no room; `retry_after_s` says when to ask again.
        """
        digest &= _MAX_DIGEST
        repeated = self._find_repeated(key, digest)
        if repeated is not None or not groups:
            return repeated or Admission([])
        is_exact = self._state.consumer is None  # a consumer takes groups of every size
        check_sizes(
            (group.num_sequences for group in groups),
            batch_size=self._state.batch_size if is_exact else 0,
        )
        arriving = Waiting(
            sum(group.num_sequences for group in groups), sum(len(g.payload) for g in groups)
        )
        self._check_room(arriving)
        self._expect(arriving, 1)
        try:
            return await self._admit(groups, key, digest)
        finally:
            self._expect(arriving, -1)

    async def _admit(
        self, groups: Sequence[DecodedGroup], key: str | None, digest: int
    ) -> Admission:
        group_ids = await self._store.new_group_ids(len(groups))
        now = self._clock()
        record = GroupsAdmitted(
            epoch=self._state.epoch,
            groups=[self._describe(i, g, now) for i, g in zip(group_ids, groups, strict=True)],
            at=now,
            num_loose=sum(group.is_loose for group in groups),
            num_from_text=sum(group.is_from_text for group in groups),
            key=key,
            digest=digest,
        )
        payloads = [Payload(i, g.payload) for i, g in zip(group_ids, groups, strict=True)]
        admission = await self._log.append_groups(record, payloads)
        if admission.is_key_reused:
            raise _key_reused(key)
        return admission

    def _describe(self, group_id: int, group: DecodedGroup, now: float) -> QueuedGroup:
        env = self._state.envs.find(group.env_id)
        version = group.policy_version
        if version is None:
            # The batches that a consumer takes are steps of no policy.
            version = self._state.current_version if self._state.has_trainer else UNKNOWN_VERSION
        return QueuedGroup(
            group_id=group_id,
            env_id=None if env is None else env.env_id,
            num_sequences=group.num_sequences,
            num_tokens=group.num_tokens,
            num_bytes=len(group.payload),
            lane=group.lane,
            version=version,
            received_at=now,
            min_score=group.min_score,
            max_score=group.max_score,
            checksum=checksum_of(group.payload),
        )

    def _find_repeated(self, key: str | None, digest: int) -> Admission | None:
        if key is None:
            return None
        check_key(key)
        known = self._state.keys.find(key)
        if known is None:
            return None
        if known.digest != digest:
            raise _key_reused(key)
        return Admission(known.placements, is_repeat=True)

    def _check_room(self, arriving: Waiting) -> None:
        waiting = self._state.waiting
        check_room(
            self._limits,
            waiting=Waiting(
                waiting.num_sequences + self._arriving.num_sequences,
                waiting.num_bytes + self._arriving.num_bytes,
            ),
            arriving=arriving,
            retry_after_s=self._retry_after_s(),
        )

    def _expect(self, arriving: Waiting, sign: int) -> None:
        """Count groups that are being written: they take room from those that come meanwhile."""
        held = self._arriving
        self._arriving = Waiting(
            held.num_sequences + sign * arriving.num_sequences,
            held.num_bytes + sign * arriving.num_bytes,
        )

    def _retry_after_s(self) -> float:
        """Return about how long it takes until the next batch leaves."""
        before, last = self._formed_at
        if not before:
            return _RETRY_AFTER_S
        low, high = _RETRY_AFTER_BOUNDS_S
        return float(min(high, max(low, round(last - before))))


def _key_reused(key: str | None) -> KeyReusedError:
    return KeyReusedError(
        f"the idempotency key {key!r} was used for another body; a new request needs a new key",
        status=422,
    )

"""The log of one run: writes records through the store, applies them to the state.

    append(record) ──► store ──► apply(position, bytes) ──► state, in log order
                        ▲ other replicas

Invariants: the state holds exactly the records applied. A record that is damaged or makes no sense
is set aside under a counted name, and the run goes on without it; one of a kind that this version
does not know stops the run for good, because whatever is decided without it would be wrong. Nothing
that goes wrong with one record keeps the next from being applied. Guarded records of this process
are decided and written one after the other: the lock spans looking at the state and writing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from atroposlib.api.admission import Admission
from atroposlib.api.records import (
    GroupsAdmitted,
    Record,
    UnreadableRecordError,
    decode_record,
    encode_record,
    kind_of,
)
from atroposlib.api.run_snapshot import freeze, restore
from atroposlib.api.run_state import RunState
from atroposlib.api.store.base import Payload, RunStore, StoreFullError
from atroposlib.errors import ConfigError, RunStoreError

__all__ = ["RunLog"]

logger = logging.getLogger(__name__)

_MIN_RECORDS_TO_COMPACT = 10_000
_RECORDS_PER_GROUP_TO_COMPACT = 4
_DISCARDED_AT_ONCE = 500

T = TypeVar("T")


class RunLog:
    """Keeps a state and its store together.

    Args:
        store: where the records go.
        state: what they are applied to; nothing else may change it.
        on_applied: called after every record, whoever wrote it.
    """

    def __init__(
        self, store: RunStore, state: RunState, *, on_applied: Callable[[Record], None]
    ) -> None:
        self.failure: ConfigError | None = None
        """Why the run cannot go on; None as long as it can."""
        self._store = store
        self._state = state
        self._on_applied = on_applied
        self._position = 0
        self._num_records = 0  # in the log behind its snapshot
        self._least_when_full = _MIN_RECORDS_TO_COMPACT // 100
        self.is_new = True
        """Whether nothing was ever written to this run."""
        self._outcomes: dict[int, Admission | None] = {}
        self._deciding = asyncio.Lock()

    async def open(self) -> None:
        """Load the run.

        Raises:
            ConfigError: the store cannot be used, or holds what this version cannot read.
        """
        await self._store.open(self._apply, self._restore)
        self.check()

    def check(self) -> None:
        """Refuse to go on with a run that could not be read in full."""
        if self.failure is not None:
            raise self.failure

    async def append(self, record: Record) -> None:
        """Write a record that commutes with others, and apply it."""
        self.check()
        await self._store.append(encode_record(record))

    async def append_groups(self, record: GroupsAdmitted, payloads: Sequence[Payload]) -> Admission:
        """Write groups with their payloads, all or none; return what became of them."""
        self.check()
        first = record.groups[0].group_id
        self._outcomes[first] = None
        try:
            await self._store.append(encode_record(record), payloads)
            self.check()
            return self._outcomes[first] or self._outcome_in_state(record)
        finally:
            del self._outcomes[first]

    def _outcome_in_state(self, record: GroupsAdmitted) -> Admission:
        """Read off the state what became of groups whose record was compacted by another replica.

        Raises:
            RunStoreError: the state does not tell.
        """
        known = self._state.keys.find(record.key) if record.key is not None else None
        if known is not None and known.digest == record.digest:
            return Admission(known.placements)
        raise RunStoreError(
            "the groups were written, but where they went was lost with the connection to the "
            "store; requests that carry an idempotency key can be repeated safely"
        )

    async def guarded(self, decide: Callable[[], tuple[Record | None, T]]) -> T:
        """Decide on the state and write the decision; decide anew when another replica was faster.

        Args:
            decide: looks at the state, returns the guarded record to write, None for nothing, and
                the answer. What it raises is passed on.
        """
        async with self._deciding:
            while True:
                self.check()
                record, answer = decide()
                if record is None:
                    return answer
                if await self._store.append(encode_record(record), fence=self._state.fence):
                    return answer

    async def discard(self) -> None:
        """Let the store forget payloads that nobody needs; what fails is tried again later."""
        ledger = self._state.payloads
        if self._store.full_reason is not None:
            ledger.give_up_past()  # space for new groups matters more than inspection
        while group_ids := ledger.take_discardable(_DISCARDED_AT_ONCE):
            try:
                await self._store.discard(group_ids)
            except OSError as error:
                ledger.give_up(group_ids)
                logger.warning("payloads are kept until the store works again: %s", error)
                return
            except BaseException:
                ledger.give_up(group_ids)
                raise
            await asyncio.sleep(0)

    async def compact_if_due(self) -> None:
        """Replace a long log by a snapshot, written in slices between which others run."""
        alive = self._state.num_alive_groups
        is_full = self._store.full_reason is not None  # then a shorter log frees space
        least = self._least_when_full if is_full else _MIN_RECORDS_TO_COMPACT
        if self._num_records <= max(least, _RECORDS_PER_GROUP_TO_COMPACT * alive):
            return
        num_records, position = self._num_records, self._position
        frozen = freeze(self._state)
        for _ in frozen.encode_in_slices():
            await asyncio.sleep(0)
        content = frozen.content()
        await asyncio.sleep(0)
        try:
            await self._store.compact(content, position=position)
        except StoreFullError:
            self._least_when_full = 2 * num_records
            return
        self._num_records = max(0, self._num_records - num_records)
        logger.info("wrote a snapshot in place of %d records", num_records)

    def _restore(self, content: bytes) -> None:
        """Take over a snapshot: at the start, or because others compacted what was not applied."""
        try:
            restore(self._state, content)
        except ConfigError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the run's snapshot cannot be taken over")
            self.failure = ConfigError(
                f"the run's snapshot cannot be taken over ({error!r}); serve the run with the "
                "version that wrote it, or start another run"
            )
        if self._state.fault is not None:
            self._tell_fault("the snapshot of the run was taken over in part")
        self._num_records = 0
        self.is_new = False

    def _apply(self, position: int, content: bytes) -> None:
        if self.failure is not None:
            return
        try:
            record = decode_record(content)
        except UnreadableRecordError as error:
            self._skip(position, error)
            return
        self._count(position)
        outcome = self._state.apply(record)
        if self._state.fault is not None:
            self._tell_fault(f"record {position} of the run ({kind_of(type(record))}) is set aside")
        if isinstance(record, GroupsAdmitted) and record.groups:
            first = record.groups[0].group_id
            if first in self._outcomes:
                self._outcomes[first] = outcome
        try:
            self._on_applied(record)
        except Exception:  # the record holds, whoever could not be told of it
            logger.exception("record %d of the run was applied, what follows failed", position)

    def _skip(self, position: int, error: UnreadableRecordError) -> None:
        """Set a damaged record aside, if it is known what it was; else stop the run."""
        if error.record_type is None:
            self.failure = error
            logger.error("the run stops: %s", error)
            return
        self._count(position)
        self._state.skip(error.record_type, error.__cause__ or error)
        self._tell_fault(f"record {position} of the run ({kind_of(error.record_type)}) is damaged")

    def _count(self, position: int) -> None:
        self._position = position + 1
        self._num_records += 1
        self.is_new = False

    def _tell_fault(self, what: str) -> None:
        logger.error("%s, the run goes on without it: %s", what, self._state.fault)

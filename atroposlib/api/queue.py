"""The queue of groups that wait for a batch, its limits, and the rules that choose a batch; pure.

    append ──► oldest … newest ──► plan_batch ──► remove
    restore_front ──► (before the oldest)

The queue holds descriptions of groups, never payloads, so its size does not depend on the length
of trajectories. A batch is chosen in one of two ways, and groups are never split:

    without guaranteed shares   `pack_exact`: whole packs of equally sized groups in the order in
                                which they complete; else `oldest_combination`: the oldest groups
                                whose sizes add up to the batch
    with guaranteed shares      `pack_with_minimums`: each environment's share first, then the
                                rest, oldest first

A trainer that accepts short batches gets, where these rules find none, the oldest groups that fit
into a batch (`oldest_that_fit`).

The rules work on sizes alone and return positions in the order given.

Invariants: a group is queued at most once; every counter equals the sum over the queued groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from atroposlib.api.schemas import MAX_BATCH_SIZE
from atroposlib.errors import GroupError, TrajectoryApiError

_Key = TypeVar("_Key")

UNKNOWN_VERSION = -1
"""The version of groups that came without one while no trainer was registered."""


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The attributes of a group that batching and inspection use, without its tokens.

    Contains no references that could form a cycle, so the garbage collector skips it: 100,000 of
    them would make every full collection tens of milliseconds longer.
    """

    group_id: int
    env_id: int | None
    """Registered sender; None if the id that was sent is not registered."""
    num_sequences: int
    num_tokens: int
    num_bytes: int = 0
    """Bytes of the stored payload."""
    wire_format: Literal["json", "msgpack"] = "json"
    """Encoding of the stored payload."""
    version: int = 0
    """Policy version set by the sender, else the trainer's at admission. `UNKNOWN_VERSION` if there
    was none, or if it came from a trainer that was replaced."""
    received_at: float = 0.0
    """Unix time of admission, in seconds."""
    min_score: float = 0.0
    max_score: float = 0.0
    checksum: int | None = None
    """Checksum of the stored payload (`checksum_of`); None for groups stored by older versions."""
    traceparent: str | None = None
    """W3C header of the span in which the group was made; None without tracing."""

    @property
    def known_version(self) -> int | None:
        return None if self.version == UNKNOWN_VERSION else self.version

    def is_payload(self, content: bytes) -> bool:
        """Whether `content` is the stored payload.

        Without a checksum, only a wrong length or invalid JSON is detected.
        """
        if self.checksum is not None:
            return checksum_of(content) == self.checksum
        if self.num_bytes and len(content) != self.num_bytes:
            return False
        if self.wire_format == "msgpack":
            return True
        try:
            msgspec.json.decode(content, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


def checksum_of(payload: bytes) -> int:
    """Return the 64-bit checksum of a payload."""
    return xxh3_64_intdigest(payload)


class GroupQueue:
    """First in, first out queue of groups with running counters.

    Adding and removing cost O(1) per group, counters O(1). Planning a batch reads the queue from
    its oldest group until the batch is full.
    """

    def __init__(self) -> None:
        self._groups: dict[int, QueuedGroup] = {}
        """By id, oldest first."""
        self._num_by_size: Counter[int] = Counter()
        self._num_by_row: Counter[tuple[int | None, int]] = Counter()
        """Groups of each sender and size."""
        self._refused: tuple[int, Mapping[int, float]] | None = None
        """The last plan with minimums that failed, until a change that could let it succeed."""
        self.largest_group = 0
        """Sequences in the largest queued group; 0 if the queue is empty."""
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_bytes = 0
        """Payload bytes of all queued groups."""
        self.sequences_by_env: Counter[int | None] = Counter()
        """Queued sequences of each sender that has some; None for unregistered senders."""
        self.groups_by_version: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups.values())

    def largest_group_of(self, env_id: int) -> int:
        """Return the sequences in the largest queued group of one environment, else 0."""
        return max((size for env, size in self._num_by_row if env == env_id), default=0)

    def groups_by_size(self) -> dict[int, int]:
        """Return the number of queued groups of each size."""
        return dict(self._num_by_size)

    def has_packable(self, env_id: int) -> bool:
        """Whether one environment has a whole pack queued, which a guaranteed share requires."""
        return any(
            self.largest_group % size == 0 and count * size >= self.largest_group
            for (env, size), count in self._num_by_row.items()
            if env == env_id
        )

    @property
    def unpackable_sequences(self) -> int:
        """Sequences in groups whose size does not divide the largest queued size."""
        return sum(
            size * count for size, count in self._num_by_size.items() if self.largest_group % size
        )

    def get(self, group_id: int) -> QueuedGroup | None:
        return self._groups.get(group_id)

    def window(self, offset: int, limit: int) -> list[QueuedGroup]:
        """Return up to `limit` groups from position `offset`, oldest first; O(offset)."""
        return list(islice(self._groups.values(), offset, offset + limit))

    def append(self, group: QueuedGroup) -> None:
        """Queue a group after all others.

        Raises:
            ValueError: the group is queued already.
        """
        self._require_new(group)
        self._groups[group.group_id] = group
        former_largest = self.largest_group
        self._count(group, 1)
        in_row = self._num_by_row[group.env_id, group.num_sequences]
        completes_pack = in_row * group.num_sequences % self.largest_group == 0
        if completes_pack or former_largest != self.largest_group:
            self._refused = None

    def restore_front(self, groups: Sequence[QueuedGroup]) -> None:
        """Insert groups before all others, in the order given; O(queue).

        Raises:
            ValueError: one of the groups is queued already; nothing has changed.
        """
        for group in groups:
            self._require_new(group)
        self._refused = None
        self._groups = {group.group_id: group for group in groups} | self._groups
        for group in groups:
            self._count(group, 1)

    def remove(self, group_ids: Iterable[int]) -> list[QueuedGroup]:
        """Remove groups and return them in the order of the ids; unknown ids are skipped."""
        removed = []
        for group_id in group_ids:
            group = self._groups.pop(group_id, None)
            if group is not None:
                self._refused = None
                self._count(group, -1)
                removed.append(group)
        return removed

    def plan_batch(
        self,
        batch_size: int,
        minimums: Mapping[int, float] | None = None,
        *,
        short_batches: bool = False,
    ) -> list[QueuedGroup] | None:
        """Choose the next batch without removing it.

        Args:
            batch_size: sequences of the batch, at least 1.
            minimums: environment → guaranteed share of the batch; a mapping that is passed again
                must be unchanged.
            short_batches: whether the oldest groups that fit are chosen if sizes do not add up.

        Returns:
            Groups with exactly `batch_size` sequences, or at most with `short_batches`, in order of
            delivery, or None.
        """
        if self.num_sequences < batch_size:
            return None
        if not minimums:
            positions = self._plan_packs(batch_size) or self._plan_combination(batch_size)
            if not positions and short_batches:
                positions = self._plan_short(batch_size, {})
            return self._at(positions) if positions else None
        planned = self._plan_shares(batch_size, minimums)
        if planned is None and short_batches and self._has_misfits(batch_size):
            positions = self._plan_short(batch_size, minimums)
            return self._at(positions) if positions else None
        return planned

    def _plan_shares(
        self, batch_size: int, minimums: Mapping[int, float]
    ) -> list[QueuedGroup] | None:
        if self._refused == (batch_size, minimums):
            return None
        positions = pack_with_minimums(
            _SizesAndOwners(self._groups.values()),
            largest=self.largest_group,
            batch_size=batch_size,
            minimums=minimums,
            num_by_row=self._num_by_row,
        )
        self._refused = None if positions else (batch_size, minimums)
        return self._at(positions) if positions else None

    def plan_in_order(
        self,
        batch_size: int,
        minimums: Mapping[int, float] | None = None,
        *,
        short_batches: bool = False,
    ) -> list[QueuedGroup] | None:
        """Choose the batch that the shortest part of the queue, from its oldest group, can form.

        The choice does not depend on how many groups had arrived when the batch was requested.
        """
        first = GroupQueue()
        for group in self if self.num_sequences >= batch_size else ():
            first.append(group)
            planned = first.plan_batch(batch_size, minimums, short_batches=short_batches)
            if planned is not None:
                return planned
        return None

    def plan_oldest(self, batch_size: int) -> list[QueuedGroup] | None:
        """Choose the oldest groups that together hold at most `batch_size` sequences.

        Returns:
            At least one group, in queue order; None while fewer than `batch_size` sequences wait.
        """
        if self.num_sequences < batch_size:
            return None
        planned: list[QueuedGroup] = []
        room = batch_size
        for group in self:
            room -= group.num_sequences
            if planned and room < 0:
                break
            planned.append(group)
        return planned or None

    def _plan_packs(self, batch_size: int) -> list[int] | None:
        largest = self.largest_group
        in_packs = sum(
            count * size // largest * largest
            for size, count in self._num_by_size.items()
            if largest % size == 0
        )
        if in_packs < batch_size:
            return None
        sizes = (group.num_sequences for group in self)
        return pack_exact(sizes, largest=largest, batch_size=batch_size)

    def _plan_combination(self, batch_size: int) -> list[int] | None:
        if not is_reachable(self._num_by_size, batch_size):
            return None
        return oldest_combination([group.num_sequences for group in self], batch_size)

    def _plan_short(self, batch_size: int, minimums: Mapping[int, float]) -> list[int] | None:
        return oldest_that_fit(
            [(group.num_sequences, group.env_id) for group in self],
            batch_size=batch_size,
            minimums=minimums,
        )

    def _has_misfits(self, batch_size: int) -> bool:
        """Whether there are sizes that form no packs, or that never add up to a batch."""
        return self.unpackable_sequences > 0 or not is_reachable(self._num_by_size, batch_size)

    def _at(self, positions: Sequence[int]) -> list[QueuedGroup]:
        groups = list(islice(self, max(positions) + 1))
        return [groups[position] for position in positions]

    def _require_new(self, group: QueuedGroup) -> None:
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is already queued")

    def _count(self, group: QueuedGroup, sign: int) -> None:
        size = group.num_sequences
        self.num_sequences += sign * size
        self.num_tokens += sign * group.num_tokens
        self.num_bytes += sign * group.num_bytes
        _add(self.sequences_by_env, group.env_id, sign * size)
        _add(self.groups_by_version, group.version, sign)
        _add(self._num_by_row, (group.env_id, size), sign)
        _add(self._num_by_size, size, sign)
        if sign > 0:
            self.largest_group = max(self.largest_group, size)
        elif size == self.largest_group and size not in self._num_by_size:
            self.largest_group = max(self._num_by_size, default=0)


class _SizesAndOwners:
    """(size, owner) of each group; may be iterated several times."""

    def __init__(self, groups: Collection[QueuedGroup]) -> None:
        self._groups = groups

    def __iter__(self) -> Iterator[tuple[int, int | None]]:
        return ((group.num_sequences, group.env_id) for group in self._groups)


def _add(counter: Counter[_Key], key: _Key, number: int) -> None:
    """Add to a counter; an entry that becomes zero is removed."""
    counter[key] += number
    if not counter[key]:
        del counter[key]


class QueueView(NamedTuple):
    """Size of the queue in units of one environment's own groups."""

    queue_groups: int
    own_groups: int


def queue_view(
    env_id: int,
    sequences_by_env: Mapping[int | None, int],
    *,
    group_size: int,
    pack_size: int,
    batch_size: int,
    minimums: Mapping[int, float],
) -> QueueView:
    """Return the size of the queue in groups of one environment, of `group_size` sequences.

    Sequences of each other sender count in whole packs of `pack_size`, the largest queued group.
    The part of a batch that is reserved for that sender by its share in `minimums` is subtracted.
    """
    available = 0
    for other, num_sequences in sequences_by_env.items():
        if other == env_id:
            continue
        packed = -(-num_sequences // pack_size) * pack_size
        reserved = int(batch_size * minimums.get(other, 0.0)) if other is not None else 0
        available += max(0, packed - reserved)
    own = sequences_by_env.get(env_id, 0)
    return QueueView(queue_groups=(own + available) // group_size, own_groups=own // group_size)


SEARCH_BITS = 1 << 28
"""Maximum number of bits of the exact search (32 MiB), which limits the groups it considers."""

_REACHABLE_BITS = 1 << 31
"""Maximum number of bits examined by `is_reachable`, a few tenths of a second."""


def pack_exact(sizes: Iterable[int], *, largest: int, batch_size: int) -> list[int] | None:
    """Choose whole packs until they hold exactly `batch_size` sequences.

    A pack is a series of equally sized groups that together hold `largest` sequences, the size of
    the largest group. Packs are taken in the order in which they complete; the last one may be
    taken in part. `sizes`, oldest first, are read only as far as needed.

    Returns:
        Positions in order of delivery; None if packs do not add up to `batch_size`.
    """
    open_packs: dict[int, list[int]] = defaultdict(list)
    taken: list[int] = []
    num_sequences = 0
    for position, size in enumerate(sizes):
        pack = open_packs[size]
        pack.append(position)
        if len(pack) * size != largest:
            continue
        del open_packs[size]
        for member in pack:
            taken.append(member)
            num_sequences += size
            if num_sequences >= batch_size:
                return taken if num_sequences == batch_size else None
    return None


def pack_with_minimums(
    groups: Iterable[tuple[int, int | None]],
    *,
    largest: int,
    batch_size: int,
    minimums: Mapping[int, float],
    num_by_row: Mapping[tuple[int | None, int], int] | None = None,
    ownerless_last: bool = False,
) -> list[int] | None:
    """Choose a batch in which some owners have a guaranteed share.

    First each owner with a minimum gets its share, in the order of `minimums`; then the rest is
    filled oldest first. If an owner cannot fill its share, there is no batch.

    Args:
        groups: (size, owner) oldest first, read twice and only as far as needed; groups without an
            owner have no guaranteed share.
        largest: the largest size among the groups.
        batch_size: sequences of the batch.
        minimums: owner → share of the batch; shares that exceed the batch are scaled down.
        num_by_row: (owner, size) → number of groups; None counts them.
        ownerless_last: Whether groups without an owner are taken only after all others.

    Returns:
        Positions in order of delivery, minimums first; None without a batch.
    """
    if num_by_row is None:
        num_by_row = Counter((owner, size) for size, owner in groups)
    packable = _num_packable(num_by_row, largest)
    smallest: dict[int | None, int] = {}
    for owner, size in packable:
        smallest[owner] = min(size, smallest.get(owner, size))
    owing = [owner for owner, share in minimums.items() if int(batch_size * share) > 0]
    if any(owner not in smallest for owner in owing):
        return None
    taken: dict[int, None] = {}  # an ordered set
    room = batch_size
    packs = _PackReader(groups, largest, packable)
    for owner, need in scaled_needs(minimums, smallest, batch_size).items():
        held = 0
        for position, size in packs.of(owner):
            if size <= room:
                taken[position] = None
                held += size
                room -= size
            if held >= need or not room:
                break
    passes = (False, True) if ownerless_last else (None,)
    for ownerless in passes:
        seen: Counter[tuple[int | None, int]] = Counter()
        for position, (size, sender) in enumerate(groups):
            if not room or room < min(smallest.values(), default=0):
                break
            row = sender, size
            if ownerless not in (None, sender is None) or seen[row] >= packable.get(row, 0):
                continue
            seen[row] += 1
            if position not in taken and size <= room:
                taken[position] = None
                room -= size
    return list(taken) if room == 0 else None


def oldest_that_fit(
    groups: Sequence[tuple[int, int | None]], *, batch_size: int, minimums: Mapping[int, float]
) -> list[int] | None:
    """Choose the oldest groups that together hold at most `batch_size` sequences.

    The oldest one that fits is always chosen, so that no group waits for ever. Then each owner with
    a guaranteed share gets it, and the rest is filled oldest first. Groups that exceed the room
    left are passed over.

    Args:
        groups: (size, owner), oldest first.
        batch_size: maximum number of sequences.
        minimums: owner → share of the batch; shares that exceed the batch are scaled down.

    Returns:
        Positions in order of delivery; None if an owner has too few sequences for its share, or
        no group fits.
    """
    fitting: dict[int | None, list[int]] = defaultdict(list)
    held: Counter[int | None] = Counter()
    for position, (size, owner) in enumerate(groups):
        if size <= batch_size:
            fitting[owner].append(position)
            held[owner] += size
    needs = {owner: int(batch_size * share) for owner, share in minimums.items()}
    if not fitting or any(held[owner] < need for owner, need in needs.items()):
        return None
    smallest = {owner: min(groups[p][0] for p in of_owner) for owner, of_owner in fitting.items()}
    shares: Counter[int | None] = Counter(scaled_needs(minimums, smallest, batch_size))
    taken: dict[int, None] = {}  # an ordered set
    room = batch_size

    def take(position: int) -> None:
        nonlocal room
        size, owner = groups[position]
        if position not in taken and size <= room:
            taken[position] = None
            shares[owner] -= size
            room -= size

    take(min(of_owner[0] for of_owner in fitting.values()))
    for owner in list(shares):
        for position in fitting[owner]:
            if shares[owner] <= 0:
                break
            take(position)
    for position in range(len(groups)):
        if not room:
            break
        take(position)
    return list(taken)


def _num_packable(
    num_by_row: Mapping[tuple[int | None, int], int], largest: int
) -> dict[tuple[int | None, int], int]:
    """Return the number of groups of each owner and size that are part of a whole pack."""
    packable = {
        (owner, size): count - count % (largest // size)
        for (owner, size), count in num_by_row.items()
        if largest % size == 0
    }
    return {row: count for row, count in packable.items() if count}


class _PackReader:
    """Yields the groups of an owner in the order in which their packs complete.

    Reads the queue once for all owners, and only as far as needed.
    """

    def __init__(
        self,
        groups: Iterable[tuple[int, int | None]],
        largest: int,
        packable: Mapping[tuple[int | None, int], int],
    ) -> None:
        self._groups = enumerate(groups)
        self._largest = largest
        self._num_left: Counter[int | None] = Counter()
        for (owner, _), count in packable.items():
            self._num_left[owner] += count
        self._open: dict[tuple[int | None, int], list[int]] = defaultdict(list)
        self._complete: dict[int | None, list[tuple[int, int]]] = defaultdict(list)

    def of(self, owner: int | None) -> Iterator[tuple[int, int]]:
        """Yield (position, size) of every packable group of an owner; once per owner."""
        complete = self._complete[owner]
        for index in range(self._num_left[owner]):
            while index >= len(complete):
                self._read_one()
            yield complete[index]

    def _read_one(self) -> None:
        position, (size, owner) = next(self._groups)
        pack = self._open[owner, size]
        pack.append(position)
        if len(pack) * size == self._largest:
            self._complete[owner].extend((member, size) for member in pack)
            pack.clear()


def scaled_needs(
    minimums: Mapping[int, float], smallest: Mapping[int | None, int], batch_size: int
) -> dict[int, int]:
    """Return the sequences guaranteed to each owner, scaled down so that they fit into a batch.

    Shares below one sequence are left out. A scaled share is at least the owner's smallest group.
    """
    needs = {owner: int(batch_size * share) for owner, share in minimums.items()}
    needs = {owner: need for owner, need in needs.items() if need > 0}
    total = sum(needs.values())
    if total <= batch_size:
        return needs
    scale = batch_size / total
    return {owner: max(smallest[owner], int(need * scale)) for owner, need in needs.items()}


def oldest_combination(sizes: Sequence[int], target: int) -> list[int]:
    """Find groups that hold exactly `target` sequences, preferring older ones.

    Subset sum over bit sets: bit `n` is set if a sum of `n` sequences can be reached. The search is
    exact for targets up to 4,096 sequences. For larger ones only the oldest candidates are
    searched, which limits time and memory. `sizes` are at least 1 each, oldest first.

    Returns:
        Ascending positions; empty if no combination exists.
    """
    if not 0 < target <= sum(sizes):
        return []
    candidates = _oldest_of_each_size(sizes, target)[: SEARCH_BITS // target]
    within_target = (1 << (target + 1)) - 1
    reachable_from = [1]  # by the candidates after each one, built from the end
    for position in reversed(candidates):
        later = reachable_from[-1]
        reachable_from.append((later | later << sizes[position]) & within_target)
    reachable_from.reverse()
    if not reachable_from[0] >> target & 1:
        return []
    taken: list[int] = []
    remainder = target
    for index, position in enumerate(candidates):
        size = sizes[position]
        if size <= remainder and reachable_from[index + 1] >> (remainder - size) & 1:
            taken.append(position)
            remainder -= size
            if remainder == 0:
                break
    return taken


def _oldest_of_each_size(sizes: Sequence[int], target: int) -> list[int]:
    """Return the positions of candidates: of groups of size `s`, the first `target // s`."""
    counts: dict[int, int] = {}
    positions = []
    for position, size in enumerate(sizes):
        count = counts.get(size, 0)
        if (count + 1) * size <= target:
            counts[size] = count + 1
            positions.append(position)
    return positions


def is_reachable(num_by_size: Mapping[int, int], target: int) -> bool:
    """Whether some combination of groups holds exactly `target` sequences.

    Also False if finding out would take more than `_REACHABLE_BITS`.
    """
    if not 0 < target <= SEARCH_BITS:
        return False
    steps_left = _REACHABLE_BITS // target
    within_target = (1 << (target + 1)) - 1
    reachable = 1
    for size, count in num_by_size.items():
        left = min(count, target // size)
        step = 1
        while left > 0:  # powers of two make every count up to `left`
            if not steps_left:
                return False
            steps_left -= 1
            step = min(step, left)
            reachable |= reachable << step * size & within_target
            left -= step
            step *= 2
    return bool(reachable >> target & 1)


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run; 0 means no limit unless the field says otherwise."""

    max_queue_sequences: int = 0
    """Maximum number of sequences in the queue and in buffers."""
    max_queue_bytes: int = 0
    """Maximum number of payload bytes in the queue and in buffers."""
    max_staleness_steps: int = 0
    """Maximum number of trainer steps while a group waits."""
    env_expiry_s: float = 600.0
    """Seconds without a heartbeat after which an environment counts as disconnected."""
    max_waiting_requests: int = 4096
    """Maximum number of requests that wait for a batch."""
    max_batches_in_flight: int = 1024
    """Maximum number of delivered, unacknowledged batches."""
    keep_past_groups: int = 256
    """Maximum number of delivered groups kept for inspection; 0 keeps none."""
    keep_past_bytes: int = 256 * 1024 * 1024
    """Maximum number of payload bytes of delivered groups kept; 0 keeps none."""
    ordered_envs: int = 0
    """Number of environments whose groups are admitted in the order of their tickets; 0: all groups
    are admitted in the order of arrival."""
    ordered_wait_s: float = 0.0
    """Maximum number of seconds that groups are held for a ticket; 0 means no limit."""


class QueueFullError(TrajectoryApiError):
    """The queue is full; retry after `retry_after_s`."""


class BusyError(TrajectoryApiError):
    """Too many requests wait, or batches are unacknowledged; retry after `retry_after_s`."""


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
    """Whether a posted group was queued or buffered."""

    buffered_sequences: int | None
    """Sequences left in the sender's buffer; None if the group was queued directly."""


class AdmittedGroups(NamedTuple):
    """Result of one request that posts groups."""

    placements: list[Placement]
    """[groups] placements, in the order of the request."""
    is_repeat: bool = False
    """Whether the request was stored before; the placements are then the earlier ones."""
    is_key_reused: bool = False
    """Whether its key was used for another body; nothing was stored."""


class Waiting(NamedTuple):
    """Sequences and bytes that wait for a trainer."""

    num_sequences: int
    num_bytes: int

    @classmethod
    def of(cls, groups: Iterable[QueuedGroup]) -> Waiting:
        """Return the sequences and bytes of groups."""
        total = cls(0, 0)
        for group in groups:
            total = total.plus(cls(group.num_sequences, group.num_bytes))
        return total

    def plus(self, other: Waiting, sign: int = 1) -> Waiting:
        """Return the sum, or with sign -1 the difference."""
        return Waiting(
            self.num_sequences + sign * other.num_sequences,
            self.num_bytes + sign * other.num_bytes,
        )


_MAX_GROUP_ID = 2**63 - 1
_MAX_GROUP_FIGURE = 2**48  # sequences, tokens and bytes of one group: sums stay far from overflow


def check_figures(groups: Sequence[QueuedGroup], *, counts: Iterable[int]) -> None:
    """Raise `GroupError` for impossible sizes, whose sums would be meaningless or overflow.

    `counts` are numbers of these groups.
    """
    for group in groups:
        if not (
            0 < group.num_sequences <= _MAX_GROUP_FIGURE
            and 0 <= group.num_tokens <= _MAX_GROUP_FIGURE
            and 0 <= group.num_bytes <= _MAX_GROUP_FIGURE
            and 0 <= group.group_id <= _MAX_GROUP_ID
        ):
            raise GroupError(
                f"group {group.group_id}: {group.num_sequences} sequences, {group.num_tokens} "
                f"tokens and {group.num_bytes} bytes"
            )
    for count in counts:
        if not 0 <= count <= len(groups):
            raise GroupError(f"{count} of {len(groups)} groups")


def check_sizes(sizes: Iterable[int], *, batch_size: int) -> None:
    """Raise `OversizedGroupError` for the first group that is larger than a batch.

    `batch_size` is 0 before a trainer registered.
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
    """Raise `QueueFullError` if the arriving groups and those that wait exceed a limit.

    A request larger than a limit is admitted if nothing waits; otherwise it could never be.
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

    Staleness is limited by the number of batches before a new group: after `max_staleness_steps`
    batches, a group is that many steps old when it is delivered.

    Args:
        limits: limits of the run.
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

"""The environments of one run: registration ids, names, and buffers of small groups.

Invariants: ids count up from 0 and are never reused, nor are names. A group smaller than its
environment's group size stays in the buffer until buffered groups add up to that size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from atroposlib.api.queue import QueuedGroup, oldest_combination
from atroposlib.api.schemas import MAX_GROUP_SIZE, RegisterEnv

MIN_ENV_WEIGHT = 0.01
"""Smallest weight of an environment, so that each gets some capacity."""

_UNREADABLE_NAME = "unreadable"


@dataclass
class EnvRecord:
    """One registration; kept after a disconnect, so that ids and names are never reused."""

    env_id: int
    real_name: str
    desired_name: str
    max_token_length: int
    weight: float
    min_batch_allocation: float | None
    group_size: int | None
    """Registered sequences per group; None if groups of any size are queued without buffering."""
    last_update: float
    """Unix time of the registration, in seconds."""
    last_seen: float = 0.0
    """Unix time of the last heartbeat recorded in the run, in seconds."""
    is_connected: bool = True
    is_expired: bool = False
    """Whether it was disconnected by a timeout; its next request reconnects it."""
    largest_group: int = 1
    """Unit of the queue sizes reported to this environment, in sequences; kept per replica."""
    buffer: list[QueuedGroup] = field(default_factory=list)
    """Groups smaller than `group_size` that do not yet add up to it, oldest first."""
    _reachable: int = field(default=0, init=False, repr=False, compare=False)
    """Bit set of the sums of buffered groups; 0 if it must be recomputed."""

    @property
    def buffered_sequences(self) -> int:
        return sum(group.num_sequences for group in self.buffer)

    def must_buffer(self, num_sequences: int) -> bool:
        """Whether a group of this size must be buffered; larger groups are queued at once."""
        return self.group_size is not None and num_sequences < self.group_size

    def stop_buffering(self) -> list[QueuedGroup]:
        """Queue groups of any size from now on; return those in the buffer."""
        released, self.buffer = self.buffer, []
        self.group_size, self.largest_group, self._reachable = None, 1, 0
        return released

    def remove_buffered(self, group_ids: Container[int]) -> list[QueuedGroup]:
        removed = [group for group in self.buffer if group.group_id in group_ids]
        if removed:
            self.buffer = [group for group in self.buffer if group.group_id not in group_ids]
            self._reachable = 0
        return removed

    @property
    def has_searchable_size(self) -> bool:
        """Whether the group size is within the bounds of the search; older versions allowed any."""
        return self.group_size is None or 0 < self.group_size <= MAX_GROUP_SIZE

    def buffer_group(self, group: QueuedGroup) -> list[QueuedGroup]:
        """Add a group to the buffer; return the groups that now add up, oldest first.

        The buffer is searched only when the new group completes a sum.
        """
        target = self.group_size or 0
        within_target = (1 << (target + 1)) - 1
        self.buffer.append(group)
        reachable = self._reachable or 1
        for added in [group] if self._reachable else self.buffer:
            reachable |= reachable << added.num_sequences & within_target
        self._reachable = reachable
        if not reachable >> target & 1:
            return []
        sizes = [waiting.num_sequences for waiting in self.buffer]
        positions = set(oldest_combination(sizes, target))
        released = [g for i, g in enumerate(self.buffer) if i in positions]
        self.buffer = [g for i, g in enumerate(self.buffer) if i not in positions]
        self._reachable = 0
        return released


class EnvRegistry:
    """Every registered environment, by id."""

    def __init__(self) -> None:
        self._envs: list[EnvRecord] = []
        self._namesakes: Counter[str] = Counter()
        self._buffered_by_env: dict[int, int] = {}
        self.buffered_sequences = 0
        self.buffered_bytes = 0

    def __len__(self) -> int:
        return len(self._envs)

    def __iter__(self) -> Iterator[EnvRecord]:
        return iter(self._envs)

    def add(self, request: RegisterEnv, *, now: float) -> EnvRecord:
        """Register an environment under the next free id and a unique name."""
        env = EnvRecord(
            env_id=len(self._envs),
            real_name=f"{request.desired_name}_{self._namesakes[request.desired_name]}",
            desired_name=request.desired_name,
            max_token_length=request.max_token_length,
            weight=request.weight,
            min_batch_allocation=request.min_batch_allocation,
            group_size=request.group_size,
            last_update=now,
            last_seen=now,
            largest_group=request.group_size or 1,
        )
        self._append(env)
        return env

    def add_unreadable(self, *, now: float) -> None:
        """Use up an id for a registration that cannot be read, so that later ids stay valid."""
        env = EnvRecord(
            env_id=len(self._envs),
            real_name=f"{_UNREADABLE_NAME}_{self._namesakes[_UNREADABLE_NAME]}",
            desired_name=_UNREADABLE_NAME,
            max_token_length=0,
            weight=0.0,
            min_batch_allocation=None,
            group_size=None,
            last_update=now,
            last_seen=now,
            is_connected=False,
        )
        self._append(env)

    def _append(self, env: EnvRecord) -> None:
        self._envs.append(env)
        self._namesakes[env.desired_name] += 1
        self._forget_sums()

    def find(self, env_id: int | None) -> EnvRecord | None:
        if env_id is None or not 0 <= env_id < len(self._envs):
            return None
        return self._envs[env_id]

    def connect(self, env: EnvRecord, is_connected: bool, *, is_expired: bool = False) -> None:
        env.is_connected = is_connected
        env.is_expired = is_expired
        self._forget_sums()

    def buffer(self, env: EnvRecord, group: QueuedGroup) -> list[QueuedGroup]:
        released = env.buffer_group(group)
        change = group.num_sequences - sum(moved.num_sequences for moved in released)
        self.buffered_sequences += change
        self.buffered_bytes += group.num_bytes - sum(moved.num_bytes for moved in released)
        left = self._buffered_by_env.get(env.env_id, 0) + change
        self._buffered_by_env[env.env_id] = left
        return released

    def remove_buffered(self, group_ids: Container[int]) -> list[QueuedGroup]:
        """Remove groups from all buffers; O(buffered groups)."""
        removed = []
        for env in self._envs:
            taken = env.remove_buffered(group_ids)
            removed += taken
            if taken:
                self._buffered_by_env[env.env_id] = env.buffered_sequences
        self.buffered_sequences -= sum(group.num_sequences for group in removed)
        self.buffered_bytes -= sum(group.num_bytes for group in removed)
        return removed

    def stop_buffering(self, env: EnvRecord) -> list[QueuedGroup]:
        released = env.stop_buffering()
        self.buffered_sequences -= self._buffered_by_env.pop(env.env_id, 0)
        self.buffered_bytes -= sum(group.num_bytes for group in released)
        return released

    def buffered_sequences_of(self, env_id: int) -> int:
        return self._buffered_by_env.get(env_id, 0)

    def restore(self, envs: Iterable[EnvRecord]) -> None:
        self._envs = list(envs)
        self._namesakes = Counter(env.desired_name for env in self._envs)
        self._forget_sums()
        self._buffered_by_env = {e.env_id: e.buffered_sequences for e in self._envs if e.buffer}
        self.buffered_sequences = sum(self._buffered_by_env.values())
        self.buffered_bytes = sum(group.num_bytes for env in self._envs for group in env.buffer)

    @cached_property
    def minimums(self) -> Mapping[int, float]:
        """Guaranteed shares of connected environments by id, in order of registration."""
        return {
            env.env_id: env.min_batch_allocation
            for env in self._envs
            if env.is_connected and env.min_batch_allocation is not None
        }

    @cached_property
    def total_weight(self) -> float:
        """Context length times weight, summed over connected environments."""
        return sum(e.max_token_length * max(0.0, e.weight) for e in self._envs if e.is_connected)

    @cached_property
    def unallocated_fraction(self) -> float:
        """Part of a batch that is not guaranteed to an environment, 0 to 1."""
        return 1.0 - min(1.0, sum(self.minimums.values()))

    def _forget_sums(self) -> None:
        for name in ("minimums", "total_weight", "unallocated_fraction"):
            self.__dict__.pop(name, None)


def weight_share(env: EnvRecord, total_weight: float) -> float:
    """Return the share of inference capacity of one environment, at least `MIN_ENV_WEIGHT`."""
    if total_weight <= 0:
        return MIN_ENV_WEIGHT
    share = env.max_token_length * env.weight / total_weight
    return max(MIN_ENV_WEIGHT, share) if math.isfinite(share) else MIN_ENV_WEIGHT

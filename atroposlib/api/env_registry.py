"""The environments of one run: registration ids, names, and groups that wait to fill up a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from atroposlib.api.allocation import minimum_shares
from atroposlib.api.packing import oldest_combination
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.schemas import RegisterEnv

__all__ = ["EnvRecord", "EnvRegistry"]


@dataclass
class EnvRecord:
    """One registration; it outlives the connection, so that ids and names are never reused."""

    env_id: int
    real_name: str
    desired_name: str
    max_token_length: int
    weight: float
    min_batch_allocation: float | None
    group_size: int | None
    """Registered sequences per group; None when groups of every size are queued as they come."""
    last_update: float
    """Unix time of the registration, in seconds."""
    is_connected: bool = True
    largest_group: int = 1
    """The unit in which this environment is told queue sizes, in sequences."""
    buffer: list[QueuedGroup] = field(default_factory=list)
    """Groups smaller than `group_size`, oldest first, that do not add up to it yet."""

    @property
    def buffered_sequences(self) -> int:
        """Sequences in groups that wait for others to add up to `group_size`."""
        return sum(group.num_sequences for group in self.buffer)

    def wants_to_buffer(self, num_sequences: int) -> bool:
        """Whether a group of this size must wait: larger groups never could, so they need not."""
        return self.group_size is not None and num_sequences < self.group_size

    def buffer_group(self, group: QueuedGroup) -> list[QueuedGroup]:
        """Add a group to the buffer; return the groups that now add up, oldest first."""
        self.buffer.append(group)
        sizes = [waiting.num_sequences for waiting in self.buffer]
        positions = set(oldest_combination(sizes, self.group_size or 0))
        released = [g for i, g in enumerate(self.buffer) if i in positions]
        self.buffer = [g for i, g in enumerate(self.buffer) if i not in positions]
        return released


class EnvRegistry:
    """Every environment that registered, by id; ids count up from 0."""

    def __init__(self) -> None:
        self._envs: list[EnvRecord] = []

    def __len__(self) -> int:
        return len(self._envs)

    def __iter__(self) -> Iterator[EnvRecord]:
        return iter(self._envs)

    def add(self, request: RegisterEnv, *, now: float) -> EnvRecord:
        """Register an environment under the next free id and a name nobody else has."""
        namesakes = sum(env.desired_name == request.desired_name for env in self._envs)
        env = EnvRecord(
            env_id=len(self._envs),
            real_name=f"{request.desired_name}_{namesakes}",
            desired_name=request.desired_name,
            max_token_length=request.max_token_length,
            weight=request.weight,
            min_batch_allocation=request.min_batch_allocation,
            group_size=request.group_size,
            last_update=now,
            largest_group=request.group_size or 1,
        )
        self._envs.append(env)
        return env

    def find(self, env_id: int | None) -> EnvRecord | None:
        """Return the environment registered under this id, None when there is none."""
        if env_id is None or not 0 <= env_id < len(self._envs):
            return None
        return self._envs[env_id]

    @property
    def minimums(self) -> Mapping[int, float]:
        """Guaranteed batch shares of connected environments."""
        return minimum_shares(self._envs)

    @property
    def buffered_sequences(self) -> int:
        """Sequences in all buffers."""
        return sum(env.buffered_sequences for env in self._envs)

    def clear(self) -> None:
        """Forget every environment and its buffer."""
        self._envs.clear()

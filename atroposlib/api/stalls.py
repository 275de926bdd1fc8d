"""Stalls: reasons for which queued groups do not form a batch.

`find_stalls` does not scan the queue: it reads counters, and plans one batch. Its cost is that plan
and O(environments), so it is called for `/status` and metrics, not for every request. `StallWatch`
logs each reason once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from atroposlib.api.environments import EnvRecord, EnvRegistry
from atroposlib.api.queue import GroupQueue
from atroposlib.api.state import RunState

logger = logging.getLogger(__name__)

_MAX_NAMED = 5


class Stall(NamedTuple):
    """A reason why queued groups do not, or may not, form a batch."""

    reason: str
    """`queue/oversized`, `queue/unpackable`, `allocation/unfilled`, `batch/unreachable`,
    `environment/silent` or `buffer/waiting`."""
    num_sequences: int
    """Number of sequences that are stuck, or missing."""
    message: str


class Patience(NamedTuple):
    """Timeouts after which silent environments and waiting groups are reported."""

    now: float
    """Unix time, in seconds."""
    last_heartbeat: Callable[[int], float]
    """Environment id → Unix time of its last heartbeat."""
    silence_s: float = 60.0
    """Seconds without a heartbeat; 0: no timeout."""
    buffer_s: float = 300.0
    """Seconds that a group may wait in a buffer; 0: no timeout."""


def find_stalls(
    queue: GroupQueue,
    envs: EnvRegistry,
    *,
    batch_size: int,
    patience: Patience | None = None,
    short_batches: bool = False,
) -> list[Stall]:
    """Find every reason for which groups are not delivered.

    Shares and sizes are checked only once the queue holds enough sequences for a batch. Without
    `patience`, reasons that depend on time are skipped. With `short_batches`, any sizes are
    delivered.
    """
    found = list(_oversized(queue, batch_size))
    if not short_batches:
        found += _unpackable(queue)
    if 0 < batch_size <= queue.num_sequences and not (
        short_batches and queue.plan_batch(batch_size, envs.minimums, short_batches=True)
    ):
        needs_packs = not (short_batches and queue.unpackable_sequences)
        unfilled = list(_unfilled_shares(queue, envs, batch_size, needs_packs=needs_packs))
        found += unfilled or _unreachable(queue, envs, batch_size)
    if patience is not None:
        found += _silent(envs, batch_size, patience)
        found += _waiting_in_buffers(envs, patience)
    return found


def _oversized(queue: GroupQueue, batch_size: int) -> Iterator[Stall]:
    if not 0 < batch_size < queue.largest_group:
        return
    stuck = sum(size * count for size, count in queue.groups_by_size().items() if size > batch_size)
    message = (
        f"{stuck} sequences are in groups of more than {batch_size}, the size of a batch; they "
        "are never delivered, and others must pack to their size"
    )
    yield Stall("queue/oversized", stuck, message)


def _unpackable(queue: GroupQueue) -> Iterator[Stall]:
    stuck = queue.unpackable_sequences
    if stuck:
        message = (
            f"{stuck} sequences are in groups whose size does not divide the largest queued "
            f"group ({queue.largest_group}); they are delivered only if sizes happen to add up"
        )
        yield Stall("queue/unpackable", stuck, message)


def _unfilled_shares(
    queue: GroupQueue, envs: EnvRegistry, batch_size: int, *, needs_packs: bool
) -> Iterator[Stall]:
    """Find guaranteed shares that prevent a batch: environments without a single pack.

    Without `needs_packs`, those with too few sequences.
    """
    for env_id, share in envs.minimums.items():
        env = envs.find(env_id)
        need = min(batch_size, int(batch_size * share))
        held = queue.sequences_by_env.get(env_id, 0)
        is_filled = queue.has_packable(env_id) if needs_packs else held >= need
        if env is None or need <= 0 or is_filled:
            continue
        packs = f", none in a pack of {queue.largest_group}" if needs_packs else ""
        message = (
            f"environment {env_id} ({env.real_name}) reserves {need} sequences of each batch and "
            f"has {held} queued{packs}; no batch forms until it catches up or disconnects"
        )
        yield Stall("allocation/unfilled", max(need - held, 0) or held, message)


def _unreachable(queue: GroupQueue, envs: EnvRegistry, batch_size: int) -> Iterator[Stall]:
    if queue.plan_batch(batch_size, envs.minimums) is not None:
        return
    sizes = sorted(queue.groups_by_size())
    listed = ", ".join(map(str, sizes[:_MAX_NAMED])) + (", …" if len(sizes) > _MAX_NAMED else "")
    message = (
        f"{queue.num_sequences} sequences are queued, but groups of {listed} do not add up to a "
        f"batch of {batch_size}; post other sizes, or register a batch size they divide"
    )
    yield Stall("batch/unreachable", queue.num_sequences, message)


def _silent(envs: EnvRegistry, batch_size: int, patience: Patience) -> Iterator[Stall]:
    if not patience.silence_s:
        return
    silences = {
        env.env_id: patience.now - patience.last_heartbeat(env.env_id)
        for env in envs
        if env.is_connected
    }
    silent = [env for env in envs if silences.get(env.env_id, 0.0) > patience.silence_s]
    if not silent:
        return
    reserved = sum(int(batch_size * envs.minimums.get(env.env_id, 0.0)) for env in silent)
    named = _named(silent, lambda env: f"{silences[env.env_id]:.0f} s")
    message = (
        f"no request for more than {patience.silence_s:g} s from {named}; "
        f"{reserved} sequences of each batch are reserved for them"
    )
    yield Stall("environment/silent", reserved, message)


def _waiting_in_buffers(envs: EnvRegistry, patience: Patience) -> Iterator[Stall]:
    if not patience.buffer_s:
        return
    waits = {env.env_id: patience.now - env.buffer[0].received_at for env in envs if env.buffer}
    late = [env for env in envs if waits.get(env.env_id, 0.0) > patience.buffer_s]
    if not late:
        return
    stuck = sum(envs.buffered_sequences_of(env.env_id) for env in late)
    named = _named(late, lambda env: f"{waits[env.env_id]:.0f} s")
    message = (
        f"{stuck} sequences wait for more than {patience.buffer_s:g} s for others that add up to "
        f"the group size of {named}"
    )
    yield Stall("buffer/waiting", stuck, message)


def _named(envs: list[EnvRecord], detail: Callable[[EnvRecord], str]) -> str:
    """List environments, the first few by name."""
    names = [f"{env.env_id} ({env.real_name}, {detail(env)})" for env in envs[:_MAX_NAMED]]
    more = f" and {len(envs) - _MAX_NAMED} more" if len(envs) > _MAX_NAMED else ""
    return f"environment{'s' if len(envs) > 1 else ''} {', '.join(names)}{more}"


_REPORT_INTERVAL_S = 1.0


class StallWatch:
    """Finds and logs the stalls of a run."""

    def __init__(
        self, state: RunState, last_heartbeat: Callable[[int], float], *, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._last_heartbeat = last_heartbeat
        self._clock = clock
        self._last_text = ""
        self._reported_at = 0.0

    def find_all(self) -> list[Stall]:
        """Find all reasons, including those that depend on time."""
        return self._find(Patience(self._clock(), self._last_heartbeat))

    def _find(self, patience: Patience | None = None) -> list[Stall]:
        state = self._state
        return find_stalls(
            state.queue,
            state.envs,
            batch_size=state.batch_size,
            patience=patience,
            short_batches=state.short_batches,
        )

    def report(self) -> None:
        """Log each reason for which enough sequences form no batch, once; checks at intervals."""
        state, now = self._state, self._clock()
        if abs(now - self._reported_at) < _REPORT_INTERVAL_S:
            return
        self._reported_at = now
        text = ""
        if state.queue.num_sequences >= state.batch_size:
            text = "; ".join(stall.message for stall in self._find())
            text = text or "the sizes of the queued groups do not add up"
        if text and text != self._last_text:
            logger.warning("no batch of %d sequences: %s", state.batch_size, text)
        self._last_text = text

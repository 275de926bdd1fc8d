"""A run without HTTP: on a store in memory, with a clock the test moves."""

from __future__ import annotations

from typing import Any

from atroposlib.api.queue import RunLimits
from atroposlib.api.run import Run
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.store.base import MemoryRunStore, RunStore
from atroposlib.wire import DecodedGroup
from tests.api.helpers import REGISTRATION

__all__ = [
    "Clock",
    "UnwritableStore",
    "decoded",
    "env_request",
    "open_run",
    "registration",
    "started_run",
    "take",
]


class Clock:
    """Unix time, as far as a test lets it pass."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def decoded(
    size: int = 1,
    *,
    env_id: int | None = None,
    content: bytes = b"{}",
    version: int | None = None,
    is_loose: bool = False,
) -> DecodedGroup:
    """Return a group as the wire hands it over."""
    return DecodedGroup(
        payload=content,
        wire_format="json",
        num_sequences=size,
        num_tokens=size,
        env_id=env_id,
        min_score=0.0,
        max_score=1.0,
        policy_version=version,
        is_loose=is_loose,
    )


def registration(**changes: Any) -> Registration:
    return Registration(**{**REGISTRATION, "batch_size": 4, **changes})


def env_request(**changes: Any) -> RegisterEnv:
    return RegisterEnv(
        **{"max_token_length": 1000, "desired_name": "env", "weight": 1.0, **changes}
    )


class UnwritableStore(MemoryRunStore):
    """A store that cannot be written for a while."""

    is_failing = False

    async def append(self, record, payloads=(), *, fence=None):
        if self.is_failing:
            raise OSError("disk full")
        return await super().append(record, payloads, fence=fence)


async def open_run(store: RunStore | None = None, **changes: Any) -> Run:
    """Return an open run; keyword arguments are those of `Run`, and limits by their names."""
    options = {name: changes.pop(name) for name in ("clock", "replica") if name in changes}
    run = Run(store or MemoryRunStore(), limits=RunLimits(**changes), **options)
    await run.open()
    return run


async def started_run(store: RunStore | None = None, *, batch_size: int = 4, **changes: Any) -> Run:
    """Return a run whose trainer has registered and asked for its first batch."""
    run = await open_run(store, **changes)
    await run.register_trainer(registration(batch_size=batch_size))
    assert await run.next_batch() is None
    return run


async def take(run: Run, **options: Any) -> list[int] | None:
    """Fetch and acknowledge a batch; return the ids of its groups."""
    found = await run.next_batch(**options)
    if found is None:
        return None
    assert await run.acknowledge(found[0].token) == "acked"
    return found[0].group_ids

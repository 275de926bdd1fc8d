"""A run without a store or a server: records are applied as they are made."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count

from atroposlib.api import records
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.stalls import Stall, find_stalls
from atroposlib.api.state import DeliveredBatch, RunState
from tests.api.helpers import REGISTRATION


class FakeRun:
    """The state of a run, and short ways to make things happen to it."""

    def __init__(self) -> None:
        self.state = RunState()
        self.counters: Counter[str] = Counter()
        self.now = time.time()
        self._ids = count()
        self.full_reason: str | None = None

    def stalls(self) -> list[Stall]:
        return find_stalls(self.state.queue, self.state.envs, batch_size=self.state.batch_size)

    def start(self, batch_size: int = 4) -> None:
        settings = Registration(**{**REGISTRATION, "batch_size": batch_size}).model_dump()
        self.state.apply(records.TrainerRegistered(settings, "1f", self.now))
        self.state.apply(records.TrainerStarted(0))

    def add_env(self, name: str = "env", group_size: int | None = None) -> None:
        request = RegisterEnv(
            max_token_length=8, desired_name=name, weight=1.0, group_size=group_size
        )
        self.state.apply(
            records.EnvRegistered(len(self.state.envs), request.model_dump(), self.now)
        )

    def admit(
        self,
        *sizes: int,
        env_id: int | None = None,
        age_s: float = 0.0,
        version: int = 0,
        scores: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Store groups of these sizes; each sequence has ten tokens and a hundred bytes."""
        at = self.now - age_s
        groups = [
            QueuedGroup(next(self._ids), env_id, n, 10 * n, 100 * n, "json", version, at, *scores)
            for n in sizes
        ]
        self.state.apply(records.GroupsAdmitted(0, groups, at))

    def acknowledge(self, batch: DeliveredBatch) -> None:
        self.state.apply(records.BatchAcknowledged(batch.batch_id, batch.attempt, self.now))

    def form(self, lease_until: float | None = None) -> DeliveredBatch:
        groups = self.state.queue.plan_batch(self.state.batch_size, self.state.envs.minimums)
        assert groups is not None
        batch_id = self.state.delivery.next_id
        ids = [group.group_id for group in groups]
        self.state.apply(records.BatchFormed(batch_id, ids, "", self.now, lease_until))
        return self.state.delivery.in_flight[batch_id]

"""A simulation of an inference engine whose cache overflows, and of clients that keep it busy.

Beyond the sequences that fit into the cache, the newest are preempted and their tokens computed
again, as in vLLM: the throughput falls with each further request.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atroposlib.api.concurrency import (
    ConcurrencyRule,
    EngineReading,
    divide_sequences,
    first_limit,
    next_limit,
)

TOKENS_PER_STEP = 16
STEP_S = 0.15
STEP_S_PER_SEQUENCE = 0.001
COMPUTED_PER_S = 4_000.0
"""Tokens per second that are computed again."""
MEAN_TOKENS = 600


@dataclass
class Sequence:
    """One request."""

    owner: int
    length: int
    num_tokens: int = 0
    num_lost: int = 0
    """Tokens to compute again."""


@dataclass
class SimulatedEngine:
    """An engine with a cache of `cache_tokens`; each step generates tokens for all that run."""

    cache_tokens: int
    now: float = 0.0
    num_preempted: int = 0
    num_generated: int = 0
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    _used: int = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def step(self) -> None:
        num_computed = self._admit()
        for sequence in self.running:
            sequence.num_tokens += TOKENS_PER_STEP
        self._used += TOKENS_PER_STEP * len(self.running)
        self._preempt()
        self.now += STEP_S + STEP_S_PER_SEQUENCE * len(self.running) + num_computed / COMPUTED_PER_S
        for sequence in [s for s in self.running if s.num_tokens >= s.length]:
            self.running.remove(sequence)
            self._used -= sequence.num_tokens
            self.num_generated += sequence.length

    def _admit(self) -> int:
        num_computed = 0
        while self.waiting:
            sequence = self.waiting[0]
            if self.running and self._used + sequence.num_lost > self.cache_tokens:
                break
            self.running.append(self.waiting.popleft())
            sequence.num_tokens, sequence.num_lost = sequence.num_lost, 0
            self._used += sequence.num_tokens
            num_computed += sequence.num_tokens
        return num_computed

    def _preempt(self) -> None:
        while self._used > self.cache_tokens and len(self.running) > 1:
            newest = self.running.pop()
            self._used -= newest.num_tokens
            newest.num_tokens, newest.num_lost = 0, newest.num_tokens
            self.waiting.appendleft(newest)
            self.num_preempted += 1

    def reading(self) -> EngineReading:
        return EngineReading(
            running=len(self.running),
            waiting=len(self.waiting),
            cache_use=self._used / self.cache_tokens,
            preemptions=self.num_preempted,
        )

    def load_of(self, owner: int) -> int:
        return sum(s.owner == owner for s in (*self.running, *self.waiting))


@dataclass
class Served:
    """Results of a simulation after its warm-up."""

    tokens_per_s: float
    mean_limit: float
    mean_loads: tuple[float, ...]
    """Requests of each client, mean over the steps."""


def serve(
    engine: SimulatedEngine,
    *,
    limit: Callable[[], int],
    weights: tuple[float, ...] = (1.0,),
    warm_up_s: float,
    until_s: float,
    seed: int = 0,
) -> Served:
    """Keep each client at its share of `limit`, which is asked once per step."""
    rng = random.Random(seed)
    loads: Counter[int] = Counter()
    begun_at, generated, num_steps, sum_of_limits = 0.0, 0, 0, 0.0
    while engine.now < until_s:
        allowed = limit()
        parts = divide_sequences(allowed, dict(enumerate(weights)), {})
        for owner, part in parts.items():
            for _ in range(part - engine.load_of(owner)):
                length = max(16, min(4_000, int(rng.lognormvariate(6.1, 0.8))))
                engine.add(Sequence(owner, length))
        engine.step()
        if engine.now >= warm_up_s:
            if not num_steps:
                begun_at, generated = engine.now, engine.num_generated
            num_steps += 1
            sum_of_limits += allowed
            loads.update({owner: engine.load_of(owner) for owner in range(len(weights))})
    return Served(
        (engine.num_generated - generated) / (engine.now - begun_at),
        sum_of_limits / num_steps,
        tuple(loads[owner] / num_steps for owner in range(len(weights))),
    )


def adaptive_limit(
    engine: SimulatedEngine, rule: ConcurrencyRule, *, poll_s: float = 1.0
) -> Callable[[], int]:
    """Return a limit that polls the engine's metrics as the service does."""
    state = first_limit(rule, now=engine.now)
    polled_at = engine.now

    def limit() -> int:
        nonlocal state, polled_at
        if engine.now - polled_at >= poll_s:
            polled_at = engine.now
            state = next_limit(state, engine.reading(), rule, now=engine.now)
        return state.num_sequences

    return limit

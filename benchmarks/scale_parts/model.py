"""A discrete-event model of an asynchronous run: engines, environment, service, trainer.

    environment ── G sequences per group ──► engines: prefill, decode in slots, KV cache
         ▲                                      │ the last sequence of a group ends it
         │ off-policy bound                     ▼
         └──────────── queue ◄──────────── service: one at a time
                         │ B sequences
                         ▼
                      trainer: a step, then a weight update, which pauses every engine

An engine shares its decode rate among its running sequences, so all of them advance by the same
number of tokens: the engine keeps one counter of tokens per sequence, and a sequence ends when the
counter reaches its end. Between two events everything is linear, and the model is exact. When the
KV cache is full, the sequence that was started last is preempted; its tokens are computed again.

A run has thousands of equal engines. The model holds at most `MAX_ENGINES` of them with their share
of batch, trainer and environment; the service receives the load of all.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["MAX_ENGINES", "Cluster", "Figures", "simulate"]

MAX_ENGINES = 16
_WATERMARK = 0.97
"""Part of the KV cache up to which new sequences start."""


@dataclass(frozen=True)
class Cluster:
    """Size and rates of a run."""

    engines: int = 1
    slots: int = 256
    """Sequences that one engine decodes at once."""
    slot_tokens_per_s: float = 40.0
    """Decode rate of a sequence while the engine is not saturated."""
    engine_tokens_per_s: float = 8_000.0
    """Maximum decode rate of an engine."""
    prefill_tokens_per_s: float = 40_000.0
    kv_tokens: float = 1_000_000.0
    """Tokens in the KV cache of an engine."""
    prompt_tokens: int = 512
    median_tokens: float = 3_000.0
    spread: float = 0.8
    """Standard deviation of the logarithm of the length of a completion."""
    most_tokens: int = 32_768
    group_size: int = 8
    batch_size: int = 128
    """Sequences of a step, for all engines together."""
    max_batches_offpolicy: int = 4
    max_groups: int = 10**9
    """Groups in progress, for all engines together."""
    trainer_sequences_per_s: float = math.inf
    update_s: float = 5.0
    """Pause of the engines at a weight update."""
    service_s_per_group: float = 0.0
    """Processor time of the service to take and to deliver a group."""
    seed: int = 0

    def draw_tokens(self, rng: random.Random) -> int:
        """Return the length of a completion."""
        drawn = rng.lognormvariate(0.0, self.spread) * self.median_tokens
        return max(16, min(self.most_tokens, int(drawn)))


@dataclass(frozen=True)
class Figures:
    """Results of the measured part of a simulation, for the whole cluster."""

    slot_use: float
    """Fraction of the slots that was decoding."""
    tokens_per_s: float
    """Tokens generated per second, without those that were computed again."""
    sequences_per_s: float
    """Sequences trained on per second."""
    groups_per_s: float
    recomputed_share: float
    """Tokens computed again after a preemption, as a fraction of the generated ones."""
    staleness: float
    """Mean number of weight updates between the start of a group and its step."""
    service_load: float
    """Fraction of the time in which the service was busy."""


@dataclass
class _Sequence:
    group: _Group
    left: float
    context: float
    """Tokens in the KV cache when it was started, or started again."""
    end: float = 0.0
    """Counter of the engine at which it ends."""
    begun: float = 0.0


@dataclass
class _Group:
    version: int
    num_left: int


@dataclass
class _Engine:
    cluster: Cluster
    running: list[tuple[float, int, _Sequence]] = field(default_factory=list)
    waiting: deque[_Sequence] = field(default_factory=deque)
    at: float = 0.0
    counter: float = 0.0
    cached: float = 0.0
    debt_s: float = 0.0
    """Time of prefill and weight updates, during which nothing is decoded."""
    generation: int = 0
    """Number of the latest plan of its next event; earlier ones are void."""
    busy_slot_s: float = 0.0
    recomputed: float = 0.0
    _numbers: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def rate(self) -> float:
        """Tokens per second of each running sequence."""
        num = max(1, len(self.running))
        return min(self.cluster.slot_tokens_per_s, self.cluster.engine_tokens_per_s / num)

    def advance(self, now: float) -> None:
        elapsed, self.at = now - self.at, now
        self.busy_slot_s += elapsed * len(self.running)
        paid = min(self.debt_s, elapsed)
        self.debt_s -= paid
        tokens = (elapsed - paid) * self.rate if self.running else 0.0
        self.counter += tokens
        self.cached += tokens * len(self.running)

    def next_at(self) -> float | None:
        """Return the time of the next end of a sequence or of a full KV cache."""
        if not self.running:
            return None
        to_end = (self.running[0][0] - self.counter) / self.rate
        free = self.cluster.kv_tokens - self.cached
        to_full = free / (self.rate * len(self.running))
        return self.at + self.debt_s + max(0.0, min(to_end, to_full))

    def fill(self) -> None:
        """Start waiting sequences as long as there are slots and cache."""
        limit = _WATERMARK * self.cluster.kv_tokens
        while self.waiting and len(self.running) < self.cluster.slots:
            sequence = self.waiting[0]
            if self.running and self.cached + sequence.context > limit:
                return
            self.waiting.popleft()
            self.debt_s += sequence.context / self.cluster.prefill_tokens_per_s
            self.cached += sequence.context
            sequence.begun = self.counter
            sequence.end = self.counter + sequence.left
            self._numbers += 1
            heapq.heappush(self.running, (sequence.end, self._numbers, sequence))

    def take_ended(self) -> list[_Sequence]:
        """Remove the sequences that have ended, and preempt one if the cache is full."""
        ended = []
        while self.running and self.running[0][0] <= self.counter + 1e-6:
            sequence = heapq.heappop(self.running)[2]
            self._release(sequence)
            ended.append(sequence)
        if self.cached >= self.cluster.kv_tokens - 1e-6 and len(self.running) > 1:
            self._preempt()
        return ended

    def _release(self, sequence: _Sequence) -> None:
        self.cached -= sequence.context + self.counter - sequence.begun

    def _preempt(self) -> None:
        last = max(self.running, key=lambda entry: entry[1])
        self.running.remove(last)
        heapq.heapify(self.running)
        sequence = last[2]
        self._release(sequence)
        generated = self.counter - sequence.begun
        sequence.context += generated
        sequence.left -= generated
        self.recomputed += sequence.context
        self.waiting.appendleft(sequence)


class _Simulation:
    """The events of one run in a cell of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        num_engines = min(cluster.engines, MAX_ENGINES)
        self.factor = cluster.engines / num_engines
        self.engines = [_Engine(cluster) for _ in range(num_engines)]
        self.batch_size = max(cluster.group_size, round(cluster.batch_size / self.factor))
        self.now = 0.0
        self.tokens = self.num_trained = self.num_groups = 0
        self.staleness = self.service_busy_s = 0.0
        self._rng = random.Random(cluster.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._queue: deque[_Group] = deque()
        self._num_in_progress = 0
        self._version = 0
        self._service_free_at = 0.0
        self._is_training = False

    def run(self, until: float) -> None:
        """Process the events up to a time."""
        self._start_groups()
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until
        for engine in self.engines:
            engine.advance(until)
            self._plan(engine)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, act))

    def _plan(self, engine: _Engine) -> None:
        engine.generation += 1
        generation, when = engine.generation, engine.next_at()
        if when is not None:
            self._at(when, lambda: self._step_engine(engine, generation))

    def _step_engine(self, engine: _Engine, generation: int) -> None:
        if generation != engine.generation:
            return
        engine.advance(self.now)
        for sequence in engine.take_ended():
            sequence.group.num_left -= 1
            if not sequence.group.num_left:
                self._send(sequence.group)
        engine.fill()
        self._plan(engine)

    def _start_groups(self) -> None:
        """Start groups up to the off-policy bound, as `worker_limit` of an environment does."""
        cluster = self.cluster
        allowed = cluster.max_batches_offpolicy * self.batch_size // cluster.group_size
        most = min(cluster.max_groups / self.factor, allowed - len(self._queue))
        touched: dict[int, _Engine] = {}
        while self._num_in_progress < most:
            self._num_in_progress += 1
            group = _Group(self._version, cluster.group_size)
            for _ in range(cluster.group_size):
                engine = min(self.engines, key=lambda each: each.load)
                left = cluster.draw_tokens(self._rng)
                self.tokens += left
                engine.waiting.append(_Sequence(group, left, cluster.prompt_tokens))
                touched[id(engine)] = engine
        for engine in touched.values():
            engine.advance(self.now)
            engine.fill()
            self._plan(engine)

    def _send(self, group: _Group) -> None:
        """Let the service take a group; it also takes those of the engines outside the cell."""
        busy_s = self.cluster.service_s_per_group * self.factor
        self.service_busy_s += busy_s
        self._service_free_at = max(self._service_free_at, self.now) + busy_s
        self._at(self._service_free_at, lambda: self._queue_group(group))

    def _queue_group(self, group: _Group) -> None:
        self._num_in_progress -= 1
        self.num_groups += 1
        self._queue.append(group)
        self._train_if_possible()
        self._start_groups()

    def _train_if_possible(self) -> None:
        num_groups = self.batch_size // self.cluster.group_size
        if self._is_training or len(self._queue) < num_groups:
            return
        self._is_training = True
        for _ in range(num_groups):
            self.staleness += self._version - self._queue.popleft().version
        self.num_trained += num_groups
        rate = self.cluster.trainer_sequences_per_s / self.factor
        self._at(self.now + self.batch_size / rate, self._finish_step)
        self._at(self.now, self._start_groups)

    def _finish_step(self) -> None:
        self._is_training = False
        self._version += 1
        for engine in self.engines if self.cluster.update_s else ():
            engine.advance(self.now)
            engine.debt_s += self.cluster.update_s
            self._plan(engine)
        self._train_if_possible()


def simulate(cluster: Cluster, *, warm_up_s: float, window_s: float) -> Figures:
    """Simulate a run, and measure it after a warm-up; deterministic."""
    simulation = _Simulation(cluster)
    simulation.run(warm_up_s)
    before = _totals(simulation)
    simulation.run(warm_up_s + window_s)
    busy_slot_s, tokens, trained, groups, recomputed, staleness, service_s = (
        end - start for end, start in zip(_totals(simulation), before, strict=True)
    )
    num_slots = len(simulation.engines) * cluster.slots
    return Figures(
        slot_use=busy_slot_s / (num_slots * window_s),
        tokens_per_s=tokens * simulation.factor / window_s,
        sequences_per_s=trained * cluster.group_size * simulation.factor / window_s,
        groups_per_s=groups * simulation.factor / window_s,
        recomputed_share=recomputed / max(1.0, tokens),
        staleness=staleness / max(1.0, trained),
        service_load=min(1.0, service_s / window_s),
    )


def _totals(simulation: _Simulation) -> tuple[float, ...]:
    engines = simulation.engines
    return (
        sum(engine.busy_slot_s for engine in engines),
        simulation.tokens,
        simulation.num_trained,
        simulation.num_groups,
        sum(engine.recomputed for engine in engines),
        simulation.staleness,
        simulation.service_busy_s,
    )

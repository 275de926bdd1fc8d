"""The metrics of one service: their names, descriptions and sources.

    FIGURES ── read from the run at each scrape ────┐
    RequestMetrics ── counted per request ──────────┼─► registry of this application ─► /metrics
    histograms ── observed when a batch is sent ────┘

Metrics read from the run are the same in every replica that serves it. Those counted per request or
observed per batch belong to this replica; their total is the sum over replicas. Reading costs at
most O(environments), because the queue is not scanned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from atroposlib.api.middleware import RequestMetrics
from atroposlib.api.stalls import Stall
from atroposlib.api.state import GROUPS_SET_ASIDE, SET_ASIDE, DeliveredBatch, RunState

_MAX_ENVIRONMENT_NAMES = 100
_OTHER_NAMES = "other"
_NO_NAME = "unregistered"
_REFUSED = "groups/refused_"

Reading: TypeAlias = float | Mapping[str, float] | None


class MeteredRun(Protocol):
    """The attributes of a run that the metrics read."""

    state: RunState
    counters: Counter[str]
    """Counters of this replica."""

    @property
    def now(self) -> float: ...

    @property
    def full_reason(self) -> str | None: ...

    def stalls(self) -> list[Stall]: ...


class Figure(NamedTuple):
    """One metric read from the run."""

    name: str
    """Ends in `_total` if it is a counter; else it is a gauge."""
    help: str
    read: Callable[[MeteredRun], Reading]
    """Returns one number, one number per label value, or None without a value."""
    label: str | None = None


def _counted(name: str, run: MeteredRun) -> Reading:
    return run.state.counters[name]


def _by_reason(counters: Counter[str], prefix: str) -> Reading:
    return {
        name.removeprefix(prefix): count
        for name, count in counters.items()
        if name.startswith(prefix)
    }


def _batches_pending(run: MeteredRun) -> Reading:
    in_flight = run.state.delivery.in_flight.values()
    leased = sum(batch.lease_until is not None for batch in in_flight)
    returned = len(run.state.delivery.returned)
    return {"sending": len(in_flight) - leased, "leased": leased, "returned": returned}


def _environments(run: MeteredRun) -> Reading:
    found = {"connected": 0, "disconnected": 0, "expired": 0}
    for env in run.state.envs:
        state = "connected" if env.is_connected else "disconnected"
        found["expired" if env.is_expired else state] += 1
    return found


def _queued_by_environment(run: MeteredRun) -> Reading:
    """Sum queued sequences by environment name; names after the first hundred share one label."""
    names = [env.desired_name for env in run.state.envs]
    known = dict.fromkeys(islice(dict.fromkeys(names), _MAX_ENVIRONMENT_NAMES), 0.0)
    for env_id, num_sequences in run.state.queue.sequences_by_env.items():
        name = _NO_NAME if env_id is None else names[env_id]
        name = name if name in known or env_id is None else _OTHER_NAMES
        known[name] = known.get(name, 0.0) + num_sequences
    return known


def _stalled_sequences(run: MeteredRun) -> Reading:
    found: dict[str, float] = {}
    for stall in run.stalls():
        found[stall.reason] = found.get(stall.reason, 0.0) + stall.num_sequences
    return found


def _oldest_age_s(run: MeteredRun) -> Reading:
    oldest = next(iter(run.state.queue), None)
    return 0.0 if oldest is None else max(0.0, run.now - oldest.received_at)


_COUNTERS = {
    "groups/received": "Groups stored.",
    "sequences/received": "Sequences stored.",
    "tokens/received": "Tokens stored.",
    "groups/loose": "Groups stored although an optional field does not line up with their tokens.",
    "groups/tokenized_from_text": "Groups stored whose tokens were made from text, because the "
    "server reports no token ids.",
    "groups/removed": "Groups removed from the queue by an operator.",
    "batches/delivered": "Batches acknowledged.",
    "batches/without_step": "Batches acknowledged without a step: not trained on, or already "
    "counted.",
    "groups/delivered": "Groups of acknowledged batches.",
    "sequences/delivered": "Sequences of acknowledged batches.",
    "tokens/delivered": "Tokens of acknowledged batches.",
}
"""Counters of `RunState`; the metric of `groups/received` is `atropos_groups_received_total`."""

FIGURES = (
    Figure(
        "atropos_step",
        "Batches the trainer has trained on, plus its first step.",
        lambda run: run.state.step,
    ),
    Figure(
        "atropos_policy_version",
        "Policy version last reported by the trainer, else its step.",
        lambda run: run.state.current_version,
    ),
    Figure("atropos_queue_groups", "Queued groups.", lambda run: len(run.state.queue)),
    Figure(
        "atropos_queue_sequences",
        "Queued sequences.",
        lambda run: run.state.queue.num_sequences,
    ),
    Figure(
        "atropos_queue_tokens",
        "Queued tokens.",
        lambda run: run.state.queue.num_tokens,
    ),
    Figure(
        "atropos_queue_bytes",
        "Payload bytes of queued groups.",
        lambda run: run.state.queue.num_bytes,
    ),
    Figure(
        "atropos_environment_queue_sequences",
        "Queued sequences, by the name that their environment requested.",
        _queued_by_environment,
        "environment",
    ),
    Figure(
        "atropos_queue_oldest_age_seconds",
        "Time since the oldest queued group was received.",
        _oldest_age_s,
    ),
    Figure(
        "atropos_queue_oldest_staleness_steps",
        "Current policy version minus the lowest known version of a queued group.",
        lambda run: run.state.oldest_staleness,
    ),
    Figure(
        "atropos_buffered_sequences",
        "Sequences in buffers, until groups add up to their environment's group size.",
        lambda run: run.state.envs.buffered_sequences,
    ),
    Figure(
        "atropos_buffered_bytes",
        "Payload bytes of buffered sequences.",
        lambda run: run.state.envs.buffered_bytes,
    ),
    Figure(
        "atropos_stalled_sequences",
        "Sequences that are stuck, or missing from a minimum share, by reason.",
        _stalled_sequences,
        "reason",
    ),
    Figure(
        "atropos_batches_pending",
        "Batches formed but not acknowledged, by state.",
        _batches_pending,
        "state",
    ),
    Figure(
        "atropos_batches_pending_sequences",
        "Sequences in batches formed but not acknowledged.",
        lambda run: run.state.delivery.num_sequences,
    ),
    Figure("atropos_environments", "Registered environments, by state.", _environments, "state"),
    Figure(
        "atropos_store_full",
        "1 while the store has no space for new groups, else 0.",
        lambda run: run.full_reason is not None,
    ),
    *(
        Figure(f"atropos_{name.replace('/', '_')}_total", text, partial(_counted, name))
        for name, text in _COUNTERS.items()
    ),
    Figure(
        "atropos_requests_repeated_total",
        "Requests answered from their idempotency key, without storing them again.",
        lambda run: run.counters["requests/repeated"],
    ),
    Figure(
        "atropos_requests_refused_total",
        "Rejected requests with groups, by reason.",
        lambda run: _by_reason(run.counters, _REFUSED),
        "reason",
    ),
    Figure(
        "atropos_groups_set_aside_total",
        "Groups left out of the run because their payload is missing or damaged in the store.",
        lambda run: _by_reason(run.state.counters, GROUPS_SET_ASIDE),
        "flaw",
    ),
    Figure(
        "atropos_batches_returned_total",
        "Batches returned for redelivery, by reason; expired: the lease expired.",
        lambda run: _by_reason(run.state.counters, "batches/returned_"),
        "reason",
    ),
    Figure(
        "atropos_records_set_aside_total",
        "Records of the run that could not be applied and were left out, by kind.",
        lambda run: _by_reason(run.state.counters, SET_ASIDE),
        "kind",
    ),
)


_AGE_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_STORE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


class _RunCollector(Collector):
    """Reads the metrics of a run at each scrape."""

    def __init__(self, run: MeteredRun) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        for figure in FIGURES:
            is_counter = figure.name.endswith("_total")
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            reading = figure.read(self._run)
            family = kind(figure.name, figure.help, labels=[figure.label] if figure.label else None)
            if isinstance(reading, Mapping):
                for value, number in reading.items():
                    family.add_metric([value], number)
            elif reading is not None:
                family.add_metric([], reading)
            yield family


class _Distribution(Collector):
    """A histogram that takes thousands of values of one batch at once, in microseconds."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Add values, none below 0."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        labels = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class ServiceMetrics:
    """Every metric of one application, in its own registry."""

    def __init__(self, run: MeteredRun) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self._run = run
        self._store_s = Histogram(
            "atropos_store_operation_seconds",
            "Time the store took to write a record with its groups, or to read groups.",
            ["operation"],
            registry=self.registry,
            buckets=_STORE_BUCKETS_S,
        )
        # Looking a series up by its label costs about the same as using it.
        self._store_series = {name: self._store_s.labels(name) for name in ("append", "fetch")}
        self._age_s = _Distribution(
            "atropos_handed_out_age_seconds",
            "Time from the arrival of a group to its first delivery.",
            _AGE_BUCKETS_S,
        )
        self._staleness = _Distribution(
            "atropos_handed_out_staleness_steps",
            "Policy version at the first delivery of a group minus the one it was sampled under, "
            "if that is known.",
            _STALENESS_BUCKETS,
        )
        for collector in (_RunCollector(run), self._age_s, self._staleness):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def observe_store(self, operation: str, seconds: float) -> None:
        self._store_series[operation].observe(seconds)

    def observe_delivery(self, batch: DeliveredBatch) -> None:
        """Observe the age of the groups of a batch; only its first attempt counts."""
        if batch.attempt != 1:
            return
        self._age_s.observe(max(0.0, batch.at - group.received_at) for group in batch.groups)
        ages = map(self._run.state.staleness_of, batch.groups)
        self._staleness.observe(age for age in ages if age is not None)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format of a scraper's `Accept` header, and their media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

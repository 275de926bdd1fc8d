"""The metrics of one service: what they are called, what they mean, and where they come from.

    FIGURES ── read from the run when somebody asks ──┐
    request_metrics ── counted per request ───────────┼─► registry of this application ─► /metrics
    histograms ── observed when a batch leaves ───────┘

What is read from the run is the same in every replica that serves it; what is counted per request
and observed per batch is this replica's own and adds up over them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from atroposlib.api.delivery import Handout
from atroposlib.api.request_metrics import RequestMetrics
from atroposlib.api.run_figures import FIGURES, MeteredRun

__all__ = ["ServiceMetrics"]

_AGE_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_STORE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


class _RunCollector(Collector):
    """Reads the figures of a run when they are asked for."""

    def __init__(self, run: MeteredRun) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        for figure in FIGURES:
            kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
            reading = figure.read(self._run)
            family = kind(figure.name, figure.help, labels=[figure.label] if figure.label else None)
            if isinstance(reading, Mapping):
                for value, number in reading.items():
                    family.add_metric([value], number)
            elif reading is not None:
                family.add_metric([], reading)
            yield family


class _Distribution(Collector):
    """A histogram that takes the thousands of values of one batch at once, in microseconds."""

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
    """Every metric of one application, in a registry of its own."""

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
        # Finding a series by its label costs as much as using it.
        self._store_series = {name: self._store_s.labels(name) for name in ("append", "fetch")}
        self._age_s = _Distribution(
            "atropos_handed_out_age_seconds",
            "Time from a group's arrival until it was first handed out.",
            _AGE_BUCKETS_S,
        )
        self._staleness = _Distribution(
            "atropos_handed_out_staleness_steps",
            "Policy version when a group was first handed out less the one it was sampled under, "
            "if that is known.",
            _STALENESS_BUCKETS,
        )
        for collector in (_RunCollector(run), self._age_s, self._staleness):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def observe_store(self, operation: str, seconds: float) -> None:
        """Note how long an `append` or a `fetch` took."""
        self._store_series[operation].observe(seconds)

    def observe_handout(self, handout: Handout) -> None:
        """Note how old the groups of a batch are that leaves; only its first attempt counts."""
        if handout.attempt != 1:
            return
        self._age_s.observe(max(0.0, handout.at - group.received_at) for group in handout.groups)
        ages = map(self._run.state.staleness_of, handout.groups)
        self._staleness.observe(age for age in ages if age is not None)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics as a scraper's `Accept` asks for them, and their media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

"""Counts and times of requests, per route; a few microseconds each."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.access import path_of, rule_for

__all__ = ["RequestMetrics", "RequestMetricsMiddleware"]

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_LEFT = 499


class _Series(NamedTuple):
    """The series of one method and route."""

    durations: Histogram
    in_flight: Gauge


class RequestMetrics:
    """The request metrics of one application, in its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["method", "route"]
        self._durations = Histogram(
            "atropos_http_request_duration_seconds",
            "Time from the first byte of a request to the last of its answer; "
            "that of /batch contains its wait.",
            labels,
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._in_flight = Gauge(
            "atropos_http_requests_in_flight",
            "Requests that are being served now.",
            labels,
            registry=registry,
        )
        self._answers = Counter(
            "atropos_http_requests_total",
            "Requests by status of the answer; 499: the client left before there was one.",
            [*labels, "status"],
            registry=registry,
        )
        # Finding a series by its labels costs as much as using it.
        self._series: dict[tuple[str, str], _Series] = {}
        self._counters: dict[tuple[str, str, int], Counter] = {}

    def series(self, method: str, route: str) -> _Series:
        """Return the series that a request belongs to."""
        series = self._series.get((method, route))
        if series is None:
            labels = (method, route)
            series = _Series(self._durations.labels(*labels), self._in_flight.labels(*labels))
            self._series[method, route] = series
        return series

    def count(self, method: str, route: str, status: int) -> None:
        """Count an answer."""
        counter = self._counters.get((method, route, status))
        if counter is None:
            counter = self._answers.labels(method, route, str(status))
            self._counters[method, route, status] = counter
        counter.inc()


class RequestMetricsMiddleware:
    """Times every request and counts it by the status of its answer."""

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = rule_for(path_of(scope)).route
        method = scope["method"] if scope["method"] in _METHODS else "other"
        series = self._metrics.series(method, route)
        status = _CLIENT_LEFT

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        series.in_flight.inc()
        started = perf_counter()
        try:
            await self.app(scope, receive, note_status)
        except Exception:
            status = 500
            raise
        finally:
            series.durations.observe(perf_counter() - started)
            series.in_flight.dec()
            self._metrics.count(method, route, status)

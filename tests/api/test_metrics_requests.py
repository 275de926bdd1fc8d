"""Counts and times of requests."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from atroposlib.api.middleware import RequestMetrics, RequestMetricsMiddleware


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def client(registry: CollectorRegistry) -> TestClient:
    app = FastAPI()

    @app.get("/status")
    async def status() -> float | None:
        labels = {"method": "GET", "route": "/status"}
        return registry.get_sample_value("atropos_http_requests_in_flight", labels)

    @app.post("/batch/{token}/ack")
    async def acknowledge(token: str) -> str:
        return token

    @app.get("/info")
    async def fails() -> None:
        raise RuntimeError

    app.add_middleware(RequestMetricsMiddleware, metrics=RequestMetrics(registry))
    return TestClient(app, raise_server_exceptions=False)


def requests(registry: CollectorRegistry, method: str, route: str, status: int) -> float | None:
    labels = {"method": method, "route": route, "status": str(status)}
    return registry.get_sample_value("atropos_http_requests_total", labels)


def test_requests_are_counted_by_template_and_status(
    client: TestClient, registry: CollectorRegistry
) -> None:
    for token in ("1-1", "2-1", "3-1"):
        client.post(f"/batch/{token}/ack")
    client.get("/batch/1-1/ack")

    assert requests(registry, "POST", "/batch/{}/ack", 200) == 3
    assert requests(registry, "GET", "/batch/{}/ack", 405) == 1
    labels = {"method": "POST", "route": "/batch/{}/ack"}
    duration = "atropos_http_request_duration_seconds"
    assert registry.get_sample_value(f"{duration}_count", labels) == 3
    assert (registry.get_sample_value(f"{duration}_sum", labels) or 0) > 0


def test_request_is_in_flight_while_it_is_served(
    client: TestClient, registry: CollectorRegistry
) -> None:
    assert client.get("/status").json() == 1.0

    labels = {"method": "GET", "route": "/status"}
    assert registry.get_sample_value("atropos_http_requests_in_flight", labels) == 0


def test_request_that_fails_counts_as_500(client: TestClient, registry: CollectorRegistry) -> None:
    client.get("/info")

    assert requests(registry, "GET", "/info", 500) == 1


def test_strange_paths_and_methods_share_one_series(
    client: TestClient, registry: CollectorRegistry
) -> None:
    for number in range(50):
        client.get(f"/nowhere/{number}")
        client.request(f"BREW{number}", "/nowhere")

    assert requests(registry, "GET", "unknown", 404) == 50
    assert requests(registry, "other", "unknown", 404) == 50


async def test_client_that_left_before_an_answer_counts_as_499(
    registry: CollectorRegistry,
) -> None:
    async def never_answers(scope: object, receive: object, send: object) -> None:
        return

    middleware = RequestMetricsMiddleware(never_answers, metrics=RequestMetrics(registry))
    await middleware({"type": "http", "method": "GET", "path": "/batch"}, None, None)  # type: ignore[arg-type]

    assert requests(registry, "GET", "/batch", 499) == 1

"""What an operator calls: health, metrics; and who may call which route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount, WebSocketRoute

from atroposlib.api.auth import UNKNOWN_ROUTE, Role, rule_for
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from tests.api.helpers import TOKENS, Service, make_group

pytestmark = pytest.mark.slow

OPEN = {"/", "/health/live", "/health/ready"}


def test_live_answers_without_a_run() -> None:
    assert Service().get("/health/live").json() == {"status": "live"}


def test_ready_answers_with_counts() -> None:
    service = Service()
    service.push(2, 2)

    answer = service.get("/health/ready")

    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert answer.json()["counters"]["groups/received"] == 2


def test_ready_is_503_with_the_reason_while_the_store_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    service.push(2)

    async def refuse() -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(service.app.state.watched_store.store, "sync", refuse)
    answer = service.get("/health/ready")

    assert answer.status_code == 503
    assert answer.json() == {
        "status": "not ready",
        "reason": "ConnectionError: connection refused",
    }


def test_ready_is_503_with_the_reason_while_writing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    service.push(2)

    async def refuse(*args: object, **options: object) -> bool:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(service.app.state.watched_store.store, "append", refuse)
        assert service.post("/scored_data", json=make_group(2)).status_code >= 500
    answer = service.get("/health/ready")

    assert answer.status_code == 503
    assert answer.json()["reason"] == "append: OSError: no space left on device"
    service.push(2)
    assert service.get("/health/ready").status_code == 200


def test_metrics_count_what_went_through() -> None:
    service = Service()
    service.start(batch_size=4)
    service.push(2, 2, 2)
    assert service.take() is not None
    assert service.post("/scored_data", json={"tokens": 5}).status_code == 422

    answer = service.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    for line in (
        "atropos_step 1.0",
        "atropos_queue_groups 1.0",
        "atropos_groups_received_total 3.0",
        "atropos_sequences_received_total 6.0",
        "atropos_tokens_received_total 6.0",
        "atropos_sequences_delivered_total 4.0",
        "atropos_tokens_delivered_total 4.0",
        "atropos_handed_out_age_seconds_count 2.0",
        'atropos_store_operation_seconds_count{operation="fetch"} 1.0',
        'atropos_http_requests_total{method="POST",route="/scored_data",status="200"} 3.0',
        'atropos_http_requests_total{method="POST",route="/scored_data",status="422"} 1.0',
    ):
        assert line in lines
    assert any(line.startswith("atropos_requests_refused_total{reason=") for line in lines)


def test_metrics_speak_open_metrics_when_asked() -> None:
    accept = "application/openmetrics-text; version=1.0.0"

    answer = Service().get("/metrics", headers={"Accept": accept})

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.fixture
def guarded(tmp_path: Path) -> Service:
    """A service that asks for tokens."""
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text("".join(f"{role.value} {token}\n" for role, token in TOKENS.items()))
    return Service(ApiSettings(token_file=path))


def operations_of(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    ]


LIVE = operations_of(create_app().openapi())


def fill(path: str) -> str:
    """Put values where the template of a path has names."""
    return path.replace("{group_id}", "0").replace("{batch_id}", "7-1").replace("{token}", "7-1")


def test_no_route_is_hidden_from_the_document() -> None:
    app = create_app()
    hidden = [
        route
        for route in app.routes
        if isinstance(route, (Mount, WebSocketRoute))
        or (isinstance(route, APIRoute) and not route.include_in_schema)
    ]

    assert not hidden
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        assert rule_for(path).roles == set(Role)


@pytest.mark.parametrize(("method", "path"), LIVE)
def test_every_route_has_a_rule(method: str, path: str) -> None:
    assert rule_for(fill(path)) is not UNKNOWN_ROUTE, f"say in access.py who may call {path}"


@pytest.mark.parametrize(("method", "path"), LIVE)
def test_every_route_is_served_to_the_roles_of_its_rule_only(
    guarded: Service, method: str, path: str
) -> None:
    rule = rule_for(fill(path), method)

    anonymous = guarded.request(method, fill(path)).status_code
    assert (anonymous == 401) is (path not in OPEN)
    for role, token in TOKENS.items():
        answer = guarded.request(method, fill(path), headers={"Authorization": f"Bearer {token}"})
        is_let_in = answer.status_code not in (401, 403)
        assert is_let_in is (role in rule.roles), (role, answer.status_code)
        assert answer.status_code < 500


def test_roles_are_those_of_the_service(guarded: Service) -> None:
    by_role = {
        role: {path for _, path in LIVE if role in rule_for(fill(path)).roles} for role in Role
    }

    assert by_role[Role.ADMIN] == {path for _, path in LIVE}
    assert {"/register-env", "/scored_data", "/status-env"} <= by_role[Role.ENVIRONMENT]
    assert {"/register", "/batch", "/groups", "/status-env"} <= by_role[Role.TRAINER]
    for destructive in ("/reset_data", "/latest_example", "/groups/{group_id}/payload"):
        assert destructive not in by_role[Role.ENVIRONMENT] | by_role[Role.TRAINER]
    assert "/batch" not in by_role[Role.ENVIRONMENT]
    assert "/scored_data" not in by_role[Role.TRAINER]


def test_path_that_nobody_serves_is_refused_to_all_but_admins(guarded: Service) -> None:
    trainer = {"Authorization": f"Bearer {TOKENS[Role.TRAINER]}"}
    admin = {"Authorization": f"Bearer {TOKENS[Role.ADMIN]}"}

    assert guarded.get("/nowhere").status_code == 401
    assert guarded.get("/nowhere", headers=trainer).status_code == 403
    assert guarded.get("/nowhere", headers=admin).status_code == 404


def test_tokens_are_in_no_document_and_no_setting(guarded: Service) -> None:
    admin = {"Authorization": f"Bearer {TOKENS[Role.ADMIN]}"}

    shown = guarded.get("/openapi.json", headers=admin).text
    shown += guarded.get("/metrics", headers=admin).text
    assert not any(token in shown for token in TOKENS.values())


def test_browser_asks_in_advance_without_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"trainer {TOKENS[Role.TRAINER]}\n")
    origin = "http://dashboard.test"
    service = Service(ApiSettings(token_file=path, cors_origins=(origin,)))
    asks = {"Origin": origin, "Access-Control-Request-Method": "GET"}

    answer = service.options("/status", headers=asks)

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin


def test_request_without_a_token_is_refused_before_its_body_is_inflated(guarded: Service) -> None:
    answer = guarded.post("/scored_data", content=b"no gzip", headers={"Content-Encoding": "gzip"})

    assert answer.status_code == 401


def test_metrics_name_why_groups_were_refused() -> None:
    service = Service(ApiSettings(max_queue_sequences=3))
    key = {"Idempotency-Key": "one"}
    assert service.post("/scored_data", json=make_group(2), headers=key).status_code == 200
    assert service.post("/scored_data", json=make_group(2), headers=key).status_code == 200
    assert service.post("/scored_data", json=make_group(1), headers=key).status_code == 422
    assert service.post("/scored_data", json=make_group(2)).status_code == 503

    lines = service.get("/metrics").text.splitlines()

    assert 'atropos_requests_refused_total{reason="key_reused"} 1.0' in lines
    assert 'atropos_requests_refused_total{reason="queue_full"} 1.0' in lines
    assert "atropos_requests_repeated_total 1.0" in lines
    assert "atropos_groups_received_total 1.0" in lines

"""The service keeps the position of a group in its trace, and measures queue and lease."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.wire import decode_batch, decode_group, encode_group
from tests.api.helpers import REGISTRATION, make_group
from tests.telemetry.spans import spans_in

pytestmark = pytest.mark.slow

TRACE = "a" * 32
HEADER = f"00-{TRACE}-{'b' * 16}-01"
MALFORMED: list[Any] = ["nonsense", "", 5, {"a": 1}, ["x"], "x" * 100_000, HEADER.upper()]


def service_in(folder: Path) -> TestClient:
    return TestClient(create_app(ApiSettings(store="sqlite", data_dir=folder, run_name="run")))


def take(http: httpx.Client, **params: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.get("/batch", params=params).json()
    return answer


def test_redelivery_and_a_restart_keep_the_traceparent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spans.jsonl"
    monkeypatch.setenv("ATROPOS_TRACING", f"file:{path}")
    with service_in(tmp_path) as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 2})
        http.get("/batch")
        reply = http.post("/scored_data", json=make_group(2, traceparent=HEADER))
        assert reply.status_code == 200
        first = take(http, lease=60)
        http.post(f"/batch/{first['batch_id']}/nack").raise_for_status()
        second = take(http, lease=60)
        http.post(f"/batch/{second['batch_id']}/nack").raise_for_status()
        third = take(http, lease=60)
    with service_in(tmp_path) as http:
        http.post(f"/batch/{third['batch_id']}/ack").raise_for_status()

    delivered = [batch["batch"][0]["traceparent"] for batch in (first, second, third)]
    assert delivered == [HEADER] * 3
    spans = spans_in(path)
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, "b" * 16)}
    assert [(span.name, span.attributes["rl.batch.attempt"]) for span in spans] == [
        ("rl.queue", 1),
        ("rl.lease", 1),
        ("rl.queue", 2),
        ("rl.lease", 2),
        # The service does not know after a restart when the second batch was returned.
        ("rl.lease", 3),
    ]
    outcomes = [span.attributes["rl.lease.outcome"] for span in spans if span.name == "rl.lease"]
    assert outcomes == ["refused", "refused", "acknowledged"]
    assert spans[1].end_ns == spans[2].start_ns


@pytest.mark.parametrize("sent", ["json", "msgpack"])
@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_traceparent_is_left_out(sent: Any, value: Any) -> None:
    body = encode_group(make_group(2, traceparent=value), sent)
    with TestClient(create_app()) as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 2})
        http.get("/batch")
        kind = "application/json" if sent == "json" else "application/msgpack"
        reply = http.post("/scored_data", content=body, headers={"content-type": kind})
        batch = take(http)["batch"]

    assert reply.status_code == 200
    assert "traceparent" not in batch[0]


@pytest.mark.parametrize("sent", ["json", "msgpack"])
@pytest.mark.parametrize("wanted", ["application/json", "application/msgpack"])
def test_both_formats_deliver_the_traceparent(sent: Any, wanted: str) -> None:
    body = encode_group(make_group(2, traceparent=HEADER), sent, zstd=sent == "msgpack")
    with TestClient(create_app()) as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 2})
        http.get("/batch")
        kind = "application/json" if sent == "json" else "application/msgpack"
        http.post("/scored_data", content=body, headers={"content-type": kind}).raise_for_status()
        answer = http.get("/batch", headers={"accept": wanted}).content

    batch = decode_batch(answer, "json" if wanted == "application/json" else "msgpack")["batch"]
    assert batch[0]["traceparent"] == HEADER


def test_groups_without_a_trace_have_no_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spans.jsonl"
    monkeypatch.setenv("ATROPOS_TRACING", f"file:{path}")
    with service_in(tmp_path) as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 2})
        http.get("/batch")
        http.post("/scored_data", json=make_group(2))
        batch = take(http)["batch"]

    assert "traceparent" not in batch[0]
    assert spans_in(path) == []


def test_records_of_earlier_versions_describe_groups_without_a_trace() -> None:
    earlier = msgspec.msgpack.encode([7, None, 2, 9, 100, "json", 3, 12.5, 0.0, 1.0, 5])

    group = msgspec.msgpack.decode(earlier, type=QueuedGroup)

    assert (group.group_id, group.checksum, group.traceparent) == (7, 5, None)


def test_decoded_groups_name_their_trace() -> None:
    group = make_group(2, traceparent=HEADER)

    assert decode_group(encode_group(group)).traceparent == HEADER
    assert decode_group(encode_group(group, "msgpack"), "msgpack").traceparent == HEADER

"""Requests of web pages, and bodies without end, at the companion server."""

from __future__ import annotations

import asyncio

import pytest
from fastapi.testclient import TestClient

from example_trainer.vllm_api_server import CompanionState, EngineFacts, create_app, web_page_rule
from tests.trainer.companion.scripted import TYPES, Engine

LOCAL = "http://127.0.0.1:9001"
ASKED = b'{"prompt": "hello"}'


def local_client(engine: Engine, rule=None, base_url: str = LOCAL) -> TestClient:
    state = CompanionState(
        lambda: engine, lambda: TYPES, {}, EngineFacts(model="tiny", has_lora=True)
    )
    return TestClient(create_app(state, rule), base_url=base_url)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Host": "evil.example:9001", "Origin": "http://evil.example:9001"},
        {"Host": "evil.example:9001"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
@pytest.mark.parametrize("path", ["/bridge/sleep", "/lora/load", "/generate"])
def test_web_pages_can_neither_change_nor_use_the_engine(engine, headers, path):
    headers = {"Content-Type": "text/plain", **headers}

    answer = local_client(engine).post(path, content=ASKED, headers=headers)

    assert answer.status_code == 403
    assert (engine.asked, engine.calls) == ([], [])


@pytest.mark.parametrize(
    "media_type",
    [None, "application/json", "application/x-www-form-urlencoded", "text/plain; charset=utf-8"],
)
def test_programs_may_send_json_under_the_types_of_common_clients(engine, media_type):
    headers = {} if media_type is None else {"Content-Type": media_type}

    answer = local_client(engine).post("/generate", content=ASKED, headers=headers)

    assert answer.json()["text"] == [" a b"]


def test_other_machines_may_use_any_name_of_this_one(engine):
    client = local_client(engine, base_url="http://192.0.2.7:9001")

    answer = client.post("/generate", content=ASKED, headers={"Host": "gpu7.example.org:9001"})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "rule", [web_page_rule(allowed_hosts=["runs.example.org"]), web_page_rule(has_proxy=True)]
)
def test_proxy_on_this_machine_may_use_its_name(engine, rule):
    headers = {"Host": "runs.example.org"}

    refused = local_client(engine).post("/generate", content=ASKED, headers=headers)
    answer = local_client(engine, rule).post("/generate", content=ASKED, headers=headers)

    assert "--allowed-host runs.example.org" in refused.json()["detail"]
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/lora/load"])
def test_bodies_above_the_limit_are_413(engine, monkeypatch, path):
    monkeypatch.setattr("example_trainer.vllm_api_server._MAX_BODY_BYTES", 100_000)
    client = local_client(engine)
    headers = {"Content-Type": "application/json"}

    for large in (b" " * 100_001, iter([b" " * 60_000] * 2)):
        answer = client.post(path, content=large, headers=headers)

        assert answer.status_code == 413
        assert "larger than 100000 bytes" in answer.json()["detail"]


async def test_stream_of_a_client_that_leaves_before_its_first_token_is_aborted(engine):
    has_started, has_left, is_aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(*_, **__):
        has_started.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            is_aborted.set()

    async def receive():
        if not has_started.is_set():
            body = b'{"prompt": "a", "stream": true}'
            return {"type": "http.request", "body": body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    engine.generate, sent = generate, []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    state = CompanionState(lambda: engine, lambda: TYPES)
    answering = asyncio.create_task(create_app(state)(scope, receive, send))
    await asyncio.wait_for(has_started.wait(), 60)
    has_left.set()
    await asyncio.wait_for(is_aborted.wait(), 60)
    await answering

    assert sent[0]["status"] == 499

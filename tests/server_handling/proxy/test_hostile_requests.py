"""Requests nobody should make: each has an answer in OpenAI's error shape, none harms others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from atroposlib.envs.server_handling.proxy.exchange import IGNORED_HEADER
from tests.server_handling.proxy.engine import RecordingEngine, app_of

HELLO = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"messages": [HELLO]}


@pytest.fixture
def url(client: TestClient) -> str:
    uuid = client.post("/sessions/create", json={}).json()["uuid"]
    return f"/{uuid}/v1/chat/completions"


def error_of(response: Any) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 200_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=["cut off", "not text", "not a number", "nested", "lone surrogate"],
)
def test_broken_json_is_400(client: TestClient, url: str, body: bytes) -> None:
    response = client.post(url, content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([CHAT], "body"),
        ({}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ({**CHAT, "n": "many"}, "n"),
        ({**CHAT, "n": 0}, "n"),
        ({**CHAT, "max_tokens": -5}, "max_tokens"),
        ({**CHAT, "max_tokens": 10**30}, "max_tokens"),
        ({**CHAT, "temperature": -1}, "temperature"),
        ({**CHAT, "stop": {"a": 1}}, "stop.str"),
        ({**CHAT, "tools": "search"}, "tools"),
        ({**CHAT, "logit_bias": [1]}, "logit_bias"),
    ],
)
def test_wrong_types_are_422_and_named(
    client: TestClient, url: str, engine: RecordingEngine, body: Any, param: str
) -> None:
    response = client.post(url, json=body)
    rendered = client.post(f"{url}/render", json=body)

    assert (response.status_code, rendered.status_code) == (422, 422)
    assert error_of(response)["param"] == param
    assert response.json()["detail"][0].keys() == {"loc", "msg", "type"}
    assert engine.calls == []


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1000},
        {"top_logprobs": 5},
        {"input_ids": [1, 2]},
        {"prompt_logprobs": 1},
        {"best_of": 3},
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ messages }}"},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: TestClient, url: str, engine: RecordingEngine, extra: dict[str, Any]
) -> None:
    response = client.post(url, json={**CHAT, **extra})

    assert response.status_code == 400
    assert error_of(response)["param"] == next(iter(extra))
    assert engine.calls == []


def test_unknown_fields_are_ignored_and_named(
    client: TestClient, url: str, engine: RecordingEngine
) -> None:
    extra = {"frobnicate": 1, "user": "me", "split": "eval", "bad\r\nname": 1, "seed": 3}

    response = client.post(url, json={**CHAT, **extra})

    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "frobnicate, split"
    assert engine.calls[0].options.keys() == {
        "model", "prompt", "max_tokens", "temperature", "n", "seed"
    }  # fmt: skip


def test_null_options_are_defaults(client: TestClient, url: str, engine: RecordingEngine) -> None:
    nulls = dict.fromkeys(("n", "stream", "temperature", "stop", "tools", "max_tokens", "seed"))

    response = client.post(url, json={**CHAT, **nulls})

    assert response.status_code == 200
    assert engine.calls[0].options["max_tokens"] is None


MANY = 20_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": [0] * MANY}),
        ("chat/completions", {"messages": [{**HELLO, "tool_calls": [0] * MANY}]}),
        ("chat/completions", {**CHAT, "tools": [0] * MANY}),
        ("chat/completions", {**CHAT, "stop": [0] * MANY}),
        ("chat/completions", {**CHAT, "logit_bias": {str(i): "x" for i in range(MANY)}}),
        ("completions", {"prompt": [0] * MANY}),
        ("messages", {**CHAT, "max_tokens": 1, "tools": [0] * MANY}),
        ("responses", {"input": "Hello", "tools": [0] * MANY}),
        ("responses", {"input": "Hello", "include": [0] * MANY}),
    ],
)
def test_many_wrong_elements_are_named_by_the_first(
    client: TestClient, url: str, path: str, fields: dict[str, Any]
) -> None:
    response = client.post(url.replace("chat/completions", path), json=fields)

    assert response.status_code == (422 if path == "chat/completions" else 400)
    assert len(response.content) < 2000


def test_wrong_types_of_a_session_by_key_are_400_as_of_the_provider(client: TestClient) -> None:
    key = client.post("/sessions/create", json={}).json()["api_key"]
    headers = {"Authorization": f"Bearer {key}"}

    response = client.post("/v1/chat/completions", json={**CHAT, "n": "many"}, headers=headers)

    assert (response.status_code, error_of(response)["param"]) == (400, "n")


@pytest.mark.parametrize("is_declared", [True, False])
def test_huge_body_is_413(engine: RecordingEngine, is_declared: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode()
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    with TestClient(app_of(engine, max_body_bytes=2000)) as client:
        uuid = client.post("/sessions/create", json={}).json()["uuid"]

        response = client.post(
            f"/{uuid}/v1/chat/completions", content=body if is_declared else pieces
        )

        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
        assert client.get(f"/{uuid}/nodes").json() == {"nodes": []}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_forms_of_other_sites_are_refused(client: TestClient, kind: str) -> None:
    response = client.post("/sessions/create", content=b"{}", headers={"Content-Type": kind})

    assert response.status_code == 415
    assert client.get("/health").json()["sessions"] == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [1, 2, 3]},
        {"prompt": "x", "echo": True},
        {"prompt": "x", "logprobs": 5},
        {"prompt": ["x"] * 200},
    ],
)
def test_text_requests_that_cannot_be_met(
    client: TestClient, url: str, engine: RecordingEngine, body: dict[str, Any]
) -> None:
    response = client.post(url.replace("/chat/", "/"), json=body)

    assert response.status_code == 400
    assert error_of(response)["message"]
    assert engine.calls == []


def test_template_that_refuses_the_messages_is_400(engine: RecordingEngine) -> None:
    class StrictTokenizer(type(engine.tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **_: Any) -> Any:
            raise RuntimeError("roles must alternate")

    engine.tokenizer = StrictTokenizer()
    with TestClient(app_of(engine)) as client:
        uuid = client.post("/sessions/create", json={}).json()["uuid"]

        for path in ("", "/render"):
            response = client.post(f"/{uuid}/v1/chat/completions{path}", json=CHAT)

            assert response.status_code == 400
            assert "roles must alternate" in error_of(response)["message"]


def test_unknown_routes_keep_the_frameworks_answer(client: TestClient) -> None:
    assert client.get("/nothing/here").json() == {"detail": "Not Found"}
    assert client.get("/v1/chat/completions").status_code == 405

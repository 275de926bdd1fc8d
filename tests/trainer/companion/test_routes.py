"""The companion server's routes over a scripted engine: answers, refusals, pauses."""

from __future__ import annotations

import asyncio
import json

import pytest

from atroposlib.envs.server_handling.vllm_server import (
    normalize_topk_entry,
    parse_generate,
    prompt_rows,
)
from tests.trainer.companion.scripted import ClientError, serve

pytestmark = pytest.mark.slow


def test_generate_answers_texts_and_nothing_that_was_not_asked_for(client):
    answer = client.post("/generate", json={"prompt": "hello", "n": 2})

    assert answer.status_code == 200
    assert answer.json() == {
        "text": [" a b"] * 2,
        "prompt": "hello",
        "finish_reasons": ["stop"] * 2,
    }


def test_generate_answers_ids_and_logprobs_as_the_environments_read_them(client):
    body = {"prompt": {"prompt_token_ids": [3, 4]}, "logprobs": 0, "n": 2, "temperature": 0}

    answer = client.post("/generate", json=body).json()

    assert answer["logprobs"][0] == [[{"5": -0.1}], [{"6": -9999.0, "7": -0.2}]]
    prompt, ids, logprobs, reasons = parse_generate(answer, [3, 4], num_choices=2)
    assert prompt == [3, 4]
    assert ids == [[5, 6]] * 2
    assert logprobs == [[-0.1, -9999.0], [-1.1, -9999.0]]
    assert reasons == ["stop", "stop"]


def test_prompt_logprobs_are_in_the_answer(client):
    body = {"prompt": "hello", "prompt_logprobs": 1}

    answer = client.post("/generate", json=body).json()

    rows = prompt_rows(answer["prompt_logprobs"], 2)
    assert [normalize_topk_entry(row) for row in rows] == [([], []), ([2, 9], [-0.5, -1.0])]


def test_stream_is_lines_of_prompt_and_text_so_far(client):
    answer = client.post("/generate", json={"prompt": "hello", "stream": True})

    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == [{"text": ["hello a"]}, {"text": ["hello a b"]}]


def test_keys_of_a_json_object_become_token_ids(client, engine):
    client.post("/generate", json={"prompt": "x", "logit_bias": {"5": 1}})

    assert engine.asked[0][1].logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "prompt: expected a non-empty text"),
        ({"prompt": ""}, "prompt: expected a non-empty text"),
        ({"prompt": ["a"]}, "prompt: expected a non-empty text"),
        ({"prompt": {"prompt_token_ids": []}}, "prompt: expected a non-empty text"),
        ({"prompt": {"prompt_token_ids": [1, -2]}}, r"prompt.prompt_token_ids[1]: -2"),
        ({"prompt": {"prompt_token_ids": [1, "2"]}}, r"prompt.prompt_token_ids[1]: '2'"),
        ({"prompt": "x", "stream": "yes"}, "stream: expected true or false"),
        ({"prompt": "x", "max_token": 3}, "did you mean max_tokens?"),
        ({"prompt": "x", "output_kind": "final"}, "output_kind: not a sampling parameter"),
        ({"prompt": "x", "temperature": "hot"}, "Expected `float`, got `str` - at `$.temperature`"),
        ({"prompt": "x", "n": 0}, "n must be at least 1"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_generate_refuses_a_wrong_body_before_it_reaches_the_engine(
    client, engine, body, message, stream
):
    if stream and isinstance(body, dict):
        body = {"stream": True, **body}

    answer = client.post("/generate", json=body)

    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    assert engine.asked == []


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000])
def test_body_that_is_not_json_is_refused(client, body):
    answer = client.post("/generate", content=body)

    assert answer.status_code == 400
    assert "not JSON" in answer.json()["detail"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [ValueError, ClientError])
def test_what_the_engine_refuses_is_passed_on(client, engine, stream, kind):
    engine.broken = kind("the prompt has 9 tokens, the model takes 8")

    answer = client.post("/generate", json={"prompt": "x", "stream": stream})

    assert answer.status_code == 400
    assert answer.json() == {"detail": "the prompt has 9 tokens, the model takes 8"}


def test_dead_engine_is_not_healthy(client, engine):
    assert client.get("/health").status_code == 200

    engine.errored = True

    assert client.get("/health").status_code == 503
    answer = client.post("/generate", json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.json() == {"detail": "the engine has died; see the log, and restart this server"}


def test_health_generate_tells_whether_the_engine_writes(client, engine):
    assert client.get("/health_generate").status_code == 200
    assert engine.asked[0][0] == {"prompt_token_ids": [0]}

    engine.broken = RuntimeError("the engine is dead")

    assert client.get("/health_generate").status_code == 500

    engine.broken = asyncio.CancelledError()

    assert client.get("/health_generate").status_code == 499


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health_generate"),
        ("POST", "/generate"),
        ("GET", "/bridge/info"),
        ("GET", "/bridge/state_dict_info"),
        ("POST", "/bridge/pause"),
        ("POST", "/bridge/resume"),
        ("GET", "/bridge/is_paused"),
        ("POST", "/bridge/sleep"),
        ("POST", "/bridge/wake_up"),
        ("GET", "/bridge/is_sleeping"),
    ],
)
def test_without_an_engine_the_answer_is_503(method, path):
    answer = serve(None).request(method, path, json={"prompt": "x"})

    assert answer.status_code == 503
    assert answer.json() == {"detail": "the engine has not started"}


@pytest.mark.parametrize("path", ["/health", "/bridge/debug", "/bridge/list_endpoints"])
def test_without_an_engine_some_routes_still_answer(path):
    assert serve(None).get(path).status_code == 200


def test_bridge_says_that_no_memory_is_shared(client):
    assert client.get("/bridge/info").json() == {
        "enabled": False,
        "shared_weights": False,
        "update_count": 0,
        "last_update_time": None,
        "model_name": "tiny",
        "device": None,
    }
    assert client.get("/bridge/state_dict_info").json() == {
        "model": "tiny",
        "dtype": None,
        "shared_weights_enabled": False,
    }


def test_pause_freezes_requests_until_resume(client, engine):
    assert client.post("/bridge/pause").json() == {"status": "paused"}
    assert client.get("/bridge/is_paused").json() == {"paused": True}
    assert engine.calls == [("pause", "keep")]
    assert client.post("/bridge/resume").json() == {"status": "resumed"}
    assert client.get("/bridge/is_paused").json() == {"paused": False}


def test_engine_that_cannot_pause_is_told_apart():
    client = serve(object())

    assert client.post("/bridge/pause").json() == {"status": "not_supported"}
    assert client.post("/bridge/resume").json() == {"status": "not_supported"}
    assert client.get("/bridge/is_paused").json() == {"paused": False}


def test_engine_sleeps_and_wakes_up(client):
    assert client.post("/bridge/sleep").json() == {"status": "sleeping"}
    assert client.get("/bridge/is_sleeping").json() == {"sleeping": True}
    assert client.post("/bridge/wake_up").json() == {"status": "awake"}
    assert client.get("/bridge/is_sleeping").json() == {"sleeping": False}


def test_debug_shows_no_secret(client, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a key nobody should see")  # pragma: allowlist secret

    answer = client.get("/bridge/debug")

    assert answer.json()["engine_type"] == "Engine"
    assert "nobody should see" not in answer.text


def test_endpoints_are_those_of_the_contract(client):
    listed = {
        (entry["path"], method)
        for entry in client.get("/bridge/list_endpoints").json()["endpoints"]
        for method in entry["methods"]
    }

    gets = ["/health", "/health_generate", "/lora/status"]
    gets += [f"/bridge/{name}" for name in ("info", "state_dict_info", "is_paused", "is_sleeping")]
    gets += ["/bridge/debug", "/bridge/list_endpoints"]
    posts = ["/generate", "/lora/load", "/lora/unload"]
    posts += [f"/bridge/{name}" for name in ("pause", "resume", "sleep", "wake_up")]
    assert listed == {*((path, "GET") for path in gets), *((path, "POST") for path in posts)}

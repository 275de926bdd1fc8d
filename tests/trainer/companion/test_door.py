"""The companion server's door."""

from __future__ import annotations

import sys

import pytest
from fastapi.testclient import TestClient

from example_trainer import vllm_api_server
from tests.trainer.companion.scripted import Engine


def test_missing_vllm_is_told_with_the_extra_that_brings_it(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # which the door would set
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(SystemExit) as ended:
        vllm_api_server.main(["--model", "some/model"])

    assert ended.value.code == 2
    assert "pip install '.[vllm]'" in capsys.readouterr().err


def test_engine_set_by_another_program_answers_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(vllm_api_server, "engine", Engine())
    client = TestClient(vllm_api_server.app)
    body = {"prompt": "hello", "max_tokens": 1, "temperature": 0.0, "logprobs": 1}

    answer = client.post("/generate", json=body)
    refused = client.post("/generate", json={**body, "max_tokns": 1})

    assert answer.status_code == 200
    assert answer.json()["text"] == [" a b"]
    assert answer.json()["prompt_token_ids"] == [1, 2]
    assert refused.status_code == 400
    assert "max_tokens" in refused.text

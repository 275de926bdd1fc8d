"""Adapters of the companion server: loaded, attached to requests, refused, unloaded."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from example_trainer.vllm_api_server import CompanionState, create_app
from tests.trainer.companion.scripted import TYPES, LoraRequest


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    folder = tmp_path / "step_3"
    folder.mkdir()
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "tiny"})
    )
    return folder


def test_loaded_adapter_is_attached_to_later_requests(client, engine, adapter):
    answer = client.post("/lora/load", json={"adapter_path": str(adapter)})
    client.post("/generate", json={"prompt": "x"})

    assert answer.json() == {
        "status": "loaded",
        "adapter_path": str(adapter),
        "adapter_name": "adapter_1",
        "adapter_id": 1,
        "load_count": 1,
        "adapter_config": {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj"],
            "base_model": "tiny",
        },
    }
    assert engine.asked[0][3] == LoraRequest("adapter_1", 1, str(adapter))


def test_second_load_takes_a_new_id_and_drops_the_first(client, engine, adapter):
    for name in ("first", "second"):
        client.post("/lora/load", json={"adapter_path": str(adapter), "adapter_name": name})

    assert client.get("/lora/status").json() == {
        "lora_available": True,
        "active_adapter_path": str(adapter),
        "active_adapter_name": "second",
        "active_adapter_id": 2,
        "load_count": 2,
        "available_adapters": [str(adapter)],
    }
    assert engine.adapters == {2: "second"}


def test_unload_leaves_the_model_alone(client, engine, adapter):
    client.post("/lora/load", json={"adapter_path": str(adapter)})

    answer = client.post("/lora/unload").json()
    client.post("/generate", json={"prompt": "x"})

    assert answer == {
        "status": "unloaded",
        "previous_adapter": str(adapter),
        "previous_name": "adapter_1",
    }
    assert engine.asked[0][3] is None
    assert client.post("/lora/unload").json()["previous_name"] is None


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("nowhere", 404, "no directory"),
        ("empty", 400, "cannot be read"),
        ("broken", 400, "rank 64"),
    ],
)
def test_adapter_that_cannot_be_loaded_leaves_the_one_in_use(
    client, adapter, tmp_path, path, status, message
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{}")
    client.post("/lora/load", json={"adapter_path": str(adapter), "adapter_name": "good"})

    answer = client.post("/lora/load", json={"adapter_path": str(tmp_path / path)})

    assert answer.status_code == status
    assert message in answer.json()["detail"]
    assert client.get("/lora/status").json()["active_adapter_name"] == "good"


@pytest.mark.parametrize("body", [{}, {"adapter_path": ""}, {"adapter_path": 3}])
def test_load_without_a_path_names_the_field(client, body):
    answer = client.post("/lora/load", json=body)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "adapter_path"]


def test_engine_without_adapters_says_how_to_get_them(engine, adapter):
    state = CompanionState(lambda: engine, lambda: TYPES)
    client = TestClient(create_app(state))

    answer = client.post("/lora/load", json={"adapter_path": str(adapter)})

    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["detail"]
    answer = client.post("/lora/load", json={"adapter_path": str(adapter / "missing")})
    assert answer.status_code == 404

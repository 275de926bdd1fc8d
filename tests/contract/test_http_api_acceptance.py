"""What programs outside assert about the service, restated: compression and messages."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.api.helpers import Service, make_group

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Service:
    service = Service()
    service.get("/reset_data")
    return service


def long_group(size: int, length: int, **extra: Any) -> dict[str, Any]:
    rows = [[0.5] * length] * size
    messages = [[{"role": "user", "content": "x" * 200}]] * size
    fields = {"advantages": rows, "ref_logprobs": rows, "messages": messages, **extra}
    return make_group(size, length=length, **fields)


def chat(*roles: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} says", **fields} for role in roles]


def short_group(**fields: Any) -> dict[str, Any]:
    return {"tokens": [[1, 2, 3]], "masks": [[1, 1, 1]], "scores": [0.5], **fields}


def test_register_post_reset_starts_over(service):
    assert "uuid" in service.register().json()
    group = {"tokens": [[0]], "masks": [[0]], "scores": [0], "ref_logprobs": [[0]]}
    assert service.post("/scored_data", json=group).status_code == 200

    assert service.get("/reset_data").status_code == 200

    assert service.get("/info").json()["batch_size"] == -1
    assert service.status() == {"current_step": 0, "queue_size": 0}
    assert service.get("/wandb_info").json() == {"group": None, "project": None}
    assert service.register().status_code == 200


@pytest.mark.parametrize(("size", "length"), [(16, 512), (32, 1024)])
def test_one_long_group_is_a_batch(service, size, length):
    service.register(batch_size=size)
    assert service.post("/scored_data", json=long_group(size, length)).status_code == 200

    batch = service.get("/batch").json()["batch"]

    assert batch[0]["tokens"] == [list(range(length))] * size


def test_streamed_compressed_batch_is_decodable(service):
    service.register(batch_size=32)
    service.post("/scored_data", json=long_group(32, 512))

    with service.stream("GET", "/batch", headers={"Accept-Encoding": "gzip"}) as reply:
        content = b"".join(reply.iter_bytes())

    assert reply.headers["content-encoding"] == "gzip"
    assert len(json.loads(content)["batch"][0]["tokens"]) == 32


def test_environment_registers_posts_and_asks_for_its_status(service):
    service.register(max_token_len=2048)
    service.get("/batch")
    answer = service.register_env(max_token_length=2048, desired_name="test_env", group_size=4)

    posted = service.push(4, env_id=answer["env_id"])

    assert answer["status"] == "success"
    assert posted[0]["status"] == "received"
    assert "queue_size" in service.status_env(answer["env_id"]).json()


def test_compressed_group_is_received_and_delivered(service):
    service.register(batch_size=8)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(long_group(8, 256)).encode())

    answer = service.post("/scored_data", content=body, headers=headers)

    assert answer.json()["status"] == "received"
    assert service.get("/batch").json()["batch"] is not None


def test_list_of_long_groups_makes_one_batch(service):
    service.register(batch_size=32)

    answer = service.post("/scored_data_list", json=[long_group(8, 512)] * 4)

    assert (answer.json()["status"], answer.json()["groups_processed"]) == ("received", 4)
    assert sum(len(group["tokens"]) for group in service.get("/batch").json()["batch"]) == 32


def test_latest_example_returns_messages_and_logprobs_exactly(service):
    service.register(batch_size=1)
    messages = [chat("system", "user", "assistant", reward=None)]
    group = short_group(
        messages=messages,
        advantages=[[0.1, 0.2, 0.3]],
        generation_params={"temperature": 0.7},
        inference_logprobs=[[-1.0, -0.7, -0.2]],
    )

    answer = service.post("/scored_data", json=group)

    latest = service.get("/latest_example").json()
    assert answer.json()["status"] == "received"
    assert latest["messages"] == messages
    assert latest["generation_params"]["temperature"] == 0.7
    assert latest["inference_logprobs"] == [[-1.0, -0.7, -0.2]]


def test_batch_keeps_submission_order_and_parameters(service):
    service.register(batch_size=2)
    messages = [chat("user", "assistant")]
    first = short_group(messages=messages, overrides=[{"temperature": 0.5}])
    second = short_group(messages=messages, generation_params={"temperature": 0.8})
    for group in (first, second):
        service.post("/scored_data", json=group)

    batch = service.get("/batch").json()["batch"]

    assert [group["messages"] for group in batch] == [messages, messages]
    assert batch[0]["overrides"] == [{"temperature": 0.5}]
    assert batch[1]["generation_params"] == {"temperature": 0.8}


def test_supervised_groups_make_a_batch(service):
    service.register(batch_size=4)
    group = {
        "tokens": [[1, 2, 3]],
        "masks": [[-100, 2, 3]],
        "scores": [1],
        "advantages": [[1, 1, 1, 1, 1]],
        "group_overrides": {"sft": True},
        "overrides": [{"sft": True}],
    }
    for _ in range(4):
        assert service.post("/scored_data", json=group).status_code == 200

    assert service.get("/status").json()["queue_size"] == 4
    batch = service.get("/batch").json()["batch"]
    assert [g["group_overrides"]["sft"] for g in batch] == [True] * 4
    assert [g["overrides"][0]["sft"] for g in batch] == [True] * 4


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": []},
        {"messages": [chat("system", "user", "assistant", "tool", "assistant")]},
        {"messages": [chat("user", "assistant", reward=1.0)]},
        {"messages": [[*chat("user"), *chat("assistant", reward=0.0)]]},
        {"messages": [chat("user", a=1, b=[None], c={"d": True}, e="", f=False)]},
        {"messages": [[{"role": "user", "content": {"nested": {"deep": [1, 2]}}}]]},
        {"messages": [[{"role": "user", "content": ["a", "b"]}]]},
        {"messages": [[{"role": "user", "content": text} for text in ("42", "", "   ")]]},
        {"messages": [[{"role": "user", "content": "y" * 10_000}]]},
        {"messages": [[{"role": "user", "content": 'é 漢字 🎉 "quoted" \\ \t\n'}]]},
        {"messages": [chat("dog", "cat", "narrator", "USER", "robot")]},
        {
            "messages": [[{"role": "user", "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ]}]],
            "images": ["AAAA"],
        },
        {"scores": [1], "advantages": [[1, 1, 1]]},
        {"advantages": [[0.5] * 9]},
    ],
)  # fmt: skip
def test_groups_as_programs_send_them_are_received(service, fields):
    service.register(batch_size=1)

    answer = service.post("/scored_data", json=short_group(**fields))

    assert (answer.status_code, answer.json()["status"]) == (200, "received")


@pytest.mark.parametrize("message", [{"content": "hi"}, {"role": "user"}])
def test_messages_without_role_or_content_are_422(service, message):
    answer = service.post("/scored_data", json=short_group(messages=[[message]]))

    assert answer.status_code == 422

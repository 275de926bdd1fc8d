"""Stop sequences are sampled and recorded, and agents do not see them."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server_handling.proxy.engine import RecordingEngine

QUESTION: dict[str, Any] = {"role": "user", "content": "Capital of Italy?"}
STOP = "Observation:"
THOUGHT = "I look it up.\nAction: search\n"


@pytest.fixture
def url(client: TestClient, engine: RecordingEngine) -> str:
    engine.replies = [f"{THOUGHT}{STOP}", f"{THOUGHT}again\n{STOP}", "Rome."]
    return f"/{client.post('/sessions/create', json={}).json()['uuid']}"


def chat(client: TestClient, url: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "stop": [STOP], **options}
    response = client.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def test_conversation_of_cut_replies_stays_one_sequence(
    client: TestClient, url: str, engine: RecordingEngine
) -> None:
    messages = [QUESTION]
    for observation in ("Rome", "Rome, 2.8 million", ""):
        messages.append(chat(client, url, messages))
        body = {"messages": messages}
        rendered = client.post(f"{url}/v1/chat/completions/render", json=body).json()
        messages.append({"role": "user", "content": observation})

    assert [m["content"] for m in messages[1::2]] == [THOUGHT, f"{THOUGHT}again\n", "Rome."]
    assert rendered["prompt_text"].count(STOP) == 2
    (node,) = client.get(f"{url}/nodes").json()["nodes"]
    assert [node["tokens"]] == engine.calls[-1].sequences
    for before, after in zip(engine.calls, engine.calls[1:], strict=False):
        assert after.prompt_ids[: len(before.sequences[0])] == before.sequences[0]


def test_reply_the_agent_changed_is_taken_as_sent(
    client: TestClient, url: str, engine: RecordingEngine
) -> None:
    chat(client, url, [QUESTION])
    changed = {"role": "assistant", "content": "I know it."}

    chat(client, url, [QUESTION, changed, QUESTION])

    assert "I know it.</s>" in engine.calls[1].options["prompt"]
    assert len(client.get(f"{url}/nodes").json()["nodes"]) == 2


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"stop": STOP}, THOUGHT),
        ({"stop": ["absent", "Action"]}, "I look it up.\n"),
        ({"stop": None}, THOUGHT + STOP),
        ({"include_stop_str_in_output": True}, THOUGHT + STOP),
    ],
)
def test_text_before_the_first_stop_is_shown(
    client: TestClient, url: str, options: dict[str, Any], shown: str
) -> None:
    assert chat(client, url, [QUESTION], **options)["content"] == shown


def test_text_prompt_that_writes_the_stop_goes_on(
    client: TestClient, url: str, engine: RecordingEngine
) -> None:
    prompt = "Question\n"
    for _ in range(2):
        body = {"prompt": prompt, "stop": STOP, "max_tokens": 100}
        text = client.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
        assert text.endswith("\n")
        prompt += f"{text}{STOP} Rome\n"

    (node,) = client.get(f"{url}/nodes").json()["nodes"]
    assert [node["tokens"]] == engine.calls[-1].sequences

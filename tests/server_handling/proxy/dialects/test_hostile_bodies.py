"""Whatever JSON arrives, it is answered or refused, and never breaks the proxy."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server_handling.proxy.dialects.conversations import values
from tests.server_handling.proxy.engine import RecordingEngine, app_of

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

RESPONSES = {
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "Look."},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "item_reference", "id": "msg_1"},
        {"role": "user", "content": "Sure?"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "add"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 50,
    "temperature": 1,
    "stop": ["END"],
    "stream": False,
    "store": True,
    "previous_response_id": None,
}
MESSAGES = {
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [], "is_error": 1}],
        },
    ],
    "tools": [{"name": "add", "description": "Sum.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["END"],
    "thread": {"type": "create"},
    "stream": False,
}
BODIES = {"responses": RESPONSES, "messages": MESSAGES}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = app_of(RecordingEngine([CALL, "<think>hm</think>Yes."]))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_in(value[key])


@st.composite
def bodies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw a good body with a few values changed, taken out, or moved elsewhere."""
    body: dict[str, Any] = copy.deepcopy(BODIES[name])
    for _ in range(draw(st.integers(1, 3))):
        places = list(places_in(body))
        container, key = draw(st.sampled_from(places))
        other, other_key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["value", "gone", "moved"]))
        if kind == "value":
            container[key] = draw(values)
        elif kind == "moved":
            container[key] = copy.deepcopy(other[other_key])
        else:
            del container[key]
    return body


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_body_is_answered_or_refused(
    name: str, client: TestClient, data: st.DataObject
) -> None:
    body = data.draw(bodies(name))
    uuid = client.post("/sessions/create", json={}).json()["uuid"]

    for path in (name, "messages/count_tokens" if name == "messages" else "responses/input_tokens"):
        answer = client.post(f"/{uuid}/v1/{path}", json=body)
        assert answer.status_code in (200, 400, 404), (answer.text, json.dumps(body))
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
    client.delete(f"/{uuid}")

"""The proxy's routes as existing users know them, without any key."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from atroposlib.envs.server_handling.managed_server_proxy import create_app
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.fakes import CharTokenizer
from tests.server_handling.proxy.engine import RecordingEngine, app_of
from tests.server_handling.tool_call_samples import HERMES_CALL, SEARCH

HELLO = {"role": "user", "content": "Hello"}


def create(client: TestClient, **body: Any) -> str:
    response = client.post("/sessions/create", json=body)
    assert response.status_code == 200, response.text
    uuid: str = response.json()["uuid"]
    return uuid


def chat(client: TestClient, uuid: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 100, **options}
    response = client.post(f"/{uuid}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids_of(text: str) -> list[int]:
    return CharTokenizer().encode(text, add_special_tokens=False)


def nodes_of(client: TestClient, uuid: str) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = client.get(f"/{uuid}/nodes").json()["nodes"]
    return nodes


def test_manager_made_without_init_serves_the_harness() -> None:
    harness = ServerHarness()
    harness.tokenizer = CharTokenizer()  # type: ignore[attr-defined]
    harness.config = type("Config", (), {"model_name": "test_model"})()
    manager: Any = object.__new__(ServerManager)
    manager.max_n_completions, manager.reasoning_config, manager.servers = 8, None, [harness]
    app = create_app(server_manager=manager, tokenizer=CharTokenizer(), model_name="test_model")
    prompt = CharTokenizer().apply_chat_template(
        [HELLO], tokenize=False, add_generation_prompt=True
    )
    prompt_ids = CharTokenizer().encode(prompt)
    harness.set_tokens_and_logprobs_response(
        prompt, prompt_ids, [[72, 105]], [[-0.1, -0.2]], ["stop"]
    )
    client = TestClient(app)

    answer = chat(client, create(client), [HELLO])

    assert app.title == "ManagedServer OpenAI Proxy"
    assert answer["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize("sem", [SimpleNamespace(_value=100), asyncio.Semaphore(1)])
def test_session_opens_at_a_server_with_a_semaphore_of_its_own(sem: Any) -> None:
    harness: Any = ServerHarness()
    harness.tokenizer = CharTokenizer()
    harness.sem = sem
    manager: Any = object.__new__(ServerManager)
    manager.servers = [harness]
    client = TestClient(create_app(manager, CharTokenizer(), "test_model"))

    assert create(client)
    assert client.get("/health").json()["sessions"] == 1


def test_health_and_models(client: TestClient) -> None:
    health = client.get("/health")
    models = client.get("/v1/models").json()

    assert health.status_code == 200
    assert health.json() == {
        "status": "ok",
        "model": "test_model",
        "sessions": 0,
        "servers": 1,
        "healthy_servers": 1,
    }
    assert models["object"] == "list"
    (card,) = models["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("test_model", "model", "atropos")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "unheard_of"])
def test_created_session_echoes_its_parser(client: TestClient, parser: str) -> None:
    default = client.post("/sessions/create", json={}).json()
    explicit = client.post("/sessions/create", json={"tool_parser": parser}).json()

    assert (default["tool_parser"], explicit["tool_parser"]) == ("hermes", parser)
    assert default["model_name"] == "test_model"
    assert default["base_url"] == "http://engine/v1"
    assert default["created_at"] > 0


def test_sessions_lists_exactly_the_open_ones(client: TestClient) -> None:
    uuids = [create(client) for _ in range(3)]

    listed = client.get("/sessions").json()["sessions"]

    assert sorted(entry["uuid"] for entry in listed) == sorted(uuids)
    assert listed[0].keys() == {
        "uuid",
        "model_name",
        "base_url",
        "created_at",
        "last_accessed",
        "num_nodes",
    }
    assert client.get("/health").json()["sessions"] == 3


def test_deleted_session_is_gone(client: TestClient) -> None:
    uuid = create(client)
    chat(client, uuid, [HELLO])

    deleted = client.delete(f"/{uuid}")

    assert (deleted.status_code, deleted.json()) == (200, {"status": "deleted", "uuid": uuid})
    gone = client.get(f"/{uuid}/nodes")
    assert gone.status_code == 404
    assert gone.json()["error"].keys() >= {"message", "type", "code"}


def test_unknown_session_is_404_everywhere(client: TestClient) -> None:
    body = {"messages": [HELLO]}

    answers = [
        client.delete("/nobody"),
        client.get("/nobody/nodes"),
        client.post("/nobody/v1/chat/completions", json=body),
        client.post("/nobody/v1/chat/completions/render", json=body),
        client.post("/nobody/v1/completions", json={"prompt": "x"}),
    ]

    assert [answer.status_code for answer in answers] == [404] * 5
    assert {answer.json()["error"]["type"] for answer in answers} == {"invalid_request_error"}


def test_chat_answers_in_openai_form(client: TestClient, engine: RecordingEngine) -> None:
    answer = chat(client, create(client), [{"role": "system", "content": "Be."}, HELLO])

    assert answer["object"] == "chat.completion"
    assert answer["model"] == "test_model"
    assert answer["id"].startswith("chatcmpl-")
    assert len(answer["id"]) == len("chatcmpl-") + 12
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "one"}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    (call,) = engine.calls
    assert answer["usage"] == {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": 4,
        "total_tokens": len(call.prompt_ids) + 4,
    }
    assert call.options["prompt"] == "[system]Be.</s>\n[user]Hello</s>\n[assistant]"
    assert (call.options["max_tokens"], call.options["temperature"]) == (100, 1.0)


def test_several_choices_are_several_nodes(client: TestClient) -> None:
    uuid = create(client)

    answer = chat(client, uuid, [HELLO], n=3)

    assert [c["message"]["content"] for c in answer["choices"]] == ["one", "two", "three"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len(nodes_of(client, uuid)) == 3


def test_empty_messages_are_refused(client: TestClient) -> None:
    response = client.post(f"/{create(client)}/v1/chat/completions", json={"messages": []})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_nodes_hold_what_the_engine_read_and_wrote(
    client: TestClient, engine: RecordingEngine
) -> None:
    uuid = create(client)
    assert nodes_of(client, uuid) == []

    chat(client, uuid, [HELLO])

    (node,) = nodes_of(client, uuid)
    (call,) = engine.calls
    num_prompt = len(call.prompt_ids)
    assert [node["tokens"]] == call.sequences
    assert node["masked_tokens"][:num_prompt] == [IGNORE_INDEX] * num_prompt
    assert node["masked_tokens"][num_prompt:] == call.completion_ids[0]
    assert node["logprobs"][:num_prompt] == [MASKED_LOGPROB] * num_prompt
    assert all(value < 0 for value in node["logprobs"][num_prompt:])
    assert node["full_text"].endswith("[assistant]one")


def test_five_turns_are_one_node(client: TestClient, engine: RecordingEngine) -> None:
    uuid = create(client)
    messages: list[dict[str, Any]] = []

    for turn in range(5):
        messages.append({"role": "user", "content": f"turn {turn}"})
        messages.append(chat(client, uuid, messages)["choices"][0]["message"])

    (node,) = nodes_of(client, uuid)
    assert [node["tokens"]] == engine.calls[-1].sequences
    sampled = [t for call in engine.calls for t in call.completion_ids[0]]
    assert [t for t in node["masked_tokens"] if t != IGNORE_INDEX] == sampled


def test_render_shows_the_prompt_and_records_nothing(
    client: TestClient, engine: RecordingEngine
) -> None:
    uuid = create(client)
    body = {"messages": [HELLO], "tools": [SEARCH]}

    response = client.post(f"/{uuid}/v1/chat/completions/render", json=body)

    rendered = response.json()
    assert response.status_code == 200
    assert "[user]Hello" in rendered["prompt_text"]
    assert rendered["prompt_text"].startswith("[tools]1</s>")
    assert rendered["prompt_text"].endswith("[assistant]")
    assert rendered["num_tokens"] == len(rendered["token_ids"])
    assert rendered["token_ids"] == ids_of(rendered["prompt_text"])
    assert nodes_of(client, uuid) == engine.calls == []


def test_render_shows_the_begun_reply_that_is_sent(
    client: TestClient, engine: RecordingEngine
) -> None:
    uuid = create(client)
    body = {"messages": [HELLO, {"role": "assistant", "content": "Hi"}]}

    rendered = client.post(f"/{uuid}/v1/chat/completions/render", json=body).json()
    chat(client, uuid, body["messages"])

    assert rendered["prompt_text"].endswith("[user]Hello</s>\n[assistant]Hi")
    assert engine.calls[0].options["prompt"] == rendered["prompt_text"]


def test_render_shows_the_ids_of_the_text_in_later_turns_too(client: TestClient) -> None:
    uuid = create(client)
    reply = chat(client, uuid, [HELLO])["choices"][0]["message"]

    body = {"messages": [HELLO, reply, HELLO]}
    rendered = client.post(f"/{uuid}/v1/chat/completions/render", json=body).json()

    assert rendered["token_ids"] == ids_of(rendered["prompt_text"])


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tool_calls_are_structured(choice: Any) -> None:
    with TestClient(app_of(RecordingEngine([HERMES_CALL]))) as client:
        uuid = create(client)

        answer = chat(client, uuid, [HELLO], tools=[SEARCH], **choice)

        (got,) = answer["choices"]
        (call,) = got["message"]["tool_calls"]
        assert got["finish_reason"] == "tool_calls"
        assert (call["type"], call["function"]["name"]) == ("function", "search")
        assert json.loads(call["function"]["arguments"]) == {"query": "cats"}
        (node,) = nodes_of(client, uuid)
        assert node["full_text"].endswith(HERMES_CALL)


def test_tool_choice_none_leaves_the_text() -> None:
    with TestClient(app_of(RecordingEngine([HERMES_CALL]))) as client:
        answer = chat(client, create(client), [HELLO], tools=[SEARCH], tool_choice="none")

    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": HERMES_CALL}


def test_twelve_messages_with_tools_stay_one_node() -> None:
    engine = RecordingEngine([HERMES_CALL, "It is a cat."])
    messages: list[dict[str, Any]] = []
    with TestClient(app_of(engine)) as client:
        uuid = create(client)
        for _ in range(3):
            messages.append({"role": "user", "content": "find cats"})
            for _ in range(2):
                body = {"messages": messages, "tools": [SEARCH]}
                rendered = client.post(f"/{uuid}/v1/chat/completions/render", json=body).json()
                message = chat(client, uuid, messages, tools=[SEARCH])["choices"][0]["message"]
                assert engine.calls[-1].options["prompt"] == rendered["prompt_text"]
                messages.append(message)
                for call in message.get("tool_calls", ()):
                    result = {"role": "tool", "tool_call_id": call["id"], "content": "a cat"}
                    messages.append(result)
                (node,) = nodes_of(client, uuid)
                assert [node["tokens"]] == engine.calls[-1].sequences
                lengths = {len(node[k]) for k in ("tokens", "masked_tokens", "logprobs")}
                assert len(lengths) == 1

    assert len(messages) == 12

"""Keys, expiry and limits: who may use which session, and for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from atroposlib.envs.server_handling.proxy.app import AgentProxy
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from tests.server_handling.proxy.engine import Clock, RecordingEngine, app_of, manager_of

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ADMIN = "the administrator's"


@pytest.fixture
def locked(engine: RecordingEngine) -> Iterator[TestClient]:
    """A proxy that asks for keys everywhere."""
    with TestClient(app_of(engine, require_keys=True, admin_key=ADMIN)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def create(client: TestClient, key: str = ADMIN, **body: Any) -> dict[str, Any]:
    response = client.post("/sessions/create", json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    created: dict[str, Any] = response.json()
    return created


def session_requests(client: TestClient, uuid: str, headers: dict[str, str]) -> list[int]:
    """The statuses of every route of a session, deletion last."""
    return [
        client.post(f"/{uuid}/v1/chat/completions", json=CHAT, headers=headers).status_code,
        client.post(f"/{uuid}/v1/chat/completions/render", json=CHAT, headers=headers).status_code,
        client.post(f"/{uuid}/v1/completions", json={"prompt": "x"}, headers=headers).status_code,
        client.get(f"/{uuid}/v1/models", headers=headers).status_code,
        client.get(f"/{uuid}/nodes", headers=headers).status_code,
        client.delete(f"/{uuid}", headers=headers).status_code,
    ]


def test_own_key_opens_every_route_of_the_session(locked: TestClient) -> None:
    mine = create(locked)

    assert session_requests(locked, mine["uuid"], bearer(mine["api_key"])) == [200] * 6


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_key_alone_finds_the_session(locked: TestClient, header: str) -> None:
    mine, other = create(locked), create(locked)
    value = f"Bearer {mine['api_key']}" if header == "Authorization" else mine["api_key"]

    answer = locked.post("/v1/chat/completions", json=CHAT, headers={header: value})

    assert answer.status_code == 200
    counts = [
        len(locked.get(f"/{s['uuid']}/nodes", headers=bearer(s["api_key"])).json()["nodes"])
        for s in (mine, other)
    ]
    assert counts == [1, 0]


def test_no_key_and_wrong_keys_open_nothing(locked: TestClient) -> None:
    mine, other = create(locked), create(locked)

    for headers in ({}, bearer("x"), bearer(other["api_key"]), {"Authorization": "Basic eDp4"}):
        assert session_requests(locked, mine["uuid"], headers) == [401] * 6
    assert locked.post("/v1/chat/completions", json=CHAT).status_code == 401
    assert locked.get("/v1/models").status_code == 401
    assert locked.get("/v1/models", headers=bearer(mine["api_key"])).status_code == 200


def test_management_asks_for_the_administrators_key(locked: TestClient) -> None:
    mine = create(locked)

    for headers in ({}, bearer(mine["api_key"])):
        assert locked.post("/sessions/create", json={}, headers=headers).status_code == 401
        assert locked.get("/sessions", headers=headers).status_code == 401
        assert locked.get("/servers", headers=headers).status_code == 401
        assert locked.post("/setup", json={}, headers=headers).status_code == 401
    assert locked.get("/health").status_code == 200
    listed = locked.get("/sessions", headers=bearer(ADMIN))
    assert [entry["uuid"] for entry in listed.json()["sessions"]] == [mine["uuid"]]
    assert mine["api_key"] not in listed.text


def test_without_required_keys_another_sessions_key_is_still_refused(client: TestClient) -> None:
    mine, other = create(client), create(client)

    assert session_requests(client, mine["uuid"], bearer(other["api_key"])) == [401] * 6
    assert session_requests(client, mine["uuid"], bearer("anything")) == [200] * 6
    assert session_requests(client, other["uuid"], {}) == [200] * 6


def test_deleted_sessions_key_is_worthless(locked: TestClient) -> None:
    mine = create(locked)
    locked.delete(f"/{mine['uuid']}", headers=bearer(mine["api_key"]))

    answer = locked.post("/v1/chat/completions", json=CHAT, headers=bearer(mine["api_key"]))

    assert answer.status_code == 401


def test_idle_session_expires_and_use_keeps_it(engine: RecordingEngine) -> None:
    clock = Clock()
    with TestClient(app_of(engine, clock=clock, session_idle_s=60)) as client:
        used, idle = create(client), create(client)
        clock.now += 59
        assert client.get(f"/{used['uuid']}/nodes").status_code == 200
        clock.now += 59
        assert client.get(f"/{idle['uuid']}/nodes").status_code == 404
        assert client.get(f"/{used['uuid']}/nodes").status_code == 200
        clock.now += 60
        keyed = client.post("/v1/chat/completions", json=CHAT, headers=bearer(used["api_key"]))
        assert keyed.status_code == 401
        assert client.get("/health").json()["sessions"] == 0


def test_listing_is_no_use_of_a_session(engine: RecordingEngine) -> None:
    clock = Clock()
    with TestClient(app_of(engine, clock=clock, session_idle_s=60)) as client:
        created = create(client)
        clock.now += 40
        (entry,) = client.get("/sessions").json()["sessions"]
        clock.now += 40

        assert entry["last_accessed"] == created["created_at"]
        assert client.get("/sessions").json() == {"sessions": []}


def test_sessions_are_limited_until_one_is_gone(engine: RecordingEngine) -> None:
    clock = Clock()
    with TestClient(app_of(engine, clock=clock, session_idle_s=60, max_sessions=2)) as client:
        first = create(client)
        create(client)
        refused = client.post("/sessions/create", json={})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_sessions"
        assert int(refused.headers["Retry-After"]) > 0
        client.delete(f"/{first['uuid']}")
        create(client)
        clock.now += 61
        create(client)
        create(client)


def test_parts_of_one_agent_leave_room_for_the_sessions_of_others(engine: RecordingEngine) -> None:
    with TestClient(app_of(engine, max_sessions=16)) as client:
        agent = create(client)

        def ask(part: int) -> int:
            headers = {**bearer(agent["api_key"]), "X-Session-ID": str(part)}
            return client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code

        assert [ask(part) for part in range(16)] == [200] * 14 + [429] * 2
        create(client)
        assert client.post("/sessions/create", json={}).status_code == 429
        assert ask(0) == 200


async def test_bodies_of_one_agent_have_a_limit_together(engine: RecordingEngine) -> None:
    """Clients that never end their bodies would fill the memory of the environment."""
    settings = ProxySettings(max_body_bytes=1000)
    async with (
        AgentProxy(manager_of(engine), engine.tokenizer, settings=settings) as proxy,
        proxy.session() as session,
        proxy.session() as other,
        httpx.AsyncClient(base_url=proxy.root_url) as client,
    ):

        async def ask(key: str) -> httpx.Response:
            return await client.post("/v1/chat/completions", json=CHAT, headers=bearer(key))

        async def send_without_end() -> asyncio.StreamWriter:
            address = urlsplit(proxy.root_url)
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            head += f"Authorization: Bearer {session.api_key}\r\nContent-Length: 1000\r\n\r\n"
            writer.write(head.encode() + b" " * 999)
            await writer.drain()
            return writer

        writers = [await send_without_end() for _ in range(8)]
        while (refused := await ask(session.api_key)).status_code == 200:  # noqa: ASYNC110 - a server
            await asyncio.sleep(0.01)  # the bodies have not arrived yet
        of_other = await ask(other.api_key)
        for writer in writers:
            writer.close()
        while (answered := await ask(session.api_key)).status_code == 429:  # noqa: ASYNC110 - a server
            await asyncio.sleep(0.01)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_bodies")
    assert (of_other.status_code, answered.status_code) == (200, 200)


def test_keys_appear_nowhere_but_in_the_answer_to_the_creator(
    locked: TestClient, engine: RecordingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    mine = create(locked)
    engine.error = RuntimeError("boom")

    failed = locked.post("/v1/chat/completions", json=CHAT, headers=bearer(mine["api_key"]))
    nodes = locked.get(f"/{mine['uuid']}/nodes", headers=bearer(ADMIN))

    assert failed.status_code == 500
    assert "boom" in caplog.text
    for text in (caplog.text, failed.text, nodes.text, locked.get("/openapi.json").text):
        assert mine["api_key"] not in text
        assert ADMIN not in text


def test_session_goes_to_the_server_it_names_or_the_least_loaded() -> None:
    first = RecordingEngine(base_url="http://first/v1")
    second = RecordingEngine(base_url="http://second/v1")
    first.sem._value = 2
    with TestClient(app_of(first, second)) as client:
        named = create(client, base_url="http://first/v1/")
        free = create(client)
        second.server_healthy = False
        healthy = create(client)
        unknown = client.post("/sessions/create", json={"base_url": "http://third/v1"})

    assert named["base_url"] == healthy["base_url"] == "http://first/v1"
    assert free["base_url"] == "http://second/v1"
    assert unknown.status_code == 404
    assert "http://first/v1, http://second/v1" in unknown.json()["error"]["message"]

"""A proxy in front of a recording engine, in process and on a port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from fastapi.testclient import TestClient

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from tests.server_handling.proxy.engine import RecordingEngine, app_of, manager_of


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def client(engine: RecordingEngine) -> Iterator[TestClient]:
    """The proxy without keys, as the contract has it."""
    with TestClient(app_of(engine)) as client:
        yield client


@pytest.fixture
async def proxy(engine: RecordingEngine) -> AsyncIterator[AgentProxy]:
    """The proxy on a port, with keys."""
    async with AgentProxy(manager_of(engine), engine.tokenizer, model_name="test_model") as running:
        yield running


@pytest.fixture
async def agent(proxy: AgentProxy) -> AsyncIterator[AgentSession]:
    async with proxy.session() as session:
        yield session

"""Servers in front of a scripted engine, with waits short enough for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.openai_compatible import OpenAICompatibleServer, TokenServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from tests.fakes import CharTokenizer, ScriptedEngine

MakeServer = Callable[..., OpenAICompatibleServer]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(["one", "two", "three"]) as running:
        yield running


@pytest.fixture
async def make_server() -> AsyncIterator[MakeServer]:
    """Build servers that wait milliseconds where real ones wait seconds, and close them."""
    made: list[OpenAICompatibleServer] = []

    def make(
        engine: ScriptedEngine, kind: type[OpenAICompatibleServer] = OpenAIServer, **settings: Any
    ) -> OpenAICompatibleServer:
        config = APIServerConfig(base_url=engine.base_url, model_name="scripted", **settings)
        server = kind(config)
        server.health_poll_s = 0.01
        server.max_backoff_s = 0.01
        if isinstance(server, TokenServer):
            server.tokenizer = CharTokenizer()
        made.append(server)
        return server

    yield make
    for server in made:
        await server.close()

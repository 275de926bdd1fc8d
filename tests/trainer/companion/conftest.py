"""The scripted engine and a client of the routes over it."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tests.trainer.companion.scripted import Engine, serve


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def client(engine: Engine) -> TestClient:
    return serve(engine)

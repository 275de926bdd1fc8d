"""Options, markers and fixtures shared by every test."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer

OPTIONS = (("providers", "--runproviders"), ("gpu", "--run-gpu"), ("long", "--run-long"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runproviders", action="store_true", help="run tests that need a paid API")
    parser.addoption("--run-gpu", action="store_true", help="run tests that need a GPU")
    parser.addoption("--run-long", action="store_true", help="run tests that take minutes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, option in OPTIONS:
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"needs {option}")
        for item in items:
            if marker in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis that loses everything when it ends; tests tell their runs apart by name."""
    server = RedisServer()
    server.start()
    yield server
    server.close()

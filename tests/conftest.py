"""Options, markers and fixtures shared by every test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer

OPTIONS = (
    ("providers", "--runproviders"),
    ("gpu", "--run-gpu"),
    ("long", "--run-long"),
    ("clients", "--run-clients"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runproviders", action="store_true", help="run tests that need a paid API")
    parser.addoption("--run-gpu", action="store_true", help="run tests that need a GPU")
    parser.addoption("--run-long", action="store_true", help="run tests that take minutes each")
    parser.addoption("--run-clients", action="store_true", help="run third-party programs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, option in OPTIONS:
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"needs {option}")
        for item in items:
            if item.get_closest_marker(marker) is not None:  # keywords hold names of folders too
                item.add_marker(skip)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Weights & Biases records offline; it reads its settings once a process."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # forgets what an earlier test set
    yield tmp_path
    wandb.teardown()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis that loses everything when it ends; tests tell their runs apart by name."""
    server = RedisServer()
    server.start()
    yield server
    server.close()

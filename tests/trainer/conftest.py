"""Fixtures of the trainer's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.envs.live_service import LiveService

FAKE_ENGINE = Path(__file__).with_name("fake_engine")


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets child processes, and a check that vLLM is installed, find the stand-in engine."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(FAKE_ENGINE), *([inherited] if inherited else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(sys, "path", [*sys.path, str(FAKE_ENGINE)])
    return FAKE_ENGINE


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    """A running trajectory service."""
    live = LiveService(free_port)
    live.start()
    yield live
    live.stop()

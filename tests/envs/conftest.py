"""Fixtures for tests of the base environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import base
from tests.envs.live_service import LiveService
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.fakes import CharTokenizer


class CharTokenizers:
    """Stands in for `AutoTokenizer`."""

    @staticmethod
    def from_pretrained(name: str) -> CharTokenizer:
        return CharTokenizer()


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    """The service, not started yet."""
    live = LiveService(free_port)
    yield live
    live.stop()


@pytest.fixture
def make_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Build an environment with a character tokenizer in an empty folder."""
    monkeypatch.setitem(vars(base), "AutoTokenizer", CharTokenizers)
    monkeypatch.chdir(tmp_path)

    def make(env_cls: type[Any] = SmallEnv, **settings: Any) -> Any:
        return env_cls(small_config(**settings), SERVERS)

    return make

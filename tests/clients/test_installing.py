"""Where an environment cannot be made there is one line that says why, and no half-made folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.installing import NotInstallableError, python_of


@pytest.fixture
def clients_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "clients"
    monkeypatch.setenv("ATROPOS_CLIENTS_DIR", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_registry_that_cannot_be_reached_is_named_and_tried_again_next_time(
    clients_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    for _ in range(2):
        with pytest.raises(NotInstallableError, match=r"`uv pip install` failed: .*Connect"):
            python_of("anthropic", limit_s=120)

    assert not list(clients_dir.glob("*/.complete"))


def test_installation_that_takes_too_long_says_so(clients_dir: Path) -> None:
    with pytest.raises(NotInstallableError, match=r"`uv venv .*` took more than 0\.001 s"):
        python_of("anthropic", limit_s=0.001)

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from atroposlib.api.store.base import WatchedStore
from atroposlib.api.store.open import open_store
from tests.api.store.stores import MakeStore


@pytest.fixture(params=["memory", "watched", "sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return what makes a store of one run, the same run each time; one is open at a time."""
    if request.param == "memory":
        store = open_store("memory", data_dir=tmp_path, run_name="run")
        return lambda: store
    if request.param == "watched":
        watched = WatchedStore(open_store("memory", data_dir=tmp_path, run_name="run"))
        return lambda: watched
    url = "sqlite"
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    run_name = uuid.uuid4().hex
    return lambda: open_store(url, data_dir=tmp_path, run_name=run_name)

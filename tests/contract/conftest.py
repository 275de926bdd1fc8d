"""The contract of the service holds on every store: its tests run once per store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.helpers import Service, StoreOfServices
from tests.envs.conftest import make_env, service

__all__ = ["make_env", "service"]  # fixtures that tests of environments share

STORES = ("memory", "sqlite", "redis")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_contract = metafunc.module.__name__.rpartition(".")[2].startswith("test_http_api_")
    # What the fuzz tests share is made before a store is chosen: it lives in memory.
    if is_contract and "service" in metafunc.fixturenames:
        # The tables of refused and accepted bodies never get as far as the store.
        is_table = metafunc.definition.get_closest_marker("parametrize") is not None
        marks = [pytest.mark.long] if is_table else []
        stores = [
            pytest.param(STORES[0]),
            *(pytest.param(name, marks=marks) for name in STORES[1:]),
        ]
        metafunc.parametrize("store_of_services", stores, indirect=True, scope="function")


@pytest.fixture(autouse=True)
def store_of_services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Where the services of this test keep their runs."""
    kind = getattr(request, "param", "memory")
    if kind == "memory":
        yield
        return
    url = request.getfixturevalue("redis_server").url if kind == "redis" else kind
    with StoreOfServices(url, tmp_path) as Service.home:
        yield
    Service.home = None

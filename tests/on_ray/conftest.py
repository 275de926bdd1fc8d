"""A real Ray of several nodes on this machine, started once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_ray.demo import local_ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with one node, to which this process is connected."""
    pytest.importorskip("ray")
    with local_ray() as cluster:
        yield cluster

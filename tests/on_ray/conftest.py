"""A real Ray of several nodes on this machine, started once for the tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # idle workers cost a second of CPU each
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other tests of this machine use its memory too
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with one node, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # The default of pytest is too long for the path of a socket.
    folder = tempfile.mkdtemp(prefix="ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            cluster.add_node(include_dashboard=False, temp_dir=folder, **NODE)
            patch.setenv("RAY_ADDRESS", cluster.address)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

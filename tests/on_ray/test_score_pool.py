from __future__ import annotations

import os
import time
from typing import Any

import pytest

from atroposlib.utils.score_pool import ScorePool

pytestmark = pytest.mark.slow


def double(number: int) -> int:
    return 2 * number


def refuse(number: int) -> int:
    raise ValueError(f"no {number}")


def die() -> int:
    os._exit(1)


def node_of_worker() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


async def test_pool_on_ray_ends_and_replaces_workers(ray_cluster: Any) -> None:
    pool = ScorePool(num_workers=1, backend="RAY")

    results = [
        # Less time than a worker takes to start: the limit counts from the start of the call.
        await pool.run(double, 2, timeout=1.0),
        await pool.run(time.sleep, 600, timeout=0.5, default=None),
        await pool.run(die, timeout=60, default=-1),
        await pool.run(double, 4),
    ]
    with pytest.raises(ValueError, match="no 3"):
        await pool.run(refuse, 3)
    pool.close()

    assert results == [4, None, -1, 8]
    assert pool.counts == {"calls": 5, "timeouts": 1, "crashes": 1, "errors": 1}

"""Two trainer nodes under torchrun on a real Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from example_trainer.cluster.ray_cluster import RayRun
from example_trainer.cluster.run_file import read_run_file
from tests.cluster.demo_run import steps_of
from tests.cluster.scripted_run import losses_of, losses_of_one_node, scripted_run
from tests.on_ray.demo import worker_pid
from tests.on_ray.test_runs import part_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_two_trainer_nodes_take_the_steps_of_one_although_one_is_killed(
    ray_cluster: Any, tmp_path: Path
) -> None:
    steps = 8
    file = scripted_run(
        tmp_path,
        steps=steps,
        environments={"flags": {"groups": steps, "every-s": 1.0}},
        trainer={"nodes": 2},
    )
    run = read_run_file(file)
    placement = RayRun(run, file)

    placement.submit()
    wait_for(lambda: len(steps_of(run.output)) >= 3, placement)
    os.kill(worker_pid("scripted.trainer-node-1"), signal.SIGKILL)
    wait_for(lambda: placement.status().state == "finished", placement)

    status = placement.status()
    placement.down()
    assert part_of(status, "trainer").restarts >= 1
    assert steps_of(run.output) == list(range(1, steps + 1))
    expected = losses_of_one_node(tmp_path / "alone", steps=steps)
    assert losses_of(run.output) == pytest.approx(expected, rel=1e-4, abs=1e-6)

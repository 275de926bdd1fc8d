"""The task of the demo on a real Ray, parts killed on the way; it is scored on Ray too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from example_trainer.cluster.ray_cluster import RayRun
from example_trainer.cluster.run_file import read_run_file
from example_trainer.demo.settings import settings_for
from tests.cluster.demo_run import demo_run, make_demo_student, steps_of
from tests.on_ray.test_runs import wait_for, worker_pid

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 8
SETTINGS = settings_for("quick", steps=STEPS, engine="torch")


def test_demo_on_ray_trains_each_step_once_although_parts_are_killed(
    ray_cluster: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_demo_student(model, SETTINGS)
    file = demo_run(tmp_path, model, steps=STEPS, settings=SETTINGS)
    run = read_run_file(file)
    scoring = {"score_backend": "RAY", "num_score_workers": 1}
    run.environments[0].settings["env"].update(scoring)
    placement = RayRun(run, file)

    placement.submit()
    for step, part in ((2, "service"), (4, "engine-0"), (5, "trainer"), (6, "environment-sums")):
        wait_for(lambda step=step: (steps_of(run.output) or [0])[-1] >= step, placement)
        os.kill(worker_pid(f"demo.{part}"), signal.SIGKILL)
    wait_for(lambda: placement.status().state == "finished", placement)

    status = placement.status()
    placement.down()
    assert steps_of(run.output) == list(range(1, STEPS + 1))
    assert all(part.restarts >= 1 for part in status.parts)
    assert (run.output / "trainer" / "final_model" / "model.safetensors").exists()

"""The task of the demo on a real Ray, an actor of each kind killed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from example_trainer.demo.settings import settings_for
from tests.cluster.demo_run import make_demo_student
from tests.on_ray.demo import train_on_ray

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 20
SETTINGS = settings_for("quick", steps=STEPS, engine="torch")


def test_demo_on_ray_trains_each_step_once_although_parts_are_killed(
    ray_cluster: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_demo_student(model, SETTINGS)

    done = train_on_ray(tmp_path, model, steps=STEPS, settings=SETTINGS, say=print)

    assert done.status.state == "finished"
    assert done.steps == list(range(1, STEPS + 1))
    assert all(part.restarts >= 1 for part in done.status.parts)
    assert (done.final_model / "model.safetensors").exists()

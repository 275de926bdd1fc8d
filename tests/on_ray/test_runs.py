"""Runs on a real Ray whose programs are stand-ins: placement, restarts, ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from example_trainer.cluster.placement import PartStatus, RunStatus
from example_trainer.cluster.ray_cluster import RayPlacement
from tests.on_ray.stand_ins import stand_in_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 90.0


def wait_for(is_so: Callable[[], Any], placement: RayPlacement) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, placement.status()
        time.sleep(0.1)
    return found


def part_of(status: RunStatus, name: str) -> PartStatus:
    return next(part for part in status.parts if part.name == name)


def all_run(placement: RayPlacement) -> bool:
    return all(part.state == "running" for part in placement.status().parts)


def has_restarted(placement: RayPlacement, name: str, times: int = 1) -> bool:
    part = part_of(placement.status(), name)
    return part.state == "running" and part.restarts == times


def started_pids(placement: RayPlacement, part: str) -> list[int]:
    lines = [line.split() for line in placement.logs(part, lines=100)]
    return [int(words[2]) for words in lines if words[1:2] == ["started"]]


def worker_pid(name: str) -> int:
    from ray.util.state import list_actors

    [found] = [actor for actor in list_actors(detail=True) if actor.name == name]
    return int(found.pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_run_survives_the_death_of_each_of_its_processes(ray_cluster: Any, tmp_path: Path) -> None:
    placement = RayPlacement(stand_in_run(tmp_path, "deaths"))
    placement.submit()
    wait_for(lambda: all_run(placement), placement)

    # The worker process of a host: its program ends, and is started again.
    [first] = started_pids(placement, "environment-environment")
    os.kill(worker_pid("deaths.environment-environment"), signal.SIGKILL)
    wait_for(lambda: has_restarted(placement, "environment-environment"), placement)
    assert not is_alive(first)
    # The program itself.
    [trainer] = started_pids(placement, "trainer")
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: has_restarted(placement, "trainer"), placement)
    # The supervisor: another one continues with the programs that run.
    os.kill(worker_pid("deaths.supervisor"), signal.SIGKILL)
    wait_for(lambda: all_run(placement), placement)
    assert len(started_pids(placement, "trainer")) == 2

    (tmp_path / "trainer.exit").write_text("0")
    wait_for(lambda: placement.status().state == "finished", placement)
    placement.down()
    assert placement.status().state == "finished"

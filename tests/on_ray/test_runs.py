"""Runs on a real Ray whose programs are stand-ins: placement, restarts, ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from atroposlib.errors import ConfigError
from example_trainer.cluster.placement import PartStatus, RunStatus
from example_trainer.cluster.ray_cluster import RayRun
from tests.on_ray.demo import NODE, worker_pid
from tests.on_ray.stand_ins import stand_in_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 400.0
ENVIRONMENT = "environment-environment"


def wait_for(is_so: Callable[[], Any], placement: RayRun) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, placement.status()
        time.sleep(0.1)
    return found


def part_of(status: RunStatus, name: str) -> PartStatus:
    return next(part for part in status.parts if part.name == name)


def all_run(placement: RayRun) -> bool:
    return all(part.state == "running" for part in placement.status().parts)


def has_restarted(placement: RayRun, name: str, times: int = 1) -> bool:
    part = part_of(placement.status(), name)
    return part.state == "running" and part.restarts == times


def started_pids(placement: RayRun, part: str, *, count: int) -> list[int]:
    """The process ids of a part's starts, of which there are `count`."""

    def found() -> list[int]:
        lines = [line.split() for line in placement.logs(part, lines=100)]
        return [int(words[2]) for words in lines if words[1:2] == ["started"]]

    wait_for(lambda: len(found()) == count, placement)
    return found()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def submitted(folder: Path, name: str, **sections: Any) -> RayRun:
    placement = RayRun(stand_in_run(folder, name, **sections), folder / "run.yaml")
    placement.submit()
    wait_for(lambda: all_run(placement), placement)
    return placement


def test_run_survives_the_death_of_each_of_its_processes(ray_cluster: Any, tmp_path: Path) -> None:
    placement = submitted(tmp_path, "deaths")

    # The worker process of a host: its program ends, and is started again.
    [first] = started_pids(placement, ENVIRONMENT, count=1)
    os.kill(worker_pid(f"deaths.{ENVIRONMENT}"), signal.SIGKILL)
    wait_for(lambda: has_restarted(placement, ENVIRONMENT), placement)
    assert not is_alive(first)
    # The program itself.
    [trainer] = started_pids(placement, "trainer", count=1)
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: has_restarted(placement, "trainer"), placement)
    # The supervisor: another one continues with the programs that run.
    os.kill(worker_pid("deaths.supervisor"), signal.SIGKILL)
    wait_for(lambda: all_run(placement), placement)
    _, running = started_pids(placement, "trainer", count=2)
    assert is_alive(running)

    (tmp_path / "trainer.exit").write_text("0")
    wait_for(lambda: placement.status().state == "finished", placement)
    assert not is_alive(started_pids(placement, ENVIRONMENT, count=2)[-1])
    placement.down()
    after = placement.status()
    assert (after.state, part_of(after, ENVIRONMENT).restarts) == ("finished", 1)


def test_run_that_has_ended_stays_so_if_its_supervisor_is_restarted(
    ray_cluster: Any, tmp_path: Path
) -> None:
    placement = submitted(tmp_path, "ended")
    (tmp_path / "trainer.exit").write_text("2")
    wait_for(lambda: placement.status().state == "failed", placement)
    before = placement.status()

    os.kill(worker_pid("ended.supervisor"), signal.SIGKILL)

    assert placement.status() == before
    started_pids(placement, "trainer", count=1)
    assert placement.down() == "run ended: ended 1 actors"
    assert placement.status() == before


@pytest.mark.long
def test_down_ends_only_what_this_run_started(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = submitted(tmp_path / "other", "run-2")
    placement = submitted(tmp_path, "run")
    pids = started_pids(placement, "trainer", count=1)

    with pytest.raises(
        ConfigError, match=r"run run is on this cluster already; .* down .*run\.yaml"
    ):
        placement.submit()
    placement.down()

    assert not is_alive(pids[0])
    assert placement.status().state == "stopped"
    assert all_run(other)
    other.down()
    assert placement.down() == "run run: ended 0 actors"


@pytest.mark.long
def test_invalid_settings_end_the_run_and_are_not_tried_again(
    ray_cluster: Any, tmp_path: Path
) -> None:
    placement = submitted(tmp_path, "invalid")

    (tmp_path / "environment.exit").write_text("2")
    wait_for(lambda: placement.status().state == "failed", placement)

    status = placement.status()
    assert "exit code 2" in status.detail
    assert part_of(status, ENVIRONMENT).restarts == 0
    started_pids(placement, ENVIRONMENT, count=1)
    placement.down()


@pytest.mark.long
def test_attempts_run_out(ray_cluster: Any, tmp_path: Path) -> None:
    few = {"attempts": 2, "first_backoff_s": 0.1}
    placement = submitted(tmp_path, "attempts", restarts=few)

    (tmp_path / "trainer.exit").write_text("1")
    wait_for(lambda: placement.status().state == "failed", placement)

    assert part_of(placement.status(), "trainer").restarts == 2
    started_pids(placement, "trainer", count=3)
    placement.down()


@pytest.mark.long
def test_run_goes_on_on_another_node_when_its_own_is_removed(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """The service gets another address, which the other parts are started with."""
    node = ray_cluster.add_node(node_ip_address="127.0.0.3", resources={"site": 1}, **NODE)
    section = {"namespace": "moving", "resources": {"site": 0.1}}
    placement = submitted(tmp_path, "moving", ray=section)
    wait_for(lambda: "http://127.0.0.3:" in last_line(placement), placement)
    ray_cluster.add_node(node_ip_address="127.0.0.4", resources={"site": 1}, **NODE)

    ray_cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: moved(placement), placement)

    wait_for(lambda: "http://127.0.0.4:" in last_line(placement), placement)
    (tmp_path / "trainer.exit").write_text("0")
    wait_for(lambda: placement.status().state == "finished", placement)
    placement.down()


def last_line(placement: RayRun) -> str:
    """The last line that the trainer wrote: its command."""
    return "".join(list(placement.logs("trainer", lines=1)))


def moved(placement: RayRun) -> bool:
    """Whether all parts run on the second node; the supervisor may have moved too."""
    parts = placement.status().parts
    return all((part.state, part.detail) == ("running", "127.0.0.4") for part in parts)


@pytest.mark.long
def test_many_restarts_leave_descriptors_and_memory_as_they_were(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Of the supervisor, and of the host of the part that fails again and again."""
    often = {"attempts": 1000, "first_backoff_s": 0, "longest_backoff_s": 0}
    placement = submitted(tmp_path, "often", restarts=often)
    processes = [psutil.Process(worker_pid(f"often.{name}")) for name in ("supervisor", "trainer")]

    (tmp_path / "trainer.exit").write_text("1")
    sizes = []
    for restarts in (10, 50):
        wait_for(lambda n=restarts: part_of(placement.status(), "trainer").restarts >= n, placement)
        sizes.append([(each.num_fds(), each.memory_info().rss / 2**20) for each in processes])
    placement.down()

    print("descriptors and MiB of supervisor and host after 10 and 50 restarts:", sizes)
    for (fds, mib), (later_fds, later_mib) in zip(*sizes, strict=True):
        assert later_fds <= fds + 2
        assert later_mib <= mib + 10


def test_render_shows_every_actor_and_needs_no_cluster(tmp_path: Path) -> None:
    run = stand_in_run(
        tmp_path,
        "shown",
        engines=[{"kind": "vllm", "tensor_parallel": 2, "memory_gib": 16, "count": 2}],
        trainer={"model": "tiny", "steps": 1, "nodes": 2, "gpus": 8},
        service={"tokens": {"trainer": "TRAINER_TOKEN"}, "port": 8100},
        ray={"namespace": "lab", "resources": {"site": 1}},
    )

    files = RayRun(run, tmp_path / "run.yaml").render()

    content = yaml.safe_load(files["ray.yaml"])
    actors = {actor["options"]["name"]: actor for actor in content["actors"]}
    assert list(actors) == [
        "shown.service",
        "shown.engine-0",
        "shown.engine-1",
        "shown.environment-environment",
        "shown.trainer",
        "shown.trainer-node-1",
    ]
    assert actors["shown.engine-1"]["options"] == {
        "name": "shown.engine-1",
        "namespace": "lab",
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "num_gpus": 2,
        "memory": 16 * 2**30,
        "resources": {"site": 1},
    }
    trainer = actors["shown.trainer"]
    assert trainer["secrets"] == {"ATROPOS_API_TOKEN": "TRAINER_TOKEN"}
    assert "--atropos-url=http://node-of-service:8100" in trainer["command"]
    assert "--rdzv-endpoint=node-of-trainer:29500" in trainer["command"]
    assert content["supervisor"]["name"] == "shown.supervisor"
    assert "http://node-of-engine-1:0/v1" in files["environment-environment.yaml"]

"""Runs on a fake Kubernetes whose pods are local processes; kubectl, service and trainer are real.

The pods run as a user without rights, on a read-only file system, in bubblewrap.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from atroposlib.errors import ConfigError
from example_trainer.cluster.kubernetes import KubernetesRun
from example_trainer.cluster.placement import RunStatus
from example_trainer.cluster.run_file import read_run_file
from example_trainer.demo.settings import DemoSettings
from tests.api.soak.actors import held_groups
from tests.cluster.demo_run import (
    SETTINGS,
    demo_run,
    held_out_accuracy,
    make_demo_student,
    steps_of,
)
from tests.cluster.fake_kubernetes import FakeKubernetes, fake_kubernetes, require_cluster
from tests.cluster.scripted_run import losses_of, losses_of_one_node, scripted_run

pytestmark = pytest.mark.slow

OUTPUT = "/var/lib/atropos"
KUBERNETES = {"image": "atropos:1", "namespace": "rl", "grace_s": 5}
LIMIT_S = 400.0


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    require_cluster()
    async with fake_kubernetes(tmp_path / "cluster") as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig()))
        monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
        yield server
        assert server.cluster.failures == []


def output_of(cluster_folder: Path, name: str) -> Path:
    """Return the folder of the claim for the output of a run."""
    folder = cluster_folder / "claims" / f"rl.{name}-output"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_of(file: Path) -> KubernetesRun:
    return KubernetesRun(read_run_file(file), file)


async def until(
    run: KubernetesRun, is_true: Callable[[RunStatus], bool], *, limit_s: float = LIMIT_S
) -> RunStatus:
    """Ask for the status until it is as expected."""
    end = asyncio.get_running_loop().time() + limit_s
    status = await asyncio.to_thread(run.status)
    while not is_true(status):
        if asyncio.get_running_loop().time() > end:
            logs = {part.name: list(run.logs(part.name, lines=20)) for part in status.parts}
            raise TimeoutError(f"{status} {logs}")
        await asyncio.sleep(0.5)
        status = await asyncio.to_thread(run.status)
    return status


def test_log_with_bytes_that_are_not_text_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = '{"items": [{"metadata": {"name": "pod", "creationTimestamp": "2026"}}]}'
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f"#!/bin/sh\ncase $* in *logs*) printf 'one\\n\\377 two\\n';; *) echo '{pods}';; esac\n"
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)
    run = run_of(scripted_run(tmp_path, steps=2, kubernetes=KUBERNETES))

    assert list(run.logs("trainer", lines=2)) == ["one", "\ufffd two"]


async def test_run_that_waits_for_a_secret_is_waiting_and_down_ends_only_its_own(
    cluster: FakeKubernetes, tmp_path: Path
) -> None:
    service = {"token_file": "/etc/tokens/tokens", "tokens": {"trainer": "TRAINER"}}
    place = {**KUBERNETES, "token_secret": "missing"}  # pragma: allowlist secret
    engines = {"kind": "url", "urls": ["http://engine:9000"]}
    file = scripted_run(tmp_path, steps=2, service=service, kubernetes=place, engines=engines)
    run = run_of(file)
    other = {"metadata": {"name": "other", "labels": {"atropos/run": "other"}}, "data": {}}
    cluster.store.create({"apiVersion": "v1", "kind": "ConfigMap", **other}, "rl")
    assert (await asyncio.to_thread(run.status)).state == "none"
    cluster.refuse(2, "PATCH")

    told = await asyncio.to_thread(run.submit)
    status = await asyncio.to_thread(run.status)
    removed = await asyncio.to_thread(run.down)

    assert told == "scripted was submitted to the namespace rl"
    assert {part.name: part.state for part in status.parts}["service"] == "waiting"
    assert removed.endswith("kept with journal and checkpoints: scripted-output")
    assert {(kind, name) for kind, _, name in cluster.store.objects} == {
        ("ConfigMap", "other"),
        ("PersistentVolumeClaim", "scripted-output"),
    }


@pytest.mark.long
async def test_settings_that_can_never_work_fail_the_run_at_once(
    cluster: FakeKubernetes, tmp_path: Path
) -> None:
    trainer = {"model": f"{OUTPUT}/no-such-model"}
    file = scripted_run(tmp_path, steps=2, trainer=trainer, kubernetes=KUBERNETES)
    run = run_of(file)

    await asyncio.to_thread(run.submit)
    status = await until(run, lambda found: found.state == "failed")
    log = "\n".join(await asyncio.to_thread(lambda: list(run.logs("trainer", lines=50))))
    await asyncio.to_thread(run.down)

    trainer_status = next(part for part in status.parts if part.name == "trainer")
    assert (trainer_status.state, trainer_status.restarts) == ("failed", 1)
    assert "no-such-model" in log
    assert (await asyncio.to_thread(run.status)).state == "none"


async def test_unknown_part_and_unreachable_server_are_named(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(scripted_run(tmp_path, steps=2, kubernetes=KUBERNETES))
    with pytest.raises(ConfigError, match="no part 'engine'; expected one of service, engine-0"):
        run.logs("engine", lines=1)

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))

    with pytest.raises(ConfigError, match="kubectl get failed"):
        await asyncio.to_thread(run.status)


@pytest.mark.long
@pytest.mark.parametrize("part", ["trainer", "service", "engine-0"])
async def test_killed_part_comes_back_and_no_step_is_lost_or_doubled(
    cluster: FakeKubernetes, tmp_path: Path, part: str
) -> None:
    steps = 6
    flags = {"groups": steps, "posted": f"{OUTPUT}/posted", "pause-after": 3}
    file = scripted_run(
        tmp_path,
        steps=steps,
        environments={"flags": flags},
        trainer={"model": f"{OUTPUT}/model"},
        kubernetes=KUBERNETES,
    )
    output = output_of(tmp_path / "cluster", "scripted")
    shutil.copytree(tmp_path / "model", output / "model")
    run = run_of(file)

    await asyncio.to_thread(run.submit)
    await until(run, lambda _: len(steps_of(output)) >= 2)
    assert cluster.cluster.kill(f"atropos/part={part}") != []
    (output / "posted.go").touch()
    status = await until(run, lambda found: found.state in ("finished", "failed"))

    assert status.state == "finished", list(run.logs("trainer", lines=50))
    assert {each.name: each.restarts for each in status.parts}[part] == 1
    assert steps_of(output) == list(range(1, steps + 1))
    await asyncio.to_thread(run.down)


@pytest.mark.long
async def test_two_trainer_nodes_take_the_steps_of_one_although_one_is_killed(
    cluster: FakeKubernetes, tmp_path: Path
) -> None:
    steps = 8
    flags = {"groups": steps, "posted": f"{OUTPUT}/posted", "pause-after": 3}
    file = scripted_run(
        tmp_path,
        steps=steps,
        environments={"flags": flags},
        trainer={"model": f"{OUTPUT}/model", "nodes": 2},
        kubernetes=KUBERNETES,
    )
    output = output_of(tmp_path / "cluster", "scripted")
    shutil.copytree(tmp_path / "model", output / "model")
    run = run_of(file)

    await asyncio.to_thread(run.submit)
    await until(run, lambda _: len(steps_of(output)) >= 3)
    pods = cluster.store.list("Pod", "rl", "atropos/part=trainer")
    (second,) = (pod for pod in pods if pod["metadata"]["annotations"]["index"] == "1")
    container = cluster.cluster.container_of(second)
    assert container is not None
    container.kill()
    (output / "posted.go").touch()
    status = await until(run, lambda found: found.state in ("finished", "failed"))

    assert status.state == "finished", list(run.logs("trainer", lines=50))
    assert steps_of(output) == list(range(1, steps + 1))
    expected = await asyncio.to_thread(losses_of_one_node, tmp_path / "alone", steps=steps)
    assert losses_of(output) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    await asyncio.to_thread(run.down)


class Account(NamedTuple):
    """Groups that the service has received, by where they are."""

    received: int
    delivered: int
    held: int


async def account_of(cluster: FakeKubernetes, name: str) -> Account:
    """Ask the service of a run, by the address of its pod."""
    (pod,) = cluster.store.list("Pod", "rl", f"atropos/run={name},atropos/part=service")
    url = f"http://{pod['status']['podIP']}:8000"
    text = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
    counts = {
        which: int(float(re.findall(rf"^atropos_groups_{which}_total (\S+)", text, re.M)[0]))
        for which in ("received", "delivered")
    }
    held = await asyncio.to_thread(held_groups, url, "queued", "buffered", "in_flight")
    return Account(counts["received"], counts["delivered"], held)


async def run_demo(
    cluster: FakeKubernetes, folder: Path, *, steps: int, settings: DemoSettings
) -> tuple[float, float, list[int], Account]:
    """Train on the demo's task; kill the engine, the environment and the trainer on the way.

    Returns accuracy before and after, the steps in the metrics, and the groups of the service.
    """
    before = await asyncio.to_thread(held_out_accuracy, folder / "model", settings)
    output = output_of(folder / "cluster", "demo")
    shutil.copytree(folder / "model", output / "model")
    model = Path(OUTPUT, "model")
    run = run_of(demo_run(folder, model, steps=steps, settings=settings, kubernetes=KUBERNETES))
    await asyncio.to_thread(run.submit)
    killed = ("engine-0", "environment-sums", "trainer")
    for number, part in enumerate(killed, start=1):
        step = number * steps // (len(killed) + 1)
        await until(run, lambda _, step=step: len(steps_of(output)) >= step)
        assert cluster.cluster.kill(f"atropos/part={part}") != []
    (output / "posted.go").touch()
    status = await until(run, lambda found: found.state in ("finished", "failed"), limit_s=600)
    assert status.state == "finished", list(run.logs("trainer", lines=50))
    assert all(part.restarts > 0 for part in status.parts if part.name in killed)
    account = await account_of(cluster, "demo")
    await asyncio.to_thread(run.down)
    final_model = output / "trainer" / "final_model"
    after = await asyncio.to_thread(held_out_accuracy, final_model, settings)
    return before, after, steps_of(output), account


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_demo_learns_as_pods_with_engine_environment_and_trainer_killed(
    cluster: FakeKubernetes, tmp_path: Path
) -> None:
    steps = 24
    await asyncio.to_thread(make_demo_student, tmp_path / "model")

    before, after, trained, account = await run_demo(
        cluster, tmp_path, steps=steps, settings=SETTINGS
    )

    assert trained == list(range(1, steps + 1))
    assert account.received == account.delivered + account.held
    assert account.delivered == steps * SETTINGS.groups_per_step
    assert after > before + 0.05

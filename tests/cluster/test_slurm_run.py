"""`atropos-up --on slurm` on a real Slurm whose job is queued again in the middle of the run.

This machine plays all nodes. Service, trainer and Slurm are real, the engines stand-ins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.demo_run import steps_of
from tests.cluster.scripted_run import ROOT, losses_of, losses_of_one_node, scripted_run
from tests.trainer.test_slurm_job import CLUSTER, require_slurm

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 40
STEPS_OF_TWO_NODES = 12


def run_session(file: Path, *, nodes: int, gpus: int, requeue_after: int) -> dict[str, Any]:
    """Return what the commands of `slurm_session` printed, on a cluster of its own."""
    cluster = file.parent / "cluster"
    cluster.mkdir()
    session = [sys.executable, "-m", "tests.cluster.slurm_session", str(file), str(requeue_after)]
    done = subprocess.run(
        ["bash", str(CLUSTER), str(cluster), str(nodes), *session],
        cwd=ROOT,
        env={
            **os.environ,
            "NODE_GPUS": str(gpus),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    logs = {path.name: path.read_text() for path in (file.parent / "run").glob("**/*.log")}
    assert done.returncode == 0, (done.stderr, logs)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_run_goes_on_after_its_job_was_queued_again(tmp_path):
    """One node trains, one has the environment, one serves: two engines of two GPUs each."""
    require_slurm()
    file = scripted_run(
        tmp_path,
        steps=STEPS,
        engines={"count": 2, "tensor_parallel": 2, "gpus": 2},
        environments={"flags": {"groups": STEPS + 4, "every-s": 0.3}},
        slurm={"gpus_per_node": 4, "environment_nodes": 1},
    )
    output = tmp_path / "run"

    said = run_session(file, nodes=3, gpus=4, requeue_after=5)

    logs = {path.name: path.read_text() for path in (output / "logs").glob("*.log")}
    assert said["running"][0] == 3
    assert said["again"][0] == 2
    assert "is running as job" in said["again"][1]
    assert said["waiting"].startswith("waiting: job")
    assert said["end"][0] == 0, said["end"]
    assert 5 <= said["steps_at_requeue"][-1] < STEPS
    assert steps_of(output) == list(range(1, STEPS + 1))
    assert "has no job that waits or runs" in said["down"][1]
    found = next(line for line in logs["environment-made-up.log"].splitlines() if "engines" in line)
    assert json.loads(found) == {
        "node": "node2",
        "engines": {"http://node3:9000/v1": 200, "http://node3:9001/v1": 200},
    }
    assert "devices: 0,1" in logs["engine-0.log"]
    assert "devices: 2,3" in logs["engine-1.log"]
    assert "resuming run" in logs["service.log"]


def test_two_trainer_nodes_take_the_steps_of_one_although_their_job_is_queued_again(tmp_path):
    require_slurm()
    steps = STEPS_OF_TWO_NODES
    file = scripted_run(
        tmp_path,
        steps=steps,
        environments={"flags": {"groups": steps, "every-s": 8.0}},
        trainer={"nodes": 2},
        slurm={"gpus_per_node": 1},
    )

    said = run_session(file, nodes=3, gpus=1, requeue_after=3)

    assert said["end"][0] == 0, said["end"]
    assert 3 <= said["steps_at_requeue"][-1] < steps
    output = tmp_path / "run"
    assert steps_of(output) == list(range(1, steps + 1))
    expected = losses_of_one_node(tmp_path / "alone", steps=steps)
    assert losses_of(output) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    state = output / f"trainer/step_{steps}/trainer/trainer_state.safetensors"
    assert b"rng.torch.1" in state.read_bytes()  # of the second rank

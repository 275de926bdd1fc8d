"""`atropos-up --on slurm` on a real Slurm whose job is queued again in the middle of the run.

One node trains, one has the environment, one serves with two engines of two GPUs each.
This machine plays all nodes. Service, trainer and Slurm are real, the engines stand-ins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.demo_run import steps_of
from tests.cluster.scripted_run import ROOT, scripted_run
from tests.trainer.test_slurm_job import CLUSTER, require_slurm

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 40


def test_run_goes_on_after_its_job_was_queued_again(tmp_path):
    require_slurm()
    file = scripted_run(
        tmp_path,
        steps=STEPS,
        engines={"count": 2, "tensor_parallel": 2, "gpus": 2},
        environments={"flags": {"groups": STEPS + 4, "every-s": 0.3}},
        slurm={"gpus_per_node": 4, "environment_nodes": 1},
    )
    cluster, output = tmp_path / "cluster", tmp_path / "run"
    cluster.mkdir()

    session = [sys.executable, "-m", "tests.cluster.slurm_session", str(file), "5"]
    done = subprocess.run(
        ["bash", str(CLUSTER), str(cluster), "3", *session],
        cwd=ROOT,
        env={
            **os.environ,
            "NODE_GPUS": "4",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    logs = {path.name: path.read_text() for path in (output / "logs").glob("*.log")}
    log = output / "up" / "job.log"
    assert done.returncode == 0, (done.stderr, log.read_text() if log.exists() else "", logs)
    said = json.loads(done.stdout.splitlines()[-1])
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

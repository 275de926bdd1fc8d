"""The Slurm job on a real Slurm: two nodes train under torchrun, a third serves.

This machine plays all nodes (`slurm_cluster.sh`). Service, trainer, torchrun and Slurm are real;
the engine is the stand-in that takes weights, since vLLM's own updates have tests of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.trainer.conftest import FAKE_ENGINE
from tests.trainer.tiny import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "ip")
STEPS = 4
JOB = {
    "NUM_TRAINING_NODES": "2",
    "GPUS_PER_NODE": "1",
    "TRAINING_STEPS": str(STEPS),
    "ENV_PROGRAM": f"python {Path(__file__).with_name('fake_environment.py')}",
    "ENV_ARGS": f"--groups {STEPS}",
    "TRAINER_ARGS": "--device cpu --batch-size 1 --gradient-accumulation-steps 4 --seq-len 64 "
    "--lr 0.01 --optimizer adamw --dtype float32 --checkpoint-interval 2",
}


def require_slurm() -> None:
    """Skip with the reason where this machine cannot be a cluster."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}; apt-get install slurm-wlm munge iproute2")
    command = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "true"]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a Slurm cluster of its own needs root and the right to make namespaces")


def test_job_trains_on_two_nodes_and_updates_the_engine_of_the_third(tmp_path):
    require_slurm()
    model = save_tiny_model(tmp_path / "model")
    saves, cluster, log = tmp_path / "run", tmp_path / "cluster", tmp_path / "job.log"
    cluster.mkdir()
    command = ["bash", str(CLUSTER), str(cluster), "3", "sbatch", "--wait", "--nodes=3"]
    command += ["--gpus-per-node=1", f"--output={log}", "example_trainer/slurm/train.sbatch"]

    done = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            **JOB,
            "MODEL": str(model),
            "SAVE_PATH": str(saves),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{FAKE_ENGINE}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    logs = {path.name: path.read_text() for path in (saves / "logs").glob("*.log")}
    assert done.returncode == 0, (done.stderr, log.read_text()[-6000:], logs)
    lines = [json.loads(line) for line in (saves / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    found = next(line for line in logs["environment.log"].splitlines() if line.startswith("{"))
    assert json.loads(found) == {
        "node": "node1",
        "engines": {"http://node3:9000/v1": 200},
    }
    assert logs["engines-node3.log"].count("reload_weights") == STEPS
    before = load_file(model / "model.safetensors")
    after = load_file(saves / "final_model" / "model.safetensors")
    assert not before["lm_head.weight"].equal(after["lm_head.weight"])
    states = (saves / "step_4" / "trainer" / "trainer_state.safetensors").read_bytes()
    assert b"rng.torch.1" in states  # of the second rank
    finished = subprocess.run(["pgrep", "--full", str(cluster)], check=False, capture_output=True)
    assert finished.stdout == b""

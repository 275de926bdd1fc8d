"""Discovery inside a job of a real Slurm: four nodes that are all this machine, set up here."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.processes import find_free_ports

NODES = 4
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in PROGRAMS) or os.geteuid() != 0,
        reason="needs Slurm and munge (Debian: slurm-wlm, munge) and root to start them",
    ),
]

JOB = """
import json, sys
from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager

listed = [APIServerConfig(base_url="http://ignored/v1", model_name="m", server_type="vllm")]
found = ServerManager(ServerBaseline(model_name="m", server_type="vllm"))
copied = ServerManager(listed, slurm=True)
urls = [[server.config.base_url for server in manager.servers] for manager in (found, copied)]
json.dump(urls, open(sys.argv[1], "w"))
"""


def slurm_conf(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller, *node_ports = find_free_ports(NODES + 1)
    nodes = [
        f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for i, port in enumerate(node_ports, start=1)
    ]
    lines = [
        "ClusterName=tiny",
        f"SlurmctldHost={host}(127.0.0.1)",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        "CredType=cred/munge",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        "ReturnToService=2",
        f"SlurmctldPort={controller}",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"StateSaveLocation={folder}/state",
        "SlurmdParameters=config_overrides",
        *nodes,
        f"PartitionName=debug Nodes=node[1-{NODES}] Default=YES State=UP",
    ]
    return "\n".join(lines) + "\n"


def munge_command(folder: Path) -> list[str]:
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    return ["munged", "--foreground", "--force", f"--seed-file={folder}/munge.seed", *options]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of four nodes; yields the environment in which its commands work."""
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm.conf").write_text(slurm_conf(tmp_path))
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    commands = [munge_command(tmp_path), ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", f"node{i}"] for i in range(1, NODES + 1)]
    processes = []
    with (tmp_path / "daemons.log").open("w") as log:
        for command in commands:
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            time.sleep(0.2)
    try:
        wait_until_idle(environ, tmp_path)
        yield environ
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=20)


def wait_until_idle(environ: dict[str, str], folder: Path) -> None:
    for _ in range(60):
        command = ["sinfo", "--noheader", "--format=%T %D"]
        listed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if listed.stdout.split() == ["idle", str(NODES)]:
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise AssertionError(f"the cluster is not ready: {listed.stdout} {listed.stderr}\n{logs}")


def test_servers_of_a_real_job_are_found_on_the_nodes_behind_training(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    answer = tmp_path / "urls.json"
    wrapped = f"{sys.executable} {tmp_path / 'job.py'} {answer}"
    variables = "ALL,NUM_TRAINING_NODES=1,INFER_TP=4"
    command = ["sbatch", "--wait", "-N3", f"--export={variables}", f"--output={tmp_path}/job.log"]

    subprocess.run(
        [*command, f"--wrap={wrapped}"], env=slurm, cwd=Path.cwd(), check=False, timeout=120
    )

    log = (tmp_path / "job.log").read_text()
    assert answer.exists(), log
    expected = [f"http://node{n}:{port}/v1" for n in (2, 3) for port in (9000, 9001)]
    assert json.loads(answer.read_text()) == [expected, expected]

"""The Slurm scripts: their syntax, and what they start, by stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import example_trainer
from example_trainer.cli import config_from_args, create_full_parser

SCRIPTS = Path(example_trainer.__file__).parent / "slurm"
STAND_INS = {
    "scontrol": "printf 'a1\\na2\\nb1\\nb2\\n'",
    "srun": 'printf "%s\\0" "$@" >> "$CALLS/$$"\n'
    'case "$*" in *broken*) exit 3;; *torchrun*) exec sleep "${TRAINING_S:-0}" &>/dev/null;; esac',
    "curl": 'echo "not by a proxy: $no_proxy $NO_PROXY" >&2',
}


@pytest.mark.parametrize("script", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_script_is_valid_bash(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def run_job(tmp_path, **variables):
    """Run the job with stand-ins for Slurm; returns it and the arguments of every srun."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    calls.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPTS / "train.sbatch")],
        env={
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(calls),
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(SCRIPTS.parent.parent),
            "SAVE_PATH": str(tmp_path / "run"),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, [path.read_text().split("\0")[:-1] for path in calls.iterdir()]


def test_job_trains_on_the_first_nodes_and_serves_on_the_others(tmp_path):
    done, calls = run_job(
        tmp_path,
        MODEL="/shared/model",
        ENV_PROGRAM="python environments/gsm8k_server.py",
        NUM_TRAINING_NODES="2",
        GPUS_PER_NODE="4",
        INFER_TP="2",
    )

    assert done.returncode == 0, done.stderr
    training = next(call for call in calls if "torchrun" in call)
    assert "--nodelist=a1,a2" in training
    assert "--ntasks=2" in training
    assert "--nproc-per-node=4" in training
    flags = training[training.index("example_trainer.grpo") + 1 :]
    config = config_from_args(create_full_parser().parse_args(flags))
    assert config.weight_bridge_mode == "in_place"
    assert config.atropos_url == "http://a1:8000"
    assert config.engine_urls == [
        f"http://b{host}:{port}" for host in (1, 2) for port in (9000, 9001)
    ]
    engines = [call for call in calls if str(SCRIPTS / "engines.sh") in call]
    assert sorted(call[3] for call in engines) == ["--nodelist=b1", "--nodelist=b2"]
    assert all(call[-3:] == ["/shared/model", "4", "2"] for call in engines)
    assert any("run-api" in call for call in calls)
    environment = next(call for call in calls if "serve" in call)
    assert shlex.join(environment).endswith("--openai.server_type vllm")


@pytest.mark.parametrize(
    ("given", "excepted"),
    [
        ({}, "a1,a2,b1,b2"),
        ({"no_proxy": "localhost,.site"}, "localhost,.site,a1,a2,b1,b2"),
        ({"NO_PROXY": "localhost"}, "localhost,a1,a2,b1,b2"),
    ],
)
def test_nodes_are_reached_without_a_proxy_of_the_cluster(tmp_path, given, excepted):
    done, _ = run_job(tmp_path, MODEL="m", ENV_PROGRAM="e", **given)

    assert done.returncode == 0, done.stderr
    assert f"not by a proxy: {excepted} {excepted}\n" in done.stderr


def test_exception_of_all_hosts_from_the_proxy_stays_alone(tmp_path):
    done, _ = run_job(tmp_path, MODEL="m", ENV_PROGRAM="e", no_proxy="*", NO_PROXY="*")

    assert "not by a proxy: * *\n" in done.stderr


def test_job_ends_when_a_part_of_it_fails(tmp_path):
    done, _ = run_job(tmp_path, MODEL="m", ENV_PROGRAM="broken", TRAINING_S="20")

    assert done.returncode == -signal.SIGTERM
    assert "failed with code 3, see" in done.stderr
    assert "broken serve --slurm true" in done.stderr


def test_job_without_a_node_that_serves_is_refused(tmp_path):
    done, calls = run_job(tmp_path, MODEL="m", ENV_PROGRAM="e", NUM_TRAINING_NODES="4")

    assert done.returncode == 2
    assert "no node is left to serve: 4 nodes" in done.stderr
    assert calls == []


def test_job_without_its_settings_says_which(tmp_path):
    done, _ = run_job(tmp_path, MODEL="m")

    assert done.returncode != 0
    assert "ENV_PROGRAM" in done.stderr

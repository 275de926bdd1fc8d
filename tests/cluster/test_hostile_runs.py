"""Run files and records that would run or end something else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from atroposlib.errors import ConfigError
from example_trainer.cluster import slurm
from example_trainer.cluster.local import LocalRun, SupervisorRecord
from example_trainer.cluster.run_file import RunFile, read_run_file
from example_trainer.cluster.slurm import SlurmRun
from example_trainer.processes import process_identity


def written_run(folder: Path, **sections: Any) -> tuple[RunFile, Path]:
    file = folder / "run.yaml"
    content = {
        **{"name": "run", "environments": [{"program": "env.py"}]},
        **{"trainer": {"model": "m", "steps": 1}, "engines": [{"kind": "torch"}]},
    }
    file.write_text(yaml.safe_dump({**content, **sections}))
    return read_run_file(file), file


@pytest.mark.parametrize(
    "sections",
    [
        {"slurm": {"partition": "gpu\ntouch found"}},
        {"slurm": {"account": "me\ntouch found"}},
        {"slurm": {"options": ["--qos=high\ntouch found"]}},
        {"output": "run\ntouch found"},
    ],
)
def test_line_breaks_add_no_line_to_the_script_of_slurm(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    run = SlurmRun(*written_run(tmp_path, **sections))

    with pytest.raises(ConfigError, match="expected one line"):
        run.render()


def test_paths_with_spaces_are_one_word_for_slurm(tmp_path: Path) -> None:
    run, file = written_run(tmp_path, output="my run")

    script = SlurmRun(run, file).render()["job.sbatch"]

    assert f"#SBATCH --output='{tmp_path}/my run/up/job.log'" in script


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"supervisor": [1, 0], "status": {"state": "unknown", "parts": [], "detail": ""}}',
        '{"supervisor": ["x", 0], "status": {"state": "running", "parts": [], "detail": ""}}',
        '{"supervisor": [1, 0], "status": {"state": "running", "parts": [1], "detail": ""}}',
        "[" * 100_000,
    ],
)
def test_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    run, file = written_run(tmp_path)
    write_record(run, text)

    with pytest.raises(ConfigError, match=r"record.json cannot be read: .*; delete it"):
        LocalRun(run, file).down()


def test_output_folder_on_a_file_system_without_locks_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with SupervisorRecord(tmp_path).held():
        assert (tmp_path / "up" / "lock").is_file()


def test_parts_of_a_slurm_job_reach_its_nodes_without_a_proxy_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = written_run(tmp_path, slurm={"gpus_per_node": 4})
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # restores what the code under test sets
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nid[1-2]")
    monkeypatch.setattr(slurm, "_slurm", lambda *_: "nid1\nnid2\n")
    monkeypatch.setattr(slurm, "RunSupervisor", lambda *_, **__: SimpleNamespace(run=lambda: None))

    slurm._supervise(run)

    assert {"nid1", "nid2"} <= set(os.environ["no_proxy"].split(","))
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]


def write_record(run: RunFile, text: str) -> Path:
    path = SupervisorRecord(run.output).folder / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_record_of_another_user_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    run, file = written_run(tmp_path)
    status = {"state": "running", "parts": [], "detail": ""}
    victim = process_identity(os.getpid())
    path = write_record(run, json.dumps({"supervisor": victim, "status": status}))
    os.chown(path, 65534, 65534)
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))

    with pytest.raises(ConfigError, match="of another user"):
        LocalRun(run, file).down()

    assert signal.SIGTERM not in sent

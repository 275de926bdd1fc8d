from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import (
    configs_from_baseline,
    configs_on_slurm,
    slurm_hosts,
    slurm_urls,
)
from atroposlib.errors import ConfigError

JOB = {"SLURM_JOB_NODELIST": "node[1-3]", "NUM_TRAINING_NODES": "1"}


def three_hosts(nodelist: str) -> Sequence[str]:
    assert nodelist == JOB["SLURM_JOB_NODELIST"]
    return ["node1", "node2", "node3"]


def test_every_node_behind_the_training_nodes_serves_on_eight_ports() -> None:
    urls = slurm_urls(["node1", "node2", "node3"], {"NUM_TRAINING_NODES": "1"})

    assert len(urls) == 16
    assert urls[0] == "http://node2:9000/v1"
    assert urls[-1] == "http://node3:9007/v1"


@pytest.mark.parametrize(("tensor_parallel", "ports"), [("1", 8), ("2", 4), ("3", 2), ("8", 1)])
def test_tensor_parallelism_leaves_fewer_servers_per_node(tensor_parallel: str, ports: int) -> None:
    environ = {"NUM_TRAINING_NODES": "0", "INFER_TP": tensor_parallel}

    assert len(slurm_urls(["node1"], environ)) == ports


def test_nodes_with_other_numbers_of_gpus_have_as_many_servers() -> None:
    environ = {"NUM_TRAINING_NODES": "1", "GPUS_PER_NODE": "4", "INFER_TP": "2"}

    assert slurm_urls(["node1", "node2"], environ) == [
        "http://node2:9000/v1",
        "http://node2:9001/v1",
    ]


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "NUM_TRAINING_NODES"),
        ({"NUM_TRAINING_NODES": "one"}, "NUM_TRAINING_NODES"),
        ({"NUM_TRAINING_NODES": "2"}, "NUM_TRAINING_NODES is 2 of 2 nodes"),
        ({"NUM_TRAINING_NODES": "-1"}, "NUM_TRAINING_NODES"),
        ({"NUM_TRAINING_NODES": "1", "INFER_TP": "16"}, "INFER_TP is 16, more than the 8 GPUs"),
        ({"NUM_TRAINING_NODES": "1", "INFER_TP": "two"}, "INFER_TP"),
        ({"NUM_TRAINING_NODES": "1", "INFER_TP": "0"}, "INFER_TP"),
        ({"NUM_TRAINING_NODES": "1", "GPUS_PER_NODE": "0"}, "GPUS_PER_NODE"),
    ],
)
def test_bad_variable_is_reported_by_name(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        slurm_urls(["node1", "node2"], environ)


def test_baseline_outside_a_job_looks_at_the_local_ports() -> None:
    baseline = ServerBaseline(model_name="m", timeout=7, server_type="vllm", tokenizer_name="t")

    configs = configs_from_baseline(baseline, {})

    assert [config.base_url for config in configs] == [
        f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)
    ]
    for config in configs:
        assert (config.model_name, config.timeout, config.api_key) == ("m", 7, "x")
        assert (config.server_type, config.tokenizer_name) == ("vllm", "t")


def test_baseline_inside_a_job_finds_its_servers() -> None:
    configs = configs_from_baseline(ServerBaseline(), JOB, three_hosts)

    assert len(configs) == 16


def test_baseline_on_one_node_looks_at_the_local_ports() -> None:
    configs = configs_from_baseline(ServerBaseline(), JOB, lambda _: ["node1"])

    assert len(configs) == 4


def test_slurm_list_becomes_copies_of_its_first_config() -> None:
    given = [APIServerConfig(base_url="http://a/v1", model_name="m", api_key="k")]

    configs = configs_on_slurm(given, JOB, three_hosts)

    assert len(configs) == 16
    assert {(config.model_name, config.api_key) for config in configs} == {("m", "k")}
    assert configs[0].base_url == "http://node2:9000/v1"
    assert given[0].base_url == "http://a/v1"


def test_slurm_outside_a_job_warns_and_keeps_the_list(caplog: pytest.LogCaptureFixture) -> None:
    given = [APIServerConfig(base_url="http://a/v1")]

    assert configs_on_slurm(given, {}) == given
    assert "SLURM_JOB_NODELIST is not set" in caplog.text


def test_slurm_on_one_node_keeps_the_list() -> None:
    given = [APIServerConfig(base_url="http://a/v1")]

    assert configs_on_slurm(given, JOB, lambda _: ["node1"]) == given


def test_node_list_is_an_argument_never_a_shell_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\nprintf "%s\\n\\n" "$@"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert slurm_hosts("node1; touch /tmp/x") == ["show", "hostnames", "node1; touch /tmp/x"]


def test_missing_scontrol_names_the_node_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is 'node1'"):
        slurm_hosts("node1")

"""The engine process: its command and environment, readiness, failure, end."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import subprocess
import sys

import pytest

from atroposlib.errors import ConfigError, EngineSetupError
from example_trainer.processes import ProcessFailedError, find_free_port
from example_trainer.vllm_manager import (
    VllmServer,
    check_vllm_health,
    cpu_cache_gib,
    is_port_in_use,
    launches_with_processed_logprobs,
    vllm_command,
    vllm_environment,
    wait_for_orphaned_engine,
    wait_for_vllm_ready,
)
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.tiny import tiny_config

pytestmark = pytest.mark.slow


def option(command, name):
    return command[command.index(name) + 1]


def test_command_on_a_cpu_asks_for_float32_and_no_gpu_memory(tmp_path):
    config = tiny_config(tmp_path, vllm_port=9123, max_model_len=512)

    command = vllm_command(config, "saves/step_3")

    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(command, "--model") == "saves/step_3"
    assert option(command, "--served-model-name") == "tiny"
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--port") == "9123"
    assert option(command, "--dtype") == "float32"
    assert option(command, "--max-model-len") == "512"
    assert "--gpu-memory-utilization" not in command


@pytest.mark.parametrize(
    ("fields", "given", "expected"),
    [
        ({"max_position_embeddings": 1024}, {}, "1024"),
        ({"text_config": {"max_position_embeddings": 256}}, {}, "256"),
        ({"max_position_embeddings": 131072}, {}, "4096"),
        ({}, {}, "4096"),
        ({"max_position_embeddings": 1024}, {"max_model_len": 2048}, "2048"),
    ],
)
def test_context_of_the_engine_is_at_most_that_of_the_model_unless_given(
    tmp_path, fields, given, expected
):
    (tmp_path / "config.json").write_text(json.dumps(fields))

    command = vllm_command(tiny_config(tmp_path, **given), str(tmp_path))

    assert option(command, "--max-model-len") == expected


@pytest.mark.parametrize(
    ("settings", "asked", "processed"),
    [
        ({}, ["processed_logprobs"], True),
        ({"logprobs_mode": "processed"}, ["processed_logprobs"], True),
        ({"logprobs_mode": "raw"}, [], False),
        ({"vllm_args": "--logprobs-mode raw_logprobs"}, ["raw_logprobs"], False),
        ({"vllm_args": "--logprobs-mode=processed_logprobs"}, [], True),
    ],
)
def test_launched_engine_returns_processed_logprobs_unless_told_otherwise(
    tmp_path, settings, asked, processed
):
    config = tiny_config(tmp_path, **settings)

    command = vllm_command(config, "tiny")

    given = [b for a, b in itertools.pairwise(command) if a == "--logprobs-mode"]
    assert given == asked
    assert launches_with_processed_logprobs(config) is processed


def test_command_on_a_gpu_passes_dtype_memory_and_further_arguments(tmp_path):
    config = tiny_config(
        tmp_path,
        device="cuda:0",
        logprobs_mode="processed",
        vllm_args="--enforce-eager --chat-template 'a b'",
    )

    command = vllm_command(config, "tiny")

    assert option(command, "--dtype") == "bfloat16"
    assert option(command, "--gpu-memory-utilization") == "0.45"
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    assert command[-3:] == ["--enforce-eager", "--chat-template", "a b"]


@pytest.mark.parametrize(
    ("visible", "gpu", "expected"), [("", 1, "1"), ("4,7", 1, "7"), ("4,7", None, "4,7")]
)
def test_gpu_is_counted_among_those_this_process_was_given(tmp_path, visible, gpu, expected):
    config = tiny_config(tmp_path, vllm_gpu=gpu)

    environment = vllm_environment(config, {"CUDA_VISIBLE_DEVICES": visible}, updatable=False)

    assert environment["CUDA_VISIBLE_DEVICES"] == expected
    assert "VLLM_SERVER_DEV_MODE" not in environment


def test_gpu_beyond_those_visible_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="shows 1 GPUs"):
        vllm_environment(
            tiny_config(tmp_path, vllm_gpu=1), {"CUDA_VISIBLE_DEVICES": "4"}, updatable=True
        )


def test_server_becomes_ready_logs_and_ends(tmp_path, free_port, fake_vllm):
    server = VllmServer(tiny_config(tmp_path, vllm_port=free_port), updatable=True)

    server.start("tiny")
    server.check_alive()
    was_healthy = check_vllm_health(free_port)
    server.stop()
    server.stop()

    assert was_healthy
    assert not is_port_in_use(free_port)
    log = (tmp_path / "logs" / "vllm.log").read_text()
    assert f"--port {free_port}" in log
    assert "development mode: 1" in log


def test_server_that_ends_at_once_is_reported_with_its_log(tmp_path, free_port, fake_vllm):
    server = VllmServer(tiny_config(tmp_path, vllm_port=free_port), updatable=False)

    with pytest.raises(ProcessFailedError, match="no such model"):
        server.start("broken")

    server.check_alive()


def test_server_that_dies_later_is_noticed(tmp_path, free_port, fake_vllm):
    server = VllmServer(tiny_config(tmp_path, vllm_port=free_port), updatable=False)
    server.start("tiny")
    process = server._process

    process.stop()

    with pytest.raises(ProcessFailedError):
        server.check_alive()
    server.stop()


def test_port_counts_as_used_only_while_something_listens():
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert is_port_in_use(port)
        assert not wait_for_vllm_ready(find_free_port(), timeout=0.0)

    assert not is_port_in_use(port)


@pytest.mark.parametrize("host", ["no such host", "::1", "a" * 70 + ".test"])
def test_host_that_is_unknown_is_named_with_its_flag(host):
    with pytest.raises(EngineSetupError, match=r"--vllm-host: .* is not the name or IPv4 address"):
        is_port_in_use(9001, host)


def test_health_is_what_the_engine_says():
    with ScriptedVllm() as engine:
        assert check_vllm_health(engine.port)
        assert wait_for_vllm_ready(engine.port)
        engine.answers["/health"] = (503, {})
        assert not check_vllm_health(engine.port)


@pytest.mark.parametrize(("free_gib", "cache_gib"), [(0.5, 1), (7, 1), (10, 2), (500, 4)])
def test_engine_on_a_cpu_takes_a_quarter_of_the_free_memory_within_bounds(free_gib, cache_gib):
    assert cpu_cache_gib(int(free_gib * 2**30)) == cache_gib


@pytest.mark.parametrize(
    ("settings", "inherited", "expected"),
    [
        ({}, {}, True),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "7"}, "7"),
        ({"vllm_args": "--gpu-memory-utilization=0.3"}, {}, None),
        ({"vllm_args": "--kv-cache-memory-bytes 9"}, {}, None),
        ({"device": "cuda"}, {}, None),
    ],
    ids=["default", "variable", "utilization", "bytes", "cuda"],
)
def test_memory_of_an_engine_on_a_cpu_is_bounded_unless_it_was_chosen(
    tmp_path, settings, inherited, expected
):
    environment = vllm_environment(tiny_config(tmp_path, **settings), inherited, updatable=False)

    space = environment.get("VLLM_CPU_KVCACHE_SPACE")
    assert space in ("1", "2", "3", "4") if expected is True else space == expected


@pytest.mark.long
def test_resumed_run_waits_for_the_engine_of_the_killed_one(tmp_path, free_port, fake_vllm, caplog):
    script = (
        "import os, signal, sys\n"
        "from tests.trainer.tiny import tiny_config\n"
        "from example_trainer.vllm_manager import VllmServer\n"
        "from pathlib import Path\n"
        "config = tiny_config(Path(sys.argv[1]), vllm_port=int(sys.argv[2]))\n"
        "VllmServer(config, updatable=True).start('tiny')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(free_port)])
    assert killed.returncode == -9
    assert (tmp_path / "saves" / "engine.json").is_file()

    with caplog.at_level(logging.INFO):
        wait_for_orphaned_engine(tiny_config(tmp_path, vllm_port=free_port))

    assert not is_port_in_use(free_port)


def test_engine_of_a_living_trainer_is_not_waited_for(tmp_path, free_port, fake_vllm):
    config = tiny_config(tmp_path, vllm_port=free_port)
    server = VllmServer(config, updatable=True)
    server.start("tiny")

    wait_for_orphaned_engine(config)  # returns although it runs

    assert is_port_in_use(free_port)
    server.stop()
    assert not (tmp_path / "saves" / "engine.json").exists()

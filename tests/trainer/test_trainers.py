"""Whole runs against the real service, with a stand-in engine: results, resuming, clean ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from atroposlib.errors import ConfigError, GroupError
from example_trainer.processes import find_free_port
from example_trainer.trainers import train
from example_trainer.vllm_manager import is_port_in_use
from tests.trainer.running_command import without_coverage
from tests.trainer.tiny import group, save_tiny_model, tiny_config

pytestmark = pytest.mark.slow


class ScriptedEnvironment(threading.Thread):
    """Posts a group whenever the queue is empty, the next one of a list each time."""

    def __init__(self, url, groups):
        super().__init__(daemon=True)
        self._url = url
        self._groups = list(groups)
        self._finished = threading.Event()

    def run(self):
        with httpx.Client(base_url=self._url) as http:
            while self._groups and not self._finished.is_set():
                if self._is_wanted(http):
                    http.post("/scored_data", json=self._groups.pop(0)).raise_for_status()
                time.sleep(0.005)

    @staticmethod
    def _is_wanted(http):
        try:
            is_registered = http.get("/info").json()["batch_size"] > 0
            return is_registered and http.get("/status").json()["queue_size"] == 0
        except httpx.HTTPError:
            return False

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._finished.set()
        self.join()


def batches(count):
    """Groups of four, each one a batch; all different, so that order and loss of one show."""
    return [group([[7, i], [8], [9], [7]], [1.0, 0.0, 0.2, 0.5 + i / 20]) for i in range(count)]


def run_config(tmp_path, service, name, **settings):
    return tiny_config(
        tmp_path,
        model_name=str(tmp_path / "model"),
        atropos_url=service.url,
        vllm_port=find_free_port(),
        save_path=str(tmp_path / name),
        **settings,
    )


@pytest.mark.parametrize("mode", ["in_place", pytest.param("none", marks=pytest.mark.long)])
def test_train_owns_an_engine_updates_it_and_leaves_nothing_running(
    tmp_path, service, fake_vllm, mode
):
    save_tiny_model(tmp_path / "model")
    config = run_config(
        tmp_path, service, "saves", weight_bridge_mode=mode, vllm_restart_interval=2
    )

    with ScriptedEnvironment(service.url, batches(4)):
        final = train(config)

    log = (tmp_path / "logs" / "vllm.log").read_text()
    start = load_file(tmp_path / "model" / "model.safetensors")
    end = load_file(final / "model.safetensors")
    assert not torch.equal(start["lm_head.weight"], end["lm_head.weight"])
    assert not is_port_in_use(config.vllm_port)
    assert "4 of 4" in (tmp_path / "saves" / "report.html").read_text()
    if mode == "in_place":
        assert log.count("arguments:") == 1
        assert log.count("reload_weights") == 2  # after step 2, and at the end
    else:
        assert log.count("arguments:") == 2  # at the start and after step 2, not after the last
        assert f"--model {tmp_path / 'saves' / 'engine_weights'}" in log
        assert not (tmp_path / "saves" / "engine_weights").exists()


def test_resumed_train_ends_with_the_weights_of_an_undisturbed_one(tmp_path, service, fake_vllm):
    save_tiny_model(tmp_path / "model")
    settings = {"checkpoint_interval": 2, "training_steps": 4, "vllm_restart_interval": 0}
    settings |= {"on_bad_group": "stop"}
    whole = run_config(tmp_path, service, "whole", **settings)
    with ScriptedEnvironment(service.url, batches(4)):
        expected = train(whole)
    httpx.get(f"{service.url}/reset_data")

    broken = {**batches(1)[0], "images": ["unsupported"]}
    split = run_config(tmp_path, service, "split", **settings)
    with (
        ScriptedEnvironment(service.url, [*batches(2), broken]),
        pytest.raises(GroupError, match="images"),
    ):
        train(split)
    httpx.get(f"{service.url}/reset_data")
    with ScriptedEnvironment(service.url, batches(4)[2:]):
        resumed = train(split.model_copy(update={"resume": True}))

    undisturbed = load_file(expected / "model.safetensors")
    continued = load_file(resumed / "model.safetensors")
    assert not is_port_in_use(split.vllm_port)
    assert undisturbed.keys() == continued.keys()
    assert all(torch.equal(undisturbed[name], continued[name]) for name in undisturbed)


def wait_for(condition, timeout_s=300.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.long
def test_signal_ends_the_trainer_and_its_engine(tmp_path, service, fake_vllm, how):
    save_tiny_model(tmp_path / "model")
    port = find_free_port()
    script = Path(__file__).parents[2] / "example_trainer" / "run.py"
    options = ["--model", str(tmp_path / "model"), "--device", "cpu", "--vllm-port", str(port)]
    options += ["--atropos-url", service.url, "--save-path", str(tmp_path / "saves")]
    options += ["--log-dir", str(tmp_path / "logs")]
    trainer = subprocess.Popen(
        [sys.executable, str(script), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**without_coverage(os.environ), "OMP_NUM_THREADS": "1"},
    )

    try:
        wait_for(lambda: is_port_in_use(port))
        trainer.send_signal(how)
        _, output = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        trainer.wait()

    assert trainer.returncode == 128 + how, output
    assert not is_port_in_use(port)


@pytest.mark.parametrize(
    ("setting", "flag"), [("save_path", "--save-path"), ("metrics_path", "--metrics-path")]
)
def test_place_that_cannot_be_written_ends_the_run_before_the_model_is_loaded(
    tmp_path, setting, flag
):
    (tmp_path / "file").write_text("")
    config = tiny_config(
        tmp_path,
        model_name=str(tmp_path / "none"),
        engine="torch",
        **{setting: str(tmp_path / "file" / "x")},
    )

    with pytest.raises(ConfigError, match=f"cannot be written: .*choose another place with {flag}"):
        train(config)


def test_second_trainer_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    config = tiny_config(tmp_path, model_name=str(tmp_path / "none"), engine="torch")
    marker = Path(config.save_path) / "journal" / "run.json"
    marker.parent.mkdir(parents=True)
    marker.write_text('{"run_id": "first"}')
    first = os.open(config.save_path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)

    try:
        with pytest.raises(ConfigError, match=r"another trainer is running in .*--save-path"):
            train(config)
    finally:
        os.close(first)

    assert marker.read_text() == '{"run_id": "first"}'

"""A recorded run is repeated to equal weights; the first step that differs is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from atroposlib.errors import ConfigError
from example_trainer.api import TrainingRecord
from example_trainer.processes import find_free_port
from example_trainer.repeating import RecordedRun, WeightsDifferError, repeat
from example_trainer.trainers import train
from tests.envs.live_service import LiveService
from tests.trainer.test_durable_feed import Killed
from tests.trainer.test_trainers import ScriptedEnvironment, batches, run_config
from tests.trainer.tiny import save_tiny_model

pytestmark = pytest.mark.slow

SETTINGS = {
    "weight_bridge_mode": "off",
    "checkpoint_interval": 2,
    "training_steps": 5,
    "record_run": True,
    "resume_or_start": True,
    "lr_schedule": "linear",
}


def killed_at(monkeypatch, step):
    """Let the process end after the optimizer step, before it is acknowledged."""
    real = TrainingRecord.note_weights

    def dying(self, number, checksum):
        real(self, number, checksum)
        if number == step:
            raise Killed

    monkeypatch.setattr(TrainingRecord, "note_weights", dying)


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory):
    """A run of five steps that was killed in the fourth and resumed from its second."""
    folder = tmp_path_factory.mktemp("recorded")
    save_tiny_model(folder / "model")
    service = LiveService(find_free_port())
    service.start()
    try:
        config = run_config(folder, service, "saves", **SETTINGS)
        with pytest.MonkeyPatch.context() as patch, ScriptedEnvironment(service.url, batches(5)):
            killed_at(patch, 4)
            with pytest.raises(Killed):
                train(config)
        httpx.get(f"{service.url}/reset_data")
        with ScriptedEnvironment(service.url, batches(5)[4:]):
            train(config.model_copy(update={"resume": True}))
    finally:
        service.stop()
    return folder


@pytest.fixture
def recorded(recorded_once, tmp_path):
    """Its folder, which a test may change."""
    return shutil.copytree(recorded_once / "saves", tmp_path / "saves")


def test_killed_and_resumed_run_is_repeated_to_equal_weights(recorded, tmp_path):
    lines = []

    num_steps = repeat(recorded, tmp_path / "again", report=lines.append)

    assert num_steps == len(lines) == 5
    # Nothing of the first repetition is resumed.
    assert repeat(recorded, tmp_path / "again") == 5
    first = load_file(recorded / "final_model" / "model.safetensors")
    second = load_file(tmp_path / "again" / "final_model" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_first_step_that_differs_is_named(recorded, tmp_path):
    path = recorded / "recorded" / "step_3.batch"
    record = msgspec.msgpack.decode(path.read_bytes())
    record["groups"][0]["scores"][0] += 0.25
    path.write_bytes(msgspec.msgpack.encode(record))

    with pytest.raises(WeightsDifferError, match="after step 3 differ"):
        repeat(recorded, tmp_path / "again")


def test_batch_that_repeats_another_one_is_an_error(recorded, tmp_path):
    record = recorded / "recorded"
    shutil.copyfile(record / "step_2.batch", record / "step_3.batch")

    with pytest.raises(ConfigError, match="batch of step 3 cannot be trained on"):
        repeat(recorded, tmp_path / "again")


def test_other_initial_weights_are_named(recorded, tmp_path):
    start = recorded / "recorded" / "start_0.json"
    settings = json.loads(start.read_text())
    settings["settings"]["model_name"] = str(recorded / "final_model")
    start.write_text(json.dumps(settings))
    for later in {*start.parent.glob("start_*.json")} - {start}:
        later.unlink()

    with pytest.raises(WeightsDifferError, match="before the first step differ"):
        repeat(recorded, tmp_path / "again")


def test_part_of_a_run_is_repeated(recorded, tmp_path):
    assert repeat(recorded, tmp_path / "again", num_steps=2) == 2


@pytest.mark.long
def test_command_prints_each_step_and_names_the_first_that_differs(recorded, tmp_path):
    words = [sys.executable, "-m", "atroposlib.cli.replay", "run", str(recorded)]
    again = subprocess.run([*words, "--steps", "2"], capture_output=True, text=True, check=False)
    path = recorded / "recorded" / "step_2.weights"
    path.write_text("0" * 32)
    differs = subprocess.run(words, capture_output=True, text=True, check=False)

    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1].startswith("2 steps repeated")
    assert differs.returncode == 1
    assert "after step 2 differ" in differs.stderr


def test_settings_that_changed_on_resuming_are_named(recorded, tmp_path):
    (later,) = {*(recorded / "recorded").glob("start_*.json")} - {
        recorded / "recorded" / "start_0.json"
    }
    start = json.loads(later.read_text())
    start["settings"] |= {"lr": 0.5, "quiet": True}
    later.write_text(json.dumps(start))

    with pytest.raises(ConfigError, match=r"lr was 0\.01 and became 0\.5$"):
        RecordedRun(recorded)


def test_folder_without_a_record_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="train with --record-run"):
        RecordedRun(tmp_path)


def test_record_of_another_run_is_deleted(tmp_path):
    first = TrainingRecord(tmp_path, "a")
    first.note_weights(1, "0")

    TrainingRecord(tmp_path, "a")
    assert (tmp_path / "recorded" / "step_1.weights").is_file()
    TrainingRecord(tmp_path, "b")
    assert not (tmp_path / "recorded" / "step_1.weights").exists()

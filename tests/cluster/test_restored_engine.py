"""An engine that was started again gets the newest published weights, under their own version."""

from __future__ import annotations

from pathlib import Path

from example_trainer.cluster.local import restore_engine
from example_trainer.launch.options import RunPaths
from example_trainer.weight_sync import DISK_TRANSPORT, STEP_FILE, export_for_engine
from tests.trainer.tiny import tiny_llama


def test_restored_engine_has_the_version_of_its_weights(tmp_path, monkeypatch):
    loaded = []

    class Control:
        def __init__(self, url: str) -> None:
            self.url = url

        def reload_weights(self, weights: Path, *, pause_mode: str, version: int) -> None:
            loaded.append((self.url, weights, version))

        def close(self) -> None:
            pass

    monkeypatch.setattr("example_trainer.cluster.local.EngineControl", Control)
    assert restore_engine("http://engine", tmp_path) is None
    weights = RunPaths(tmp_path).checkpoints / DISK_TRANSPORT
    export_for_engine(tiny_llama(), weights, step=6)  # the trainer may be at step 8

    line = restore_engine("http://engine", tmp_path)

    assert loaded == [("http://engine", weights, 6)]
    assert line == "the engine has the weights of step 6 again"


def test_weights_that_cannot_be_read_are_a_line_and_end_no_run(tmp_path):
    weights = RunPaths(tmp_path).checkpoints / DISK_TRANSPORT
    (weights / STEP_FILE).mkdir(parents=True)

    line = restore_engine("http://engine", tmp_path)

    assert line.startswith("the engine serves the first weights until the next update: ")

"""A training run that publishes its weights."""

from __future__ import annotations

import errno
import json
import threading

import httpx
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from atroposlib.errors import ConfigError
from example_trainer.trainers import train
from example_trainer.weights.format import WeightsError
from example_trainer.weights.publishing import WeightsPublisher
from example_trainer.weights.store import StoreError, WeightStore
from example_trainer.weights.training_sync import (
    BackgroundPublisher,
    PublishingSync,
    stage_weights,
)
from tests.trainer.test_trainers import ScriptedEnvironment, batches, run_config
from tests.trainer.tiny import SavedTokenizer, save_tiny_model, tiny_config, tiny_llama
from tests.trainer.weights.checkpoints import follow_once, some_tensors, write_checkpoint

pytestmark = pytest.mark.slow


def test_run_publishes_its_start_each_sync_and_its_end(tmp_path, service):
    save_tiny_model(tmp_path / "model")
    store = WeightStore(str(tmp_path / "store"))
    config = run_config(
        tmp_path,
        service,
        "saves",
        weight_bridge_mode="off",
        vllm_restart_interval=2,
        publish_weights=str(tmp_path / "store"),
    )

    with ScriptedEnvironment(service.url, batches(4)):
        final = train(config)

    published = follow_once(store, tmp_path / "into")
    trained = load_file(final / "model.safetensors")
    current = tmp_path / "into" / "current"
    assert store.manifest().head.version == 4
    assert {name: value.bfloat16().tolist() for name, value in trained.items()} == {
        name: value.tolist() for name, value in published.items()
    }
    assert json.loads((current / "config.json").read_text())["dtype"] == "bfloat16"
    assert (current / "tokenizer.json").is_file()
    assert LlamaForCausalLM.from_pretrained(current).dtype == torch.bfloat16
    assert not list((tmp_path / "saves" / "published_weights").glob("staged-*"))

    with pytest.raises(ConfigError, match="has version 4 of another run"):
        train(config)
    httpx.get(f"{service.url}/reset_data")
    longer = config.model_copy(update={"resume": True, "training_steps": 6})
    with ScriptedEnvironment(service.url, batches(6)):
        train(longer)
    assert store.manifest().head.version == 6


def test_run_with_lora_or_without_syncs_cannot_publish(tmp_path):
    for wrong in ({"weight_bridge_mode": "lora_only"}, {"vllm_restart_interval": 0}):
        with pytest.raises(ValueError, match="publish_weights"):
            tiny_config(tmp_path, publish_weights="store", **wrong)


def tied_llama():
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.mark.parametrize("unties", [False, True])
def test_staged_copy_of_a_tied_model_has_its_output_layer_once_or_untied(tmp_path, unties):
    model = tied_llama()

    stage_weights(model, tmp_path / "staged", dtype="bfloat16", unties=unties)

    staged = load_file(tmp_path / "staged" / "model.safetensors")
    assert ("lm_head.weight" in staged) is unties
    settings = json.loads((tmp_path / "staged" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is not unties
    assert {value.dtype for value in staged.values()} == {torch.bfloat16}


def test_staged_copy_as_trained_keeps_every_bit(tmp_path):
    model = tiny_llama()

    stage_weights(model, tmp_path / "staged", dtype="as_trained", unties=False)

    staged = load_file(tmp_path / "staged" / "model.safetensors")
    assert all(torch.equal(value, staged[name]) for name, value in model.state_dict().items())


def test_full_disk_names_the_folder_of_the_staged_copy(tmp_path, monkeypatch):
    def fill_disk(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    model = tiny_llama()
    monkeypatch.setattr(model, "save_pretrained", fill_disk)

    with pytest.raises(OSError, match=r"No space left on device: .*staged") as full:
        stage_weights(model, tmp_path / "staged", dtype="as_trained", unties=False)

    assert full.value.errno == errno.ENOSPC


class HeldPublisher(WeightsPublisher):
    """Publishes nothing before `released`; fails while there are `failures`."""

    def __init__(self, store, mirror, failures=(), **options):
        super().__init__(store, mirror, **options)
        self.released = threading.Event()
        self.started = threading.Event()
        self.failures = list(failures)

    def publish(self, source, version, *, rewinds=False):
        self.started.set()
        self.released.wait()
        if self.failures:
            raise self.failures.pop(0)
        return super().publish(source, version, rewinds=rewinds)


def staged(tmp_path, version):
    return write_checkpoint(tmp_path / f"staged-{version}", some_tensors(version))


def test_versions_faster_than_the_upload_are_left_out_and_the_last_is_published(tmp_path, caplog):
    store = WeightStore(str(tmp_path / "store"))
    publisher = HeldPublisher(store, tmp_path / "mirror")
    publisher.open()
    background = BackgroundPublisher(publisher)

    background.submit(staged(tmp_path, 1), 1)
    publisher.started.wait()
    for version in (2, 3, 4):
        background.submit(staged(tmp_path, version), version)
    publisher.released.set()
    background.close()

    assert [entry.version for entry in store.manifest().versions] == [1, 4]
    assert "version 3 was not published: version 4 came before its turn" in caplog.text
    assert not list(tmp_path.glob("staged-*"))


def test_store_that_fails_for_a_while_is_retried(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("example_trainer.weights.training_sync._RETRY_S", (0, 0))
    store = WeightStore(str(tmp_path / "store"))
    publisher = HeldPublisher(store, tmp_path / "mirror", [StoreError("timed out")] * 2)
    publisher.released.set()
    publisher.open()
    background = BackgroundPublisher(publisher)

    background.submit(staged(tmp_path, 1), 1)
    while publisher.failures:
        publisher.started.wait()
    background.close()

    assert store.manifest().head.version == 1
    assert caplog.text.count("timed out; trying again") == 2


def test_last_version_is_retried_at_the_end_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.training_sync._RETRY_S", (0, 0))
    store = WeightStore(str(tmp_path / "store"))
    publisher = HeldPublisher(store, tmp_path / "mirror", [StoreError("timed out")] * 2)
    publisher.open()
    background = BackgroundPublisher(publisher)
    background.submit(staged(tmp_path, 1), 1)
    publisher.started.wait()
    background._is_closing.set()  # as `close` does before it waits
    publisher.released.set()

    background.close()

    assert store.manifest().head.version == 1


class BrokenSync:
    mode = "none"
    publishes_final = True

    def check_before_load(self):
        pass

    def close(self):
        raise OSError("the engine cannot be stopped")


def test_publisher_ends_although_the_engine_cannot_be_stopped(tmp_path):
    url = str(tmp_path / "store")
    config = tiny_config(tmp_path, publish_weights=url, weight_bridge_mode="off")
    sync = PublishingSync(config, BrokenSync())
    sync.check_before_load()

    with pytest.raises(OSError, match="cannot be stopped"):
        sync.close()

    names = [thread.name for thread in threading.enumerate()]
    assert "weights publisher" not in names


def test_step_that_is_published_twice_does_not_lose_its_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.training_sync.WeightsPublisher", HeldPublisher)
    config = tiny_config(
        tmp_path, weight_bridge_mode="off", publish_weights=str(tmp_path / "store")
    )
    sync = PublishingSync(config, None)
    sync.check_before_load()
    publisher = sync._background._publisher
    model = tiny_llama()

    sync.start(model, SavedTokenizer(), source="tiny", step=3)
    publisher.started.wait()
    sync.publish(model, checkpoint=None, step=3)
    publisher.released.set()
    sync.close()

    assert [e.version for e in WeightStore(str(tmp_path / "store")).manifest().versions] == [3]


def test_lasting_failure_is_raised_in_the_training_loop(tmp_path, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.training_sync._RETRY_S", (0,))
    publisher = HeldPublisher(
        WeightStore(str(tmp_path / "store")), tmp_path / "mirror", [StoreError("no access")] * 2
    )
    publisher.released.set()
    publisher.open()
    background = BackgroundPublisher(publisher)

    background.submit(staged(tmp_path, 1), 1)
    with pytest.raises(WeightsError, match="version 1 was not published: no access"):
        background.close()
    with pytest.raises(WeightsError):
        background.check()


def test_second_trainer_at_the_same_store_is_refused_before_it_loads_a_model(tmp_path):
    config = tiny_config(
        tmp_path, weight_bridge_mode="off", publish_weights=str(tmp_path / "store")
    )
    first, second = PublishingSync(config, None), PublishingSync(config, None)
    first.check_before_load()

    with pytest.raises(ConfigError, match="has another publisher"):
        second.check_before_load()

    second.close()
    first.start(tiny_llama(), SavedTokenizer(), source="tiny")
    first.close()
    assert WeightStore(str(tmp_path / "store")).manifest().head.version == 0

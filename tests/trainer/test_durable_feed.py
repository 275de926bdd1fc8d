"""Whatever point a run dies at, each batch is trained once, and the service learns of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError
from atroposlib.utils.run_log import MetricsLog
from example_trainer import api, checkpointing, training
from example_trainer.api import BatchJournal, DurableFeed, checkpoint_bytes
from example_trainer.checkpointing import (
    find_intact_checkpoint,
    load_feed_state,
    load_training_state,
    save_checkpoint,
)
from example_trainer.model import create_optimizer
from example_trainer.training import Trainer
from tests.trainer.kill_supervisor import seeded_groups
from tests.trainer.tiny import SavedTokenizer, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

STEPS = 5


class Killed(BaseException):
    """The process dies here."""


class LeasingService:
    """Hands out batches under leases; a lease is over when the trainer was killed."""

    def __init__(self):
        self.waiting = [(number, [g]) for number, g in enumerate(seeded_groups(STEPS))]
        self.leased = {}
        self.attempts = {}
        self.acknowledged = []
        self.step = 0

    def next_batch(self, step):
        number, groups = self.waiting.pop(0)
        self.attempts[number] = self.attempts.get(number, 0) + 1
        token = f"{number}-{self.attempts[number]}"
        self.leased[token] = groups
        return LeasedBatch(groups, token)

    def acknowledge(self, batch_id, *, steps_done):
        if batch_id in self.leased:
            del self.leased[batch_id]
            self.acknowledged.append(batch_id)
            self.step += steps_done > self.step

    def report_policy(self, version):
        pass

    def let_leases_run_out(self):
        back = [(int(token.partition("-")[0]), groups) for token, groups in self.leased.items()]
        self.leased = {}
        self.waiting = sorted([*back, *self.waiting], key=lambda batch: batch[0])


def live(tmp_path, service, *, resume, checkpoint_interval=2, journal_limit_bytes=2**30):
    """One life of a trainer, put together as `trainers.train` does."""
    random.seed(5)
    np.random.seed(5)
    config = tiny_config(
        tmp_path,
        training_steps=STEPS,
        checkpoint_interval=checkpoint_interval,
        weight_bridge_mode="off",
        warmup_steps=3,
        keep_checkpoints=1,
    )
    journal = BatchJournal.open(config.save_path, resume=resume)
    checkpoint = None
    if resume:
        places = (config.save_path, journal.directory)
        checkpoint = find_intact_checkpoint(*places, run_id=journal.run_id)
    model = tiny_llama(seed=5)
    if checkpoint is not None:
        model = type(model).from_pretrained(checkpoint).train()
    optimizer = create_optimizer(model, config)
    steps_done = load_training_state(checkpoint, optimizer) if checkpoint else 0
    state = load_feed_state(checkpoint) if checkpoint else None
    feed = DurableFeed(service, journal, state, journal_limit_bytes=journal_limit_bytes)
    feed.settle(steps_done)
    trainer = Trainer(
        config,
        model=model,
        tokenizer=SavedTokenizer(),
        optimizer=optimizer,
        feed=feed,
        weight_sync=None,
        run_log=MetricsLog(use_wandb=False, metrics_path=tmp_path / "metrics.jsonl"),
        steps_done=steps_done,
    )
    return (trainer.run() / "model.safetensors").read_bytes()


def kill_at(monkeypatch, owner, name, *, call, after=False):
    """Let the given call of a function be the last thing that happens, or nearly happens."""
    real = getattr(owner, name)
    calls = []

    def dying(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and not after:
            raise Killed(name)
        result = real(*args, **kwargs)
        if len(calls) == call:
            raise Killed(name)
        return result

    monkeypatch.setattr(owner, name, dying)


MOMENTS = {
    "leased, not in the journal": (BatchJournal, "write", 3, False),
    "in the journal, not trained": (BatchJournal, "write", 3, True),
    "trained, not acknowledged": (Trainer, "train_on", 3, True),
    "acknowledged, no checkpoint yet": (LeasingService, "acknowledge", 4, True),
    "checkpoint half written": (checkpointing, "save_training_state", 2, False),
    "checkpoint written, not in place": (checkpointing, "_exchange", 2, False),
    "checkpoint in place, journal not cut": (BatchJournal, "forget_through", 1, False),
    "checkpoint in place, old one not dropped": (training, "drop_old_checkpoints", 2, False),
    "checkpoint in place, not acknowledged": (training, "drop_old_checkpoints", 2, True),
    "before the final model": (LeasingService, "acknowledge", STEPS + 1, True),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final weights of a run nobody kills."""
    return live(tmp_path_factory.mktemp("undisturbed"), LeasingService(), resume=False)


@pytest.mark.parametrize("leases_run_out", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_run_killed_at_a_named_moment_ends_as_if_undisturbed(
    tmp_path, monkeypatch, undisturbed, moment, leases_run_out
):
    service = LeasingService()
    with monkeypatch.context() as patch:
        owner, name, call, after = MOMENTS[moment]
        kill_at(patch, owner, name, call=call, after=after)
        with pytest.raises(Killed):
            live(tmp_path, service, resume=False)
    if leases_run_out or moment.startswith("leased"):
        service.let_leases_run_out()

    final = live(tmp_path, service, resume=True)

    assert final == undisturbed
    assert service.waiting == []
    assert service.leased == {}
    assert service.step == STEPS
    assert sorted({token.partition("-")[0] for token in service.acknowledged}) == list("01234")


JOURNAL_MOMENTS = {
    "before there is one": (Trainer, "train_on", 1, True),
    "half written": (checkpointing, "save_training_state", 1, False),
    "in place, records not cut": (BatchJournal, "forget_through", 1, False),
    "in place, older one not dropped": (api, "drop_checkpoints_before", 2, False),
    "in place, batch not acknowledged": (api, "drop_checkpoints_before", 2, True),
}


@pytest.mark.parametrize("moment", JOURNAL_MOMENTS)
@pytest.mark.long
def test_run_without_checkpoints_keeps_its_journal_small_and_survives_being_killed(
    tmp_path, monkeypatch, undisturbed, moment
):
    # A record has some hundreds of bytes: the journal is cut every few steps.
    settings = {"checkpoint_interval": 0, "journal_limit_bytes": 1000}
    service = LeasingService()
    with monkeypatch.context() as patch:
        owner, name, call, after = JOURNAL_MOMENTS[moment]
        kill_at(patch, owner, name, call=call, after=after)
        with pytest.raises(Killed):
            live(tmp_path, service, resume=False, **settings)

    final = live(tmp_path, service, resume=True, **settings)

    assert final == undisturbed
    assert (service.waiting, service.leased) == ([], {})
    saves = tmp_path / "saves"
    assert sorted(path.name for path in saves.iterdir()) == ["final_model", "journal"]
    journal = BatchJournal.open(saves, resume=True)
    assert journal.size_bytes < settings["journal_limit_bytes"]
    is_left_over = moment == "in place, older one not dropped"
    checkpoints = [path for path in journal.directory.glob("step_*") if path.is_dir()]
    assert len(checkpoints) == 1 + is_left_over  # until the next one is written


def test_run_without_checkpoints_and_with_a_small_journal_writes_none(tmp_path, undisturbed):
    final = live(tmp_path, LeasingService(), resume=False, checkpoint_interval=0)

    journal = BatchJournal.open(tmp_path / "saves", resume=True)
    assert final == undisturbed
    assert journal.count_after(0) == STEPS
    assert journal.size_bytes == sum(journal.path_of(n).stat().st_size for n in range(1, STEPS + 1))


def test_new_run_empties_the_journal_of_the_old_one(tmp_path):
    live(tmp_path, LeasingService(), resume=False, checkpoint_interval=0, journal_limit_bytes=1000)

    journal = BatchJournal.open(tmp_path / "saves", resume=False)

    assert [path.name for path in journal.directory.iterdir()] == ["run.json"]
    assert journal.size_bytes == 0


def test_checkpoint_takes_the_weights_and_two_moments_of_what_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).requires_grad_(False))

    assert checkpoint_bytes(model, trained_only=False) == 4 * (8 + 3 + 2 * 8)
    assert checkpoint_bytes(model, trained_only=True) == 4 * 3 * 8


def test_new_run_in_the_same_directory_repeats_nothing_of_the_old_one(tmp_path, undisturbed):
    live(tmp_path, LeasingService(), resume=False)
    service = LeasingService()

    final = live(tmp_path, service, resume=False)

    assert final == undisturbed
    assert len(service.acknowledged) == STEPS


def test_refused_batch_is_set_aside_and_acknowledged(tmp_path, caplog):
    service = LeasingService()
    feed = DurableFeed(service, BatchJournal.open(tmp_path, resume=False))
    batch = feed.next_batch(0)

    feed.refuse(0, batch.batch_id)

    assert (service.acknowledged, service.step) == (["0-1"], 0)
    assert [path.name for path in (tmp_path / "journal").glob("*.batch")] == ["refused_1.batch"]
    assert "batch 0-1 is rejected and kept as" in caplog.text
    assert feed.next_batch(0).batch_id == "1-1"


def test_refused_batches_do_not_fill_the_disk(tmp_path):
    service = LeasingService()
    service.waiting = [(number, [{"scores": [number]}]) for number in range(20)]
    feed = DurableFeed(service, BatchJournal.open(tmp_path, resume=False))

    for _ in range(20):
        batch = feed.next_batch(0)
        feed.refuse(0, batch.batch_id)

    kept = {path.name for path in (tmp_path / "journal").glob("*.batch")}
    assert kept == {f"refused_{number}.batch" for number in range(5, 21)}


def test_same_number_from_a_service_that_was_reset_is_another_batch(tmp_path):
    service = LeasingService()
    feed = DurableFeed(service, BatchJournal.open(tmp_path, resume=False))
    feed.next_batch(0)
    service.waiting = [(0, seeded_groups(1, seed=9))]

    assert feed.next_batch(1).groups == seeded_groups(1, seed=9)


def test_broken_record_is_refused_with_its_path(tmp_path):
    journal = BatchJournal.open(tmp_path, resume=False)
    journal.path_of(1).write_bytes(b"half")

    with pytest.raises(ConfigError, match=r"step_1\.batch is not a batch record"):
        journal.read(1)


def test_services_without_leases_are_journalled_too(tmp_path):
    journal = BatchJournal.open(tmp_path, resume=False)
    journal.write(1, LeasedBatch([{"tokens": [[1]]}], None))

    again = BatchJournal.open(tmp_path, resume=True)

    assert again.read(1) == LeasedBatch([{"tokens": [[1]]}], None)
    assert again.count_after(0) == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"run_id": 3}'])
def test_run_that_nothing_names_is_not_resumed(tmp_path, content):
    journal = BatchJournal.open(tmp_path, resume=False)
    journal.write(1, LeasedBatch([{"scores": [1.0]}], "0-1"))
    marker = tmp_path / "journal" / "run.json"
    marker.unlink()
    if content is not None:
        marker.write_text(content)

    with pytest.raises(ConfigError, match=r"--resume: .*run\.json"):
        BatchJournal.open(tmp_path, resume=True)

    assert journal.read(1) is not None, "what could be restored is gone"


def test_checkpoint_of_a_version_that_did_not_name_runs_is_resumed(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(model, SavedTokenizer(), tmp_path, 1, optimizer=optimizer)

    journal = BatchJournal.open(tmp_path, resume=True)

    assert find_intact_checkpoint(tmp_path, run_id=journal.run_id) == tmp_path / "step_1"


def test_journal_exists_once_a_run_has_opened_it(tmp_path):
    before = BatchJournal.exists(tmp_path)
    BatchJournal.open(tmp_path, resume=False)

    assert (before, BatchJournal.exists(tmp_path)) == (False, True)

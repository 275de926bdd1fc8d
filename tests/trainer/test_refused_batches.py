"""Batches that cannot be trained on are no steps: environments stay until the trainer is done."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.api.client import LeasedBatch
from atroposlib.envs import base
from atroposlib.errors import GroupError
from atroposlib.utils.run_log import MetricsLog
from example_trainer.api import BatchJournal, DurableFeed, TrajectoryFeed, open_client
from example_trainer.batch import build_batch
from example_trainer.model import create_optimizer
from example_trainer.rows import RowRules
from example_trainer.training import Trainer
from tests.envs.conftest import CharTokenizers
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.trainer.tiny import VOCAB, SavedTokenizer, group, tiny_config, tiny_llama

STEPS = 3


class MixedEnv(SmallEnv):
    """Every other item gives a group with a token that the model does not know."""

    async def collect_trajectory(self, item):
        trajectory, backlog = await super().collect_trajectory(item)
        last = VOCAB + 5 if item % 2 else 7
        return {**trajectory, "tokens": [1, 2, last], "masks": [-100, 2, last]}, backlog


def train(config):
    """Train a new run like `trainers.train`, without an engine."""
    model = tiny_llama()
    with open_client(config.atropos_url) as client:
        service = TrajectoryFeed(client, config)
        service.register(0)
        trainer = Trainer(
            config,
            model=model,
            tokenizer=SavedTokenizer(),
            optimizer=create_optimizer(model, config),
            feed=DurableFeed(service, BatchJournal.open(config.save_path, resume=False)),
            weight_sync=None,
            run_log=MetricsLog(use_wandb=False, metrics_path=None),
        )
        trainer.run()
        return trainer.steps_done, client.status()["current_step"]


async def test_environment_stays_until_the_last_step_although_batches_are_refused(
    service, tmp_path, monkeypatch
):
    monkeypatch.setitem(vars(base), "AutoTokenizer", CharTokenizers)
    monkeypatch.chdir(tmp_path)
    config = tiny_config(
        tmp_path,
        training_steps=STEPS,
        atropos_url=service.url,
        batch_size=2,
        gradient_accumulation_steps=1,
        weight_bridge_mode="off",
        service_timeout_s=1.0,
    )
    # One rollout at a time, so that good and bad groups take turns.
    env = MixedEnv(small_config(rollout_server_url=service.url, max_num_workers=1), SERVERS)

    training = asyncio.create_task(asyncio.to_thread(train, config))
    serving = asyncio.create_task(env.env_manager())
    try:
        await asyncio.wait({training, serving}, timeout=120)
        assert training.done(), "the trainer waits for a batch after its environment has left"
        assert serving.done(), "the environment does not end with the trainer"
    finally:
        service.stop()  # a trainer that waits for a batch gives up
        serving.cancel()
        await asyncio.wait({training, serving})

    assert training.result() == (STEPS, STEPS)
    assert env.curr_step == STEPS
    refused = list((tmp_path / "saves" / "journal").glob("refused_*.batch"))
    assert len(refused) >= STEPS - 1


class OneBatch:
    """Delivers these groups as the only batch, with the id 0-1."""

    def __init__(self, groups):
        self.groups = groups
        self.acknowledged = []

    def next_batch(self, step):
        return LeasedBatch(self.groups, "0-1")

    def acknowledge(self, batch_id, *, steps_done):
        self.acknowledged.append((batch_id, steps_done))


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_batch_with_integers_beyond_64_bits_is_recorded_as_it_is_delivered(tmp_path):
    sent = {"tokens": [[1, -(10**30)]], "messages": [[10**30, 10**400, 2**64 - 1]]}
    feed = DurableFeed(OneBatch([sent]), BatchJournal.open(tmp_path, resume=False))

    (given,) = feed.next_batch(0).groups

    assert given["messages"] == [[1e30, str(10**400), 2**64 - 1]]
    assert given["tokens"] == [[1, -1e30]]
    assert BatchJournal.open(tmp_path, resume=True).read(1).groups == [given]


def test_batch_with_a_deeply_nested_field_is_recorded_without_it(tmp_path, caplog):
    service = OneBatch([{"tokens": [[1]], "messages": nested(10_000)}])
    feed = DurableFeed(service, BatchJournal.open(tmp_path, resume=False))

    batch = feed.next_batch(0)

    assert batch.groups == [{"tokens": [[1]], "messages": None}]
    assert "the field 'messages' of a group is left out: it is nested too deeply" in caplog.text


@pytest.mark.parametrize("broken", [{"tokens": [["a"] * 4] * 2}, {"scores": ["1", "2"]}])
def test_batch_with_wrong_types_in_the_journal_is_refused_once_in_a_resumed_run(tmp_path, broken):
    journal = BatchJournal.open(tmp_path, resume=False)
    journal.write(1, LeasedBatch([group([[7], [8]], [1.0, 0.0]) | broken], "0-1"))
    service = OneBatch([])
    feed = DurableFeed(service, BatchJournal.open(tmp_path, resume=True))
    batch = feed.next_batch(0)

    with pytest.raises(GroupError, match=f"group 0: {next(iter(broken))}"):
        build_batch(batch.groups, RowRules(seq_len=64), microbatch_size=2)
    feed.refuse(0, batch.batch_id)

    assert service.acknowledged == [("0-1", 0)]
    assert not journal.path_of(1).exists()

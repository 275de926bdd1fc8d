"""Batches that cannot be trained on are no steps: environments stay until the trainer is done."""

from __future__ import annotations

import asyncio

from atroposlib.envs import base
from atroposlib.utils.run_log import MetricsLog
from example_trainer.api import BatchJournal, DurableFeed, TrajectoryFeed, open_client
from example_trainer.model import create_optimizer
from example_trainer.training import Trainer
from tests.envs.conftest import CharTokenizers
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.trainer.tiny import VOCAB, SavedTokenizer, tiny_config, tiny_llama

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

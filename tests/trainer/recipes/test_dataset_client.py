"""A trainer that reads batches through a dataset of its own, as plugins of other trainers do.

It registers without names for Weights & Biases and polls `GET /batch`, in a worker of torch's
`DataLoader` that fetches ahead; nothing of ours runs on its side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from torch.utils.data import DataLoader, IterableDataset

from tests.envs import conftest as envs_conftest
from tests.envs.live_service import LiveService
from tests.envs.small_environment import SmallEnv

make_env, service = envs_conftest.make_env, envs_conftest.service

NUM_STEPS = 4


class Batches(IterableDataset):
    """The groups of a run; registers when iteration begins."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            registration = {
                "wandb_group": None,
                "wandb_project": None,
                "batch_size": 4,
                "max_token_len": 64,
                "checkpoint_dir": "",
                "save_checkpoint_interval": NUM_STEPS,
                "starting_step": 0,
                "num_steps": NUM_STEPS,
            }
            client.post("/register", json=registration).raise_for_status()
            num_batches = 0
            while num_batches < NUM_STEPS:
                batch = client.get("/batch").raise_for_status().json()["batch"]
                if batch is None:
                    time.sleep(0.01)
                    continue
                num_batches += 1
                yield batch


def train(url: str) -> list[list[dict[str, Any]]]:
    loader = DataLoader(
        Batches(url),
        batch_size=None,
        num_workers=1,
        prefetch_factor=2,
        multiprocessing_context="spawn",
    )
    return list(loader)


@pytest.mark.long
async def test_a_dataset_that_polls_leaves_nothing_leased_and_the_environment_ends(
    service: LiveService, make_env: Any
) -> None:
    service.start()
    env = make_env(SmallEnv, rollout_server_url=service.url, total_steps=1000)
    serving = asyncio.create_task(env.env_manager())

    batches = await asyncio.wait_for(asyncio.to_thread(train, service.url), 240)
    await asyncio.wait_for(serving, 120)

    assert [sum(len(group["scores"]) for group in batch) for batch in batches] == [4] * NUM_STEPS
    async with httpx.AsyncClient(base_url=service.url) as client:
        left = (await client.get("/status")).json()
    assert left["current_step"] == env.curr_step == NUM_STEPS
    assert "leased_batches" not in left
    assert env.events == ["setup", "close"]

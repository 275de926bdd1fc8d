"""Both clients against a service that knows only the surface of May 2025."""

from __future__ import annotations

import asyncio

from atroposlib.api.client import TrainerClient, TrajectoryApiClient
from tests.api.helpers import REGISTRATION, make_group
from tests.api.may_2025_service import FIELDS, May2025Service
from tests.api.scripted_service import scripted

ENV = {"max_token_length": 10, "desired_name": "e", "weight": 1.0, "group_size": 2}


async def test_environments_play_a_whole_run_with_a_service_of_may_2025(free_port):
    service = May2025Service()
    small = make_group(2, policy_version=3, inference_logprobs=[[1.0], [1.0]])
    large = make_group(2, length=2000)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        assert (await client.info())["batch_size"] == -1
        await client.register_trainer(**{**REGISTRATION, "batch_size": 4})
        assert (await client.register_env(**ENV))["status"] == "wait for trainer to start"
        assert await client.batch() is None
        env_id = (await client.register_env(**ENV))["env_id"]
        assert (await client.wandb_info())["project"] == "test"
        await client.post_group({**small, "env_id": env_id})
        await client.post_groups([large, small])
        await client.post_group(large)
        status = await client.status_env(env_id)
        batch = await client.batch()
        await client.disconnect_env(env_id)

    assert (status["self_queue_size"], status["max_group_size"]) == (0, 1)
    assert "policy_version" not in status
    assert batch is not None
    assert [group["tokens"] for group in batch] == [small["tokens"], large["tokens"]]
    assert set(batch[0]) == set(FIELDS)
    # One gzip body is tried; nothing is sent twice, since every key is another one.
    assert service.refused == [("/scored_data_list", 400)]
    assert len(set(service.keys)) == len(service.keys) == 3


async def test_trainers_play_a_whole_run_with_a_service_of_may_2025(free_port):
    service = May2025Service()

    def train(url: str) -> list[int]:
        with TrainerClient(url) as client:
            client.wait_until_up(5)
            client.register(**{**REGISTRATION, "batch_size": 2})
            assert client.batch(wait_s=20) is None
            assert client.set_policy_version(0) is False
            service.queue += [make_group(2, score=float(i)) for i in range(3)]
            plain = client.batch(wait_s=20)
            leased = client.batch(lease_s=60)
            assert plain is not None
            assert leased is not None
            client.ack(leased.batch_id)
            scores = [group["scores"][0] for group in plain + leased.groups]
            return [*scores, client.status()["current_step"]]

    async with scripted(service, free_port) as url:
        assert await asyncio.to_thread(train, url) == [0.0, 1.0, 2]

    assert service.refused == [("/policy", 404)]

"""Both clients against the real service: formats, leases, waiting, tokens, restarts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.client import RetryRule, TrainerClient, TrajectoryApiClient
from atroposlib.api.client_consumer import InspectionClient
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.errors import TrajectoryApiError
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.test_run_api import running
from tests.envs.live_service import LiveService

pytestmark = pytest.mark.slow

PATIENT = RetryRule(attempts=None, first_delay_s=0.01, max_delay_s=0.1, deadline_s=60.0)
ENV_TOKEN, TRAINER_TOKEN = "environment-token-1", "trainer-token-00001"


@pytest.fixture
def app():
    return create_app()


@pytest.fixture
def url(app, free_port):
    with serve(app, free_port) as address:
        yield address


@pytest.fixture
def trainer(url):
    with TrainerClient(url) as client:
        client.register(**{**REGISTRATION, "batch_size": 2})
        assert client.batch() is None
        yield client


def test_environments_are_listed_beyond_the_first_page(trainer, url, monkeypatch):
    monkeypatch.setattr("atroposlib.api.client_consumer._PAGE_ENTRIES", 2)
    request = {"max_token_length": 8, "desired_name": "env", "weight": 1.0}
    for _ in range(5):
        assert httpx.post(f"{url}/register-env", json=request).json()["status"] == "success"

    with InspectionClient(url) as client:
        assert [env["env_id"] for env in client.envs()] == [0, 1, 2, 3, 4]


def rich_group(rng: random.Random, **extra: Any) -> dict[str, Any]:
    """Return a group that uses every kind of field."""
    tokens = [[rng.randrange(2**31) for _ in range(length)] for length in (3, 700)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [rng.random(), -rng.random()],
        "advantages": [[rng.random() for _ in row] for row in tokens],
        "inference_logprobs": [[1.0, *(-rng.random() for _ in row[1:])] for row in tokens],
        "messages": [[{"role": "user", "content": "é"}]] * 2,
        "overrides": [{"temperature": 0.7}, {}],
        "group_overrides": {"temperature": 0.5},
        **extra,
    }


@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize("learns", [False, True])
async def test_groups_arrive_to_the_last_digit_in_either_format(url, trainer, learns, compresses):
    group = rich_group(random.Random(0))

    async with TrajectoryApiClient(url) as client:
        client._compresses = compresses
        if learns:
            await client.info()
        assert client._transport.traits.honors_keys is learns
        assert await client.post_group(group) == {"status": "received"}
        assert (await client.post_groups([group, group]))["groups_processed"] == 2
        assert await client.batch() == await asyncio.to_thread(trainer.batch)
        (delivered,) = trainer.batch() or []

    assert {name: delivered[name] for name in group} == group
    assert delivered["env_id"] is None


async def test_repeated_key_is_stored_once(url, trainer):
    async with TrajectoryApiClient(url) as client:
        for _ in range(3):
            assert await client.post_group(make_group(2), key="one") == {"status": "received"}
        await client.post_groups([make_group(2)], key="two")

        assert (await client.status())["queue_size"] == 2


async def test_leased_batch_comes_back_until_it_is_acknowledged(url, trainer):
    async with TrajectoryApiClient(url) as client:
        await client.post_group(make_group(2, score=7.0))

    first = trainer.batch(lease_s=60)
    assert first is not None
    trainer.nack(first.batch_id)
    second = trainer.batch(lease_s=60)
    assert second is not None
    assert second.groups == first.groups
    assert second.batch_id != first.batch_id
    with pytest.raises(TrajectoryApiError, match="has moved on"):
        trainer.ack(first.batch_id)
    assert trainer.status()["current_step"] == 0
    trainer.ack(second.batch_id)
    trainer.ack(second.batch_id)
    assert trainer.status()["current_step"] == 1
    assert trainer.batch(lease_s=60) is None


async def test_batch_waits_for_the_group_that_completes_it(url, trainer):
    async with TrajectoryApiClient(url) as client:
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, wait_s=20))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.post_group(make_group(2))

        assert await asyncio.wait_for(waiting, 60)


async def test_policy_version_reaches_environments_and_comes_back_with_their_groups(url, trainer):
    assert trainer.set_policy_version(3) is True

    async with TrajectoryApiClient(url) as client:
        env = await client.register_env(
            max_token_length=10, desired_name="e", weight=1.0, group_size=2
        )
        status = await client.status_env(env["env_id"])
        await client.post_group(make_group(2, policy_version=status["policy_version"]))

    assert status["policy_version"] == 3
    (group,) = trainer.batch() or []
    assert group["policy_version"] == 3


async def test_tokens_open_what_their_role_may_do(free_port, tmp_path: Path):
    token_file = tmp_path / "tokens"
    token_file.write_text(f"environment {ENV_TOKEN}\ntrainer {TRAINER_TOKEN}\n")
    token_file.chmod(0o600)
    with serve(create_app(ApiSettings(token_file=token_file)), free_port) as url:
        with (
            TrainerClient(url) as client,
            pytest.raises(TrajectoryApiError, match="set ATROPOS_API_TOKEN"),
        ):
            client.register(**REGISTRATION)
        with TrainerClient(url, token=TRAINER_TOKEN) as client:
            client.register(**REGISTRATION)
            assert client.batch() is None
        async with TrajectoryApiClient(url, token=ENV_TOKEN) as environment:
            await environment.post_group(make_group(1))
            with pytest.raises(TrajectoryApiError, match="a token of the right role") as caught:
                await environment.batch()
    assert ENV_TOKEN not in str(caught.value)


def drain(url: str) -> Counter[float]:
    """Take every batch; count the groups by their score."""
    found: Counter[float] = Counter()
    with TrainerClient(url, retry=PATIENT) as trainer:
        while (groups := trainer.batch()) is not None:
            found.update(group["scores"][0] for group in groups)
    return found


async def test_posts_outlast_the_kill_of_a_service_that_resumes_its_run(free_port, tmp_path: Path):
    flags = ("--store", "sqlite", "--data-dir", str(tmp_path), "--run", "r")
    url = f"http://localhost:{free_port}"
    num_groups, num_senders = 240, 8
    scores = iter(range(num_groups))
    is_half_way = asyncio.Event()

    async def post(client: TrajectoryApiClient) -> None:
        for score in scores:
            await client.post_group(make_group(2, length=500, score=float(score)))
            if score >= num_groups // 2:
                is_half_way.set()

    async with TrajectoryApiClient(url, retry=PATIENT, post_retry=PATIENT) as client:
        with running(free_port, *flags):
            await client.register_trainer(**{**REGISTRATION, "batch_size": 4})
            await client.info()
            senders = [asyncio.create_task(post(client)) for _ in range(num_senders)]
            await is_half_way.wait()
        # Killed while every sender has a post under way.
        with running(free_port, *flags):
            await asyncio.gather(*senders)
            found = await asyncio.to_thread(drain, url)

    assert found == Counter(float(score) for score in range(num_groups))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_service_on_this_machine_is_reached_without_a_proxy(
    host: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    service = LiveService(free_port)
    service.start()

    with TrainerClient(f"http://{host}:{free_port}", retry=RetryRule(attempts=1)) as client:
        status = client.status()

    service.stop()
    assert status["current_step"] == 0

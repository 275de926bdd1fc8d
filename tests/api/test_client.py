"""Both clients, against the real service on a port and against servers that misbehave."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from aiohttp import web

from atroposlib.api.client import TrainerClient, TrajectoryApiClient
from atroposlib.api.client_consumer import InspectionClient
from atroposlib.api.client_transport import NotReachedError, RetryRule
from atroposlib.api.server import create_app
from atroposlib.errors import ConfigError, GroupError, TrajectoryApiError
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.scripted_service import scripted

pytestmark = pytest.mark.slow

QUICK = RetryRule(first_delay_s=0.001, max_delay_s=0.002)
ENV = {"max_token_length": 10, "desired_name": "e", "weight": 1.0, "group_size": 2}


@pytest.fixture
def url(free_port):
    with serve(create_app(), free_port) as address:
        yield address


async def test_async_client_plays_a_whole_run(url):
    async with TrajectoryApiClient(url + "/") as client:
        assert (await client.info())["batch_size"] == -1
        assert isinstance(await client.register_trainer(**{**REGISTRATION, "batch_size": 4}), int)
        assert (await client.register_env(**ENV))["status"] == "wait for trainer to start"
        assert await client.batch() is None
        env_id = (await client.register_env(**ENV))["env_id"]
        assert await client.wandb_info() == {"group": "test", "project": "test"}

        small, large = make_group(2, env_id=env_id), make_group(2, length=2000, env_id=env_id)
        assert await client.post_group(small) == {"status": "received"}
        assert (await client.post_groups([large, small]))["groups_processed"] == 2
        assert (await client.status_env(env_id))["self_queue_size"] == 3
        assert (await client.latest_example())["tokens"] == small["tokens"]
        batch = await client.batch()

        assert [group["tokens"] for group in batch] == [small["tokens"], large["tokens"]]
        assert await client.status() == {"current_step": 1, "queue_size": 1}
        await client.disconnect_env(env_id)
        with pytest.raises(TrajectoryApiError, match="no environment is registered under id 7"):
            await client.disconnect_env(7)


def test_trainer_client_plays_a_whole_run(url):
    waits: list[float] = []
    with TrainerClient(url) as client:
        client.wait_until_up(5, on_wait=waits.append)
        with pytest.raises(TrajectoryApiError, match="register the trainer again"):
            client.batch()
        assert isinstance(client.register(**{**REGISTRATION, "batch_size": 1}), int)
        assert client.batch() is None
        assert client.info()["batch_size"] == 1
        assert client.status()["current_step"] == 0
        with pytest.raises(TrajectoryApiError, match="batch_size is 1, this request says 2") as e:
            client.register(**{**REGISTRATION, "batch_size": 2})
    assert e.value.status == 409
    assert waits == []


async def test_unknown_environment_is_404_and_not_repeated(url):
    async with TrajectoryApiClient(url) as client:
        with pytest.raises(TrajectoryApiError, match=r"attempt 1.*register again") as caught:
            await client.status_env(3)
    assert caught.value.status == 404


async def test_malformed_group_is_refused_before_anything_is_sent():
    async with TrajectoryApiClient("http://127.0.0.1:1") as client:
        with pytest.raises(GroupError, match="scores: 2 entries, tokens has 1"):
            await client.post_group(make_group(1, scores=[1.0, 2.0]))


async def test_service_that_is_down_is_tried_again_and_named(free_port):
    url = f"http://127.0.0.1:{free_port}"
    async with TrajectoryApiClient(url, post_retry=QUICK) as client:
        with pytest.raises(NotReachedError, match=r"attempt 3.*`run-api` starts one") as caught:
            await client.post_group(make_group(1))
    assert caught.value.status is None
    assert f"{url}/scored_data" in str(caught.value)


def test_wait_until_up_tells_how_long_and_gives_up(free_port):
    waits: list[float] = []
    with (
        TrainerClient(f"http://127.0.0.1:{free_port}", sleep=lambda _: None) as client,
        pytest.raises(TrajectoryApiError, match="no trajectory service after"),
    ):
        client.wait_until_up(0.5, on_wait=waits.append)

    assert waits
    assert waits == sorted(waits)


def test_trainer_client_repeats_failed_requests_with_growing_pauses(free_port):
    pauses: list[float] = []
    with (
        TrainerClient(f"http://127.0.0.1:{free_port}", sleep=pauses.append) as client,
        pytest.raises(TrajectoryApiError, match="attempt 3"),
    ):
        client.status()

    assert pauses == [0.2, 0.8]


def test_trainer_client_that_waits_for_the_service_says_so_ever_more_rarely(free_port, caplog):
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    patient = RetryRule(attempts=None, deadline_s=600.0)
    url = f"http://127.0.0.1:{free_port}"
    with (
        TrainerClient(url, retry=patient, sleep=sleep, clock=lambda: now) as client,
        pytest.raises(NotReachedError, match="`run-api` starts one") as caught,
    ):
        client.status()

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"GET {url}/status got no answer (attempt 1)" in told[0]
    assert [line.rpartition("; ")[2] for line in told] == ["retrying for up to 600 s in total"] * 6
    assert "(for 34 s now)" in told[1]  # the first attempt after half a minute
    assert len("".join(traceback.format_exception(caught.value)).split("Traceback")) == 2


def test_trainer_client_that_tries_a_few_times_leaves_it_to_its_error(free_port, caplog):
    with (
        TrainerClient(f"http://127.0.0.1:{free_port}", sleep=lambda _: None) as client,
        pytest.raises(NotReachedError),
    ):
        client.status()

    assert not caplog.records


@pytest.mark.parametrize("client", [TrainerClient, TrajectoryApiClient, InspectionClient])
def test_address_without_its_scheme_is_refused_at_once(client):
    with pytest.raises(ConfigError, match="'localhost:8000'; expected an address such as http://"):
        client("localhost:8000")


async def test_older_service_s_status_is_completed(free_port):
    async def handler(request: web.Request) -> web.Response:
        assert await request.json() == {"env_id": 0}
        return web.json_response({"current_step": 1, "queue_size": 2, "env_weight": 0.5})

    async with scripted(handler, free_port) as url, TrajectoryApiClient(url) as client:
        status = await client.status_env(0)

    assert status == {
        "current_step": 1,
        "queue_size": 2,
        "env_weight": 0.5,
        "self_queue_size": 0,
        "max_group_size": 1,
        "unallocated_fraction": 1.0,
    }


async def test_slow_service_is_an_error_that_says_so(free_port):
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.json_response({})

    async with (
        scripted(handler, free_port) as url,
        TrajectoryApiClient(url, timeout_s=0.05, retry=QUICK._replace(attempts=1)) as client,
    ):
        with pytest.raises(TrajectoryApiError, match=r"got no answer .*Timeout"):
            await client.info()


async def test_answer_that_is_not_json_is_an_error(free_port):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy</html>")

    async with scripted(handler, free_port) as url, TrajectoryApiClient(url) as client:
        with pytest.raises(TrajectoryApiError, match=r"answered 200 .*a proxy"):
            await client.info()

"""The token is shown to the service and to nobody else."""

from __future__ import annotations

import logging
import pprint

import pytest
from aiohttp import web

from atroposlib.api.client import RetryRule, TrainerClient, TrajectoryApiClient
from atroposlib.errors import TrajectoryApiError
from tests.api.helpers import make_group
from tests.api.scripted_service import scripted

TOKEN = "tr0ub4dor-and-3-horses"
QUICK = RetryRule(first_delay_s=0.001, max_delay_s=0.002)


async def test_token_is_sent_with_every_request(free_port):
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"status": "received"})

    async with scripted(handler, free_port) as url:
        async with TrajectoryApiClient(url, token=TOKEN) as client:
            await client.latest_example()
            await client.post_group(make_group(1))
        async with TrajectoryApiClient(url) as client:
            await client.latest_example()

    assert seen == [f"Bearer {TOKEN}", f"Bearer {TOKEN}", None]


@pytest.mark.parametrize(
    ("status", "says"), [(401, "set ATROPOS_API_TOKEN"), (403, "environment, trainer or admin")]
)
async def test_refused_token_is_an_error_that_helps_and_shows_nothing(
    free_port, status, says, caplog
):
    async def handler(request: web.Request) -> web.Response:
        # As some proxies do in their error pages.
        return web.Response(status=status, text=f"refused {request.headers['Authorization']}")

    caplog.set_level(logging.DEBUG)
    async with (
        scripted(handler, free_port) as url,
        TrajectoryApiClient(url, token=TOKEN, retry=QUICK) as client,
    ):
        with pytest.raises(TrajectoryApiError, match=says) as caught:
            await client.post_group(make_group(1))

        assert caught.value.status == status
        shown = [str(caught.value), repr(caught.value), repr(client), repr(client._transport)]
        assert TOKEN not in "".join(shown) + caplog.text


async def test_unreachable_service_shows_no_token(free_port, caplog):
    url = f"http://127.0.0.1:{free_port}"
    caplog.set_level(logging.DEBUG)

    async with TrajectoryApiClient(url, token=TOKEN, retry=QUICK, post_retry=QUICK) as client:
        with pytest.raises(TrajectoryApiError) as from_async:
            await client.post_group(make_group(1))
    with TrainerClient(url, token=TOKEN, retry=QUICK) as trainer:
        with pytest.raises(TrajectoryApiError) as from_sync:
            trainer.status()
        shown = pprint.pformat([repr(trainer), repr(trainer._client)])

    assert TOKEN not in f"{from_async.value}{from_sync.value}{shown}{caplog.text}"

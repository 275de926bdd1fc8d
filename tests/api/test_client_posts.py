"""How groups get to services old and new, busy and broken; the answers are scripted."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from itertools import pairwise

import pytest
from aiohttp import web

from atroposlib.api.client import RetryRule, TrajectoryApiClient
from atroposlib.errors import GroupError, TrajectoryApiError
from tests.api.helpers import make_group
from tests.api.scripted_service import ScriptedService, scripted

QUICK = RetryRule(first_delay_s=0.001, max_delay_s=0.002)
PATIENT = RetryRule(attempts=None, first_delay_s=0.001, max_delay_s=0.01, deadline_s=5.0)
MSGPACK, JSON = "application/msgpack", "application/json"
RECEIVED = {"status": "received"}


def busy(seconds: str) -> web.Response:
    return web.json_response({"detail": "full"}, status=503, headers={"Retry-After": seconds})


async def test_post_takes_the_binary_format_once_it_is_offered(free_port):
    service = ScriptedService(200)
    group = make_group(1, length=2000)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.post_group(group)
        await client.info()
        assert await client.post_group(group) == RECEIVED
        assert await client.post_groups([group]) == RECEIVED

    assert service.sent("Content-Type") == [JSON, MSGPACK, MSGPACK]
    assert service.sent("Content-Encoding") == ["gzip", None, None]
    assert [request.path for request in service.posts][1:] == ["/scored_data", "/scored_data_list"]


@pytest.mark.parametrize("refusal", [400, 415, 422])
async def test_post_falls_back_to_json_for_an_older_service_that_took_over(free_port, refusal):
    service = ScriptedService(refusal, 200)
    group = make_group(1)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.info()
        service.is_current = False
        for _ in range(2):
            assert await client.post_group(group) == RECEIVED
        service.is_current = True
        await client.info()
        await client.post_group(group)

    assert service.sent("Content-Type") == [MSGPACK, JSON, JSON, MSGPACK]
    keys = service.sent("Idempotency-Key")
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert json.loads(service.bodies[1])["tokens"] == group["tokens"]


async def test_post_falls_back_over_gzip_to_plain_json(free_port):
    service = ScriptedService(415, 400, 200)
    group = make_group(1, length=2000)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.info()
        for _ in range(2):
            assert await client.post_group(group) == RECEIVED

    assert service.sent("Content-Type") == [MSGPACK, JSON, JSON, JSON]
    assert service.sent("Content-Encoding") == [None, "gzip", None, None]


@pytest.mark.parametrize("refusal", [400, 415, 422])
async def test_post_to_service_without_gzip_is_plain_json_from_then_on(free_port, refusal):
    service = ScriptedService(refusal, 200, is_current=False)
    group = make_group(1, length=2000)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        for _ in range(2):
            assert await client.post_group(group) == RECEIVED

    assert service.sent("Content-Encoding") == ["gzip", None, None]
    assert json.loads(service.bodies[-1])["tokens"] == group["tokens"]


@pytest.mark.parametrize(("length", "encoding"), [(10, None), (2000, "gzip")])
async def test_post_compresses_only_large_groups(free_port, length, encoding):
    service = ScriptedService(200, is_current=False)
    group = make_group(1, length=length)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.post_group(group)

    assert service.sent("Content-Encoding") == [encoding]
    (body,) = service.bodies
    assert json.loads(gzip.decompress(body) if encoding else body)["tokens"] == group["tokens"]


async def test_post_of_many_pieces_arrives_whole(free_port):
    service = ScriptedService(200, is_current=False)
    group = make_group(1, messages=[[{"role": "user", "content": "x" * 3_000_000}]])

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        client._transport.traits._takes_gzip = False
        await client.post_group(group)

    assert json.loads(service.bodies[0])["messages"] == group["messages"]
    assert service.sent("Content-Length") == [str(len(service.bodies[0]))]


async def test_post_refused_for_its_content_keeps_the_format(free_port):
    service = ScriptedService(422)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.info()
        with pytest.raises(TrajectoryApiError, match="answered 422"):
            await client.post_group(make_group(1))
        service.answers = [200]
        await client.post_group(make_group(1))

    assert service.sent("Content-Type") == [MSGPACK, JSON, MSGPACK]


async def test_post_of_a_malformed_group_sends_nothing():
    async with TrajectoryApiClient("http://127.0.0.1:1") as client:
        with pytest.raises(GroupError, match="scores: 2 entries, tokens has 1"):
            await client.post_group(make_group(1, scores=[1.0, 2.0]))


async def test_post_repeats_under_one_key_until_the_service_is_well(free_port, caplog):
    service = ScriptedService(500, 502, 500, busy("0"), 200)

    async with (
        scripted(service, free_port) as url,
        TrajectoryApiClient(url, post_retry=PATIENT) as client,
    ):
        await client.info()
        with caplog.at_level(logging.WARNING):
            await client.post_group(make_group(1))
        await client.post_group(make_group(1))

    keys = service.sent("Idempotency-Key")
    assert len(keys) == 6
    assert len(set(keys[:5])) == 1
    assert keys[5] != keys[0]
    assert all(len(str(key)) == 32 for key in keys)
    # Every reason once: 500, 502, 503.
    assert caplog.text.count("retrying until the service responds") == 3


async def test_post_uses_the_key_of_its_caller(free_port):
    service = ScriptedService(200)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        await client.post_group(make_group(1), key="mine")
        await client.post_groups([make_group(1)], key="ours")

    assert service.sent("Idempotency-Key") == ["mine", "ours"]


@pytest.mark.parametrize(("is_current", "num_posts"), [(True, 3), (False, 1)])
async def test_post_whose_answer_is_lost_is_repeated_where_keys_are_honoured(
    free_port, is_current, num_posts
):
    posts: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await ScriptedService(is_current=is_current)(request)
        posts.append(request.headers["Idempotency-Key"])
        assert request.transport is not None
        if len(posts) < 3:
            await request.read()
            request.transport.close()  # taken, but the answer never leaves
        return web.json_response(RECEIVED)

    async with (
        scripted(handler, free_port) as url,
        TrajectoryApiClient(url, post_retry=PATIENT) as client,
    ):
        await client.info()
        if is_current:
            assert await client.post_group(make_group(1)) == RECEIVED
        else:
            with pytest.raises(TrajectoryApiError, match="got no answer"):
                await client.post_group(make_group(1))

    assert len(posts) == num_posts
    assert len(set(posts)) == 1


async def test_post_to_an_older_service_is_not_repeated_after_a_500(free_port):
    service = ScriptedService(500, is_current=False)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        with pytest.raises(TrajectoryApiError, match="answered 500"):
            await client.post_group(make_group(1))

    assert len(service.posts) == 1


async def test_post_waits_as_long_as_a_full_service_asks(free_port):
    service = ScriptedService(busy("0.05"), busy("0.05"), 200, is_current=False)
    loop = asyncio.get_running_loop()
    arrivals: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        arrivals.append(loop.time())
        return await service(request)

    async with (
        scripted(handler, free_port) as url,
        TrajectoryApiClient(url, post_retry=PATIENT) as client,
    ):
        await client.post_group(make_group(1))

    assert len(arrivals) == 3
    assert all(later - earlier >= 0.05 for earlier, later in pairwise(arrivals))


async def test_post_longer_pause_than_the_deadline_is_left_to_the_caller(free_port):
    service = ScriptedService(busy("900"), is_current=False)

    async with scripted(service, free_port) as url, TrajectoryApiClient(url) as client:
        with pytest.raises(TrajectoryApiError) as caught:
            await client.post_group(make_group(1))

    assert caught.value.retry_after_s == 900
    assert len(service.posts) == 1


async def test_post_outlasts_a_service_that_is_away(free_port):
    service = ScriptedService(200, is_current=False)

    async with TrajectoryApiClient(f"http://127.0.0.1:{free_port}", post_retry=PATIENT) as client:
        posting = asyncio.create_task(client.post_group(make_group(1)))
        await asyncio.sleep(0.05)
        assert not posting.done()
        async with scripted(service, free_port):
            assert await posting == RECEIVED


async def test_get_of_a_client_that_waits_is_told(free_port, caplog):
    rule = RetryRule(attempts=None, first_delay_s=0.01, deadline_s=0.02)

    async with TrajectoryApiClient(f"http://127.0.0.1:{free_port}", retry=rule) as client:
        with pytest.raises(TrajectoryApiError) as caught:
            await client.info()

    assert caplog.text.count("retrying until the service responds: GET http") == 1
    assert caught.value.__suppress_context__


async def test_get_is_repeated_a_few_times_then_says_so(free_port):
    paths: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.json_response({"detail": "boom"}, status=500)

    async with scripted(handler, free_port) as url, TrajectoryApiClient(url, retry=QUICK) as client:
        with pytest.raises(TrajectoryApiError, match=r"answered 500 \(attempt 3\): boom"):
            await client.info()

    assert paths == ["/info"] * 3

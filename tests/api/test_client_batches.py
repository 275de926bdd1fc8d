"""Batches as an iterator: leases, acknowledgements, the end, registration; on a real service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from atroposlib.api.client import AsyncBatches, TrainerClient, batches
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.wire import encode_group
from tests.api.helpers import make_group
from tests.envs.live_service import LiveService

pytestmark = pytest.mark.slow


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    live = LiveService(free_port)
    live.start()
    yield live
    live.stop()


def post(service: LiveService, *scores: float) -> None:
    groups = [make_group(2, score=score, policy_version=3) for score in scores]
    for group in groups:
        assert httpx.post(f"{service.url}/scored_data", json=group).status_code == 200


def status(service: LiveService) -> dict[str, object]:
    return dict(httpx.get(f"{service.url}/status").json())


def scores_of(batch) -> list[float]:
    return [group["scores"][0] for group in batch.groups]


def unreachable(client: TrainerClient, batch_id: str, *, steps_done: int | None) -> None:
    raise TrajectoryApiError("unreachable")


def two_per_step(service: LiveService, num_steps: int = 3, **options):
    return batches(service.url, batch_size=2, num_steps=num_steps, **options)


def test_iteration_acknowledges_each_batch_when_the_next_is_asked_for_and_ends_with_the_run(
    service,
):
    steps_before = []

    with two_per_step(service) as stream:
        stream.set_policy_version(0)  # registers
        post(service, 0.0, 1.0, 2.0, 3.0)
        seen = []
        for batch in stream:
            steps_before.append(status(service)["current_step"])
            seen += scores_of(batch)

    assert seen == [0.0, 1.0, 2.0]
    assert steps_before == [0, 1, 2]
    assert stream.num_acknowledged == 3
    left = status(service)
    assert (left["current_step"], left["queue_size"]) == (3, 1)


def test_a_batch_of_a_loop_that_was_left_comes_again(service):
    with two_per_step(service) as stream:
        stream.set_policy_version(0)
        post(service, 5.0)
        assert scores_of(next(stream)) == [5.0]

    with two_per_step(service) as again:
        assert scores_of(next(again)) == [5.0]
    assert next(again, None) is None


def test_leaving_after_the_last_batch_acknowledges_it(service):
    with two_per_step(service, num_steps=2) as stream:
        stream.set_policy_version(0)
        post(service, 0.0, 1.0)
        for _ in range(2):
            next(stream)

    left = status(service)
    assert left["current_step"] == 2
    assert "leased_batches" not in left


def test_an_error_in_the_last_step_gives_its_batch_back(service):
    def train():
        with two_per_step(service, num_steps=1) as stream:
            stream.set_policy_version(0)
            post(service, 0.0)
            next(stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()

    left = status(service)
    assert (left["current_step"], left["returned_batches"]) == (0, 1)


def test_two_consumers_that_hold_the_last_batches_acknowledge_both(service):
    with two_per_step(service, num_steps=2) as one, two_per_step(service, num_steps=2) as other:
        one.set_policy_version(0)
        post(service, 0.0, 1.0)
        next(one), next(other)

    assert status(service)["current_step"] == 2


OWN_LOOP = """
import sys
from atroposlib.api.client import batches

stream = batches(sys.argv[1], batch_size=2, num_steps=2)
def train():
    for step in range(2):
        next(stream)
train()
{end}
"""


@pytest.mark.parametrize(
    ("end", "exit_code", "num_steps"), [("", 0, 2), ("raise SystemError", 1, 1)]
)
def test_a_program_without_with_acknowledges_its_last_batch_when_it_ends_well(
    service, end, exit_code, num_steps
):
    with two_per_step(service, num_steps=2) as stream:
        stream.set_policy_version(0)
        post(service, 0.0, 1.0)

    program = [sys.executable, "-c", OWN_LOOP.format(end=end), service.url]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)

    assert ended.returncode == exit_code, ended.stderr
    left = status(service)
    assert (left["current_step"], left.get("leased_batches", 0)) == (num_steps, 0)


def test_explicit_acknowledgement_lets_several_batches_be_held(service):
    with two_per_step(service, acknowledge="explicit") as stream:
        stream.set_policy_version(0)
        post(service, 0.0, 1.0, 2.0)
        first, second = next(stream), next(stream)
        assert status(service)["leased_batches"] == 2
        stream.ack(first)
        stream.ack(first)
        stream.nack(second)

        assert status(service)["current_step"] == 1
        assert scores_of(next(stream)) == scores_of(second)


def test_acknowledgement_that_failed_is_sent_again(service, monkeypatch):
    with two_per_step(service, acknowledge="explicit") as stream:
        stream.set_policy_version(0)  # registers
        post(service, 1.0)
        batch = next(stream)
        with monkeypatch.context() as patched:
            patched.setattr(TrainerClient, "ack", unreachable)
            with pytest.raises(TrajectoryApiError, match="unreachable"):
                stream.ack(batch)
        assert stream.held == [batch]

        stream.ack(batch)

        assert (stream.held, stream.num_acknowledged) == ([], 1)
        assert status(service)["current_step"] == 1


def test_batch_whose_acknowledgement_failed_is_not_returned_at_the_end(service, monkeypatch):
    monkeypatch.setattr(TrainerClient, "ack", unreachable)
    stream = two_per_step(service)
    stream.set_policy_version(0)  # registers
    post(service, 1.0)
    next(stream)
    with pytest.raises(TrajectoryApiError, match="unreachable"):
        next(stream)

    stream.leave(is_failed=True)

    assert status(service)["leased_batches"] == 1


def test_batch_that_was_not_trained_on_is_no_step(service):
    with two_per_step(service, num_steps=2) as stream:
        stream.set_policy_version(0)
        post(service, 0.0, 1.0, 2.0)
        seen = []
        for batch in stream:
            seen += scores_of(batch)
            if len(seen) == 1:
                stream.ack(batch, is_trained=False)

    assert seen == [0.0, 1.0, 2.0]
    assert (stream.num_acknowledged, status(service)["current_step"]) == (2, 2)


def test_iteration_ends_when_nothing_came_for_so_long(service):
    with two_per_step(service, idle_limit_s=0.05) as stream:
        assert list(stream) == []


def test_two_consumers_share_a_run_and_end_together(service):
    with two_per_step(service, num_steps=2) as one, two_per_step(service, num_steps=2) as other:
        one.set_policy_version(0)
        post(service, 0.0, 1.0)
        first, second = next(one), next(other)
        assert (scores_of(first), scores_of(second)) == ([0.0], [1.0])
        one.ack(first)
        other.ack(second)

        assert (next(one, None), next(other, None)) == (None, None)


def test_a_service_that_forgot_the_run_is_registered_with_again(service):
    with two_per_step(service) as stream:
        stream.set_policy_version(0)
        post(service, 0.0)
        stream.ack(next(stream))
        assert httpx.get(f"{service.url}/reset_data").status_code == 200
        with TrainerClient(service.url) as plain, pytest.raises(TrajectoryApiError):
            plain.batch()
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(next, stream)
            while httpx.get(f"{service.url}/info").json()["batch_size"] == -1:
                time.sleep(0.01)
            post(service, 7.0)
            batch = asked.result()

    assert scores_of(batch) == [7.0]
    assert status(service)["current_step"] == 1


def test_registration_for_another_run_is_refused(service):
    with two_per_step(service) as stream:
        stream.set_policy_version(0)
        other = batches(service.url, batch_size=4, num_steps=3)
        with other, pytest.raises(TrajectoryApiError, match="batch_size"):
            next(other)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"num_steps": 0}, {"acknowledge": "never"}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        batches("http://127.0.0.1:9", **{"batch_size": 2, "num_steps": 2, **wrong})


def test_address_without_its_scheme_is_refused_before_anything_is_asked():
    with pytest.raises(ConfigError, match="'localhost:8000'; expected an address such as http://"):
        batches("localhost:8000", batch_size=2, num_steps=2)


def test_registration_for_another_number_of_steps_names_what_the_caller_gave(service):
    with two_per_step(service, num_steps=3) as stream:
        stream.set_policy_version(0)
        with two_per_step(service, num_steps=4) as other, pytest.raises(TrajectoryApiError) as e:
            next(other)

    assert "num_steps is 3, this request says 4; send" in str(e.value)
    assert "save_checkpoint_interval" not in str(e.value)


def test_replacing_the_settings_sets_the_step_to_the_starting_step(service):
    with two_per_step(service) as stream:
        stream.set_policy_version(0)
        post(service, 0.0)
        stream.ack(next(stream))
        assert status(service)["current_step"] == 1
        with two_per_step(service, num_steps=9, starting_step=6, replace=True) as other:
            other.set_policy_version(6)
            assert status(service)["current_step"] == 6
        with two_per_step(service, num_steps=9, replace=True) as third:
            third.set_policy_version(0)

    assert status(service)["current_step"] == 0


def test_policy_version_is_absent_until_one_was_told_to_who_sampled(service):
    with two_per_step(service) as stream:
        stream.set_policy_version(0)
        with httpx.Client(base_url=service.url) as client:
            for version in ({}, {"policy_version": 4}):
                group = {**make_group(2), **version}
                headers = {"Content-Type": "application/msgpack"}
                content = encode_group(group, "msgpack")
                assert client.post("/scored_data", content=content, headers=headers).is_success
        first, second = next(stream), next(stream)

    assert "policy_version" not in first.groups[0]
    assert second.groups[0]["policy_version"] == 4


async def test_async_iteration_sees_the_same_and_keeps_a_batch_of_a_cancelled_wait(service):
    async with AsyncBatches(two_per_step(service, num_steps=2)) as stream:
        await stream.set_policy_version(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        post(service, 0.0, 1.0)

        seen = [scores_of(batch) async for batch in stream]

    assert seen == [[0.0], [1.0]]
    assert status(service)["current_step"] == 2


async def test_async_batch_that_arrives_as_its_wait_is_cancelled_becomes_the_next(service):
    async with AsyncBatches(two_per_step(service)) as stream:
        await stream.set_policy_version(0)  # registers
        post(service, 1.0, 2.0)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream._fetching.add_done_callback(lambda _: waiting.cancel())
        with pytest.raises(asyncio.CancelledError):
            await waiting

        assert scores_of(await anext(stream)) == [1.0]


async def test_async_leaving_acknowledges_the_last_batch_but_none_that_arrived_unseen(service):
    async with AsyncBatches(two_per_step(service, num_steps=2)) as stream:
        await stream.set_policy_version(0)
        post(service, 0.0)
        await anext(stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        post(service, 1.0)
    first = status(service)
    async with AsyncBatches(two_per_step(service, num_steps=2)) as stream:
        await anext(stream)

    assert (first["current_step"], first.get("leased_batches", 0)) == (1, 0)
    assert status(service)["current_step"] == 2


async def test_async_explicit_acknowledgement(service):
    batches_of_two = two_per_step(service, acknowledge="explicit")
    async with AsyncBatches(batches_of_two) as stream:
        await stream.set_policy_version(0)
        post(service, 0.0, 1.0)
        first, second = await anext(stream), await anext(stream)
        await stream.ack(first)
        await stream.nack(second)

    left = status(service)
    assert (left["current_step"], left["returned_batches"]) == (1, 1)

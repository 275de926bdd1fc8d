"""A group that could never leave is refused by name, and an operator can take one out."""

from __future__ import annotations

import pytest

from atroposlib.api.auth import Role, rule_for
from atroposlib.api.journal import snapshot
from atroposlib.api.schemas import MAX_BATCH_SIZE
from tests.api.helpers import Service, make_group
from tests.api.run_helpers import decoded, env_request, open_run, registration, started_run, take


@pytest.fixture
def service() -> Service:
    return Service()


def test_group_larger_than_a_batch_is_refused_by_its_path(service: Service) -> None:
    service.start(batch_size=4)

    one = service.post("/scored_data", json=make_group(5))
    many = service.post("/scored_data_list", json=[make_group(4), make_group(5)])

    assert (one.status_code, many.status_code) == (422, 422)
    assert one.json()["detail"][0]["loc"] == ["body", "tokens"]
    assert "5 sequences, a batch holds 4" in one.json()["detail"][0]["msg"]
    assert many.json()["detail"][0]["loc"] == ["body", 1, "tokens"]
    assert service.status()["queue_size"] == 0
    assert 'refused_total{reason="oversized"} 2' in service.get("/metrics").text


def test_run_with_a_minimum_share_goes_on_beside_an_oversized_group(service: Service) -> None:
    service.start(batch_size=4)
    service.register_env(group_size=None, min_batch_allocation=0.5)

    assert service.post("/scored_data", json=make_group(8, env_id=0)).status_code == 422
    service.push(2, 2, env_id=0)

    assert service.take() == [0.0, 1.0]


def test_group_that_came_before_the_batch_size_was_known_can_be_removed(service: Service) -> None:
    assert service.push(8) == [{"status": "received"}]
    service.start(batch_size=4)
    service.register_env(min_batch_allocation=0.5)
    service.push(4, env_id=0)
    assert service.take() is None
    (stall, *_) = service.status()["stalls"]
    assert stall["reason"] == "queue/oversized"

    assert service.delete("/groups/0").json() == {"status": "removed", "group_id": 0}

    assert service.take() == [0.0]
    assert "atropos_groups_removed_total 1" in service.get("/metrics").text
    assert service.delete("/groups/0").status_code == 410
    assert service.delete("/groups/99").status_code == 404


def test_group_that_has_left_the_queue_is_not_removed(service: Service) -> None:
    service.start(batch_size=2)
    service.push(2)
    leased = service.get("/batch?lease=60").json()

    assert service.delete("/groups/0").status_code == 409
    service.post(f"/batch/{leased['batch_id']}/ack")
    assert service.delete("/groups/0").status_code == 409


async def test_buffered_group_is_removed_with_its_sum() -> None:
    run = await started_run(batch_size=4)
    await run.register_env(env_request(group_size=4))
    await run.admit([decoded(3, env_id=0), decoded(2, env_id=0)])

    assert await run.remove_group(0)
    await run.admit([decoded(1, env_id=0)])
    assert run.state.envs.buffered_sequences == 3
    await run.admit([decoded(2, env_id=0)])

    assert await take(run) == [1, 3]
    assert run.state.envs.buffered_sequences == 1


async def test_removed_group_stays_away_after_a_restart() -> None:
    run = await open_run()
    await run.admit([decoded(), decoded()])
    await run.remove_group(1)

    again = await open_run(run.store)

    assert [group.group_id for group in again.state.queue] == [0]
    assert again.state.latest_group_id == 1  # kept for its own sake
    assert (await again.payload(1)) is not None
    assert snapshot(again.state) == snapshot(run.state)


async def test_consumer_takes_groups_of_every_size() -> None:
    run = await open_run()
    await run.register_trainer(registration(batch_size=2, consumer="export"))

    await run.admit([decoded(9)])

    assert await take(run) == [0]
    with pytest.raises(ValueError, match="could never leave"):
        await run.admit([decoded(MAX_BATCH_SIZE + 1)])


def test_nobody_but_an_admin_deletes() -> None:
    for path in ("/groups/7", "/", "/status", "/nonsense"):
        rule = rule_for(path, "DELETE")
        assert (rule.roles, rule.is_open) == ({Role.ADMIN}, False)

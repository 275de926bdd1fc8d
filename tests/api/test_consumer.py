"""A tool in the trainer's place: registered while there is none, replaced by any trainer."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.api.client_transport import leased_batch
from atroposlib.api.inspection import GroupFilter, GroupState, list_groups
from atroposlib.api.journal import restore, snapshot
from atroposlib.api.run import RegistrationConflictError, Run
from atroposlib.api.state import RunState
from tests.api.helpers import REGISTRATION, Service, make_group
from tests.api.run_helpers import Clock, decoded, env_request, open_run, registration, take


async def consumed_run(*, clock: Clock | None = None) -> Run:
    run = await open_run(**({} if clock is None else {"clock": clock}))
    await run.register_trainer(registration(consumer="an-export"))
    return run


async def test_environments_register_before_a_consumer_asks_for_a_batch() -> None:
    run = await consumed_run()

    env = await run.register_env(env_request())

    assert env is not None
    assert env.real_name == "env_0"


async def test_batch_of_a_consumer_holds_groups_of_any_size() -> None:
    run = await consumed_run()
    await run.admit([decoded(3), decoded(3), decoded(5)])

    taken = [await take(run) for _ in range(3)]

    # At most 4 sequences, whole groups, one at least; the last waits until 4 sequences are there.
    assert [len(ids) for ids in taken if ids] == [1, 1, 1]
    assert run.state.step == 3


async def test_trainer_replaces_a_consumer_and_gets_what_that_had_leased() -> None:
    run = await consumed_run()
    env = await run.register_env(env_request())
    assert env is not None
    await run.admit([decoded(2), decoded(2), decoded(2)])
    leased = await run.next_batch(lease_s=60)
    assert leased is not None
    former = run.state.run_id

    await run.register_trainer(registration(batch_size=6, starting_step=7, num_steps=9))

    assert (run.state.consumer, run.state.step, run.state.batch_size) == (None, 7, 6)
    assert run.state.run_id != former
    assert await run.register_env(env_request(env_id=env.env_id, run_id=former)) is None
    assert await run.acknowledge(leased[0].token) == "unknown"
    assert len(await take(run) or []) == 3
    kept = await run.register_env(env_request(env_id=env.env_id, run_id=former))
    assert kept is not None
    assert (kept.env_id, kept.real_name) == (0, "env_0")
    other = await run.register_env(env_request(env_id=env.env_id, run_id="another"))
    assert other is not None
    assert (other.env_id, other.real_name) == (1, "env_1")


async def test_consumer_that_leaves_frees_the_place_and_leaves_the_rest() -> None:
    run = await consumed_run()
    env = await run.register_env(env_request())
    assert env is not None
    await run.admit([decoded(4), decoded(4)])
    leased = await run.next_batch(lease_s=60)
    assert leased is not None
    former, uuid = run.state.run_id, str(run.state.trainer_ids[-1])
    run.note_consumer_request()

    assert not await run.release_consumer("17")
    assert await run.release_consumer(uuid)
    assert not await run.release_consumer(uuid)
    again = RunState(run.limits)
    restore(again, snapshot(run.state))

    for state in (run.state, again):
        assert (state.registration, state.consumer, state.is_started) == (None, None, False)
        assert [group.group_id for group in state.queue] == [0, 1]
    assert await run.acknowledge(leased[0].token) == "unknown"
    view = await run.view_for(env.env_id)
    assert view is not None
    assert await run.register_env(env_request()) is None  # waits for who comes next
    await run.register_trainer(registration(consumer="the next"))
    kept = await run.register_env(env_request(env_id=env.env_id, run_id=former))
    assert kept is not None
    assert kept.env_id == env.env_id


def test_consumer_frees_its_place_over_http_and_nobody_elses() -> None:
    service = Service()
    uuid = service.post("/register", json={**REGISTRATION, "consumer": "x"}).json()["uuid"]
    path = "/register?consumer="

    assert service.request("DELETE", f"{path}{uuid + 1}").status_code == 404
    assert service.request("DELETE", f"{path}x{uuid}").status_code == 404
    assert service.request("DELETE", f"{path}{uuid}").json() == {"status": "success"}
    assert service.get("/info").json()["batch_size"] == -1
    trainer = service.post("/register", json=REGISTRATION).json()["uuid"]
    assert service.request("DELETE", f"{path}{trainer}").status_code == 404


async def test_groups_of_a_consumers_time_have_no_version_and_no_staleness() -> None:
    run = await consumed_run()
    await run.register_env(env_request(group_size=9))
    await run.admit([decoded(4), decoded(4), decoded(4)])
    assert (await take(run), await take(run)) == ([0], [1])
    await run.admit([decoded(4), decoded(4, version=1), decoded(3, env_id=0)])
    assert run.state.step == 2

    await run.register_trainer(registration(starting_step=1))
    await run.admit([decoded(4)])
    state = run.state

    assert [group.known_version for group in state.queue] == [None, None, 1, 1]
    assert [state.staleness_of(group) for group in state.queue] == [None, None, 0, 0]
    (buffered,) = state.envs.find(0).buffer  # type: ignore[union-attr]
    assert buffered.known_version is None
    assert state.oldest_staleness == 0
    while await take(run):
        assert state.oldest_staleness >= 0
    listed = list_groups(state, GroupState.PAST, GroupFilter(), offset=0, limit=9, now=0.0)
    assert {group["staleness"] for group in listed.groups} == {None, 4}


async def test_lease_of_a_consumers_group_tells_no_version_to_the_trainer() -> None:
    service = Service()
    consumer = {**REGISTRATION, "batch_size": 2, "consumer": "x"}
    path = f"/batch?lease=60&consumer={service.post('/register', json=consumer).json()['uuid']}"
    service.push(2, 2, 2)
    for _ in range(2):
        batch_id = service.get(path).json()["batch_id"]
        assert service.post(f"/batch/{batch_id}/ack").status_code == 200

    service.push(2)
    service.post("/register", json={**REGISTRATION, "batch_size": 2})
    leased = [service.get("/batch?lease=60").json() for _ in range(2)]

    assert [answer["policy_versions"] for answer in leased] == [[None], [None]]
    filled = [batch for answer in leased if (batch := leased_batch(answer, "http://x"))]
    assert all("policy_version" not in batch.groups[0] for batch in filled)


async def test_late_word_of_a_consumer_changes_nothing_for_the_trainer() -> None:
    run = await consumed_run()
    await run.admit([decoded(4), decoded(4)])
    leased = await run.next_batch(lease_s=60)
    assert leased is not None

    await run.register_trainer(registration())  # batches of the same size

    assert await run.acknowledge(leased[0].token) == "unknown"
    assert (run.state.step, await take(run), await take(run)) == (0, [0], [1])


async def test_consumer_is_refused_while_a_trainer_or_another_at_work_is_registered() -> None:
    clock = Clock()
    run = await consumed_run(clock=clock)
    run.note_consumer_request()
    clock.now += 2

    with pytest.raises(RegistrationConflictError, match=r"an-export already takes .* 2 s ago"):
        await run.register_trainer(registration(consumer="other"))
    clock.now += 60
    await run.register_trainer(registration(consumer="other"))
    assert run.state.consumer == "other"

    await run.register_trainer(registration())
    with pytest.raises(RegistrationConflictError, match="a trainer is registered"):
        await run.register_trainer(registration(consumer="other", replace=True))


async def test_consumer_outlives_a_restart() -> None:
    run = await consumed_run()
    await run.register_trainer(registration(consumer="second"))
    again = RunState(run.limits)

    restore(again, snapshot(run.state))

    assert again.consumer == "second"
    assert again.is_consumer(str(run.state.trainer_ids[-1]))
    assert again.taken_over_run_id == run.state.taken_over_run_id is not None


def test_consumer_whose_place_was_taken_gets_no_batch_of_the_trainer() -> None:
    service = Service()
    registered = service.post("/register", json={**REGISTRATION, "batch_size": 2, "consumer": "x"})
    assert registered.json()["consumer"] == "x"
    path = f"/batch?lease=60&consumer={registered.json()['uuid']}"
    service.post("/scored_data", json=make_group(2))
    first: dict[str, Any] = service.get(path).json()
    assert len(first["batch"]) == 1
    assert service.get("/status").json()["consumer"]["name"] == "x"

    joined = service.post("/register", json={**REGISTRATION, "batch_size": 2})
    refused = service.get(path)

    assert set(joined.json()) == {"uuid"}
    assert refused.status_code == 409
    assert refused.json()["detail"] == "a trainer has registered in place of this consumer"
    assert "consumer" not in service.get("/status").json()
    assert len(service.get("/batch").json()["batch"]) == 1


@pytest.mark.parametrize("name", ["a\x1b[31mb", "two\nlines", "\x00"])
def test_consumer_name_with_control_characters_is_refused(name: str) -> None:
    answer = Service().post("/register", json={**REGISTRATION, "consumer": name})

    assert answer.status_code == 422
    assert "printable" in answer.text

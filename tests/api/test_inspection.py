"""What anybody may ask about a run; asking changes nothing."""

from __future__ import annotations

import time

import pytest

from atroposlib.api.settings import ApiSettings
from atroposlib.wire import decode_group, encode_group
from tests.api.helpers import GROUP_KEYS, Service, make_group

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Service:
    """A run of batches of four with an environment that buffers up to eight."""
    service = Service()
    service.start(batch_size=4)
    service.register_env(desired_name="maths")
    service.register_env(desired_name="code", group_size=8)
    return service


def test_status_has_two_keys_while_there_is_nothing_else_to_tell() -> None:
    assert Service().get("/status").json() == {"current_step": 0, "queue_size": 0}


async def test_status_tells_what_its_two_figures_leave_out(service: Service) -> None:
    service.push(4, 4, 4)
    service.push(2, env_id=1)
    run = service.app.state.run
    sending, _ = await run.next_batch()
    leased, _ = await run.next_batch(lease_s=60)
    await run.return_batch(sending.token)

    status = service.get("/status").json()

    assert (status["current_step"], status["queue_size"]) == (0, 1)
    assert status["buffered_sequences"] == 2
    assert (status["in_flight_batches"], status["leased_batches"]) == (1, 1)
    assert status["returned_batches"] == 1
    listed = service.get("/groups?state=in_flight").json()["groups"]
    assert {group["id"] for group in listed} == {*sending.group_ids, *leased.group_ids}


async def test_status_names_the_policy_version_and_the_run() -> None:
    service = Service(ApiSettings(run_name="maths-7b"))
    service.start()
    await service.app.state.run.set_policy_version(0)

    status = service.get("/status").json()

    assert (status["policy_version"], status["run"]) == (0, "maths-7b")


async def test_status_and_envs_show_environments_that_expired() -> None:
    service = Service(ApiSettings(env_expiry_s=60))
    service.start()
    service.register_env()
    run = service.app.state.run
    run._envs._clock = lambda: time.time() + 3600

    await run.tick()

    assert service.get("/status").json()["expired_envs"] == 1
    (env,) = service.get("/envs").json()["envs"]
    assert (env["is_expired"], env["is_connected"]) == (True, False)
    assert 'atropos_environments{state="expired"} 1.0' in service.get("/metrics").text


def test_groups_are_listed_without_being_taken(service: Service) -> None:
    service.push(2, 1, env_id=0)

    page = service.get("/groups").json()

    assert [group["num_sequences"] for group in page["groups"]] == [2, 1]
    assert (page["total"], page["next_offset"]) == (2, None)
    assert service.get("/status").json()["queue_size"] == 2
    first = page["groups"][0]
    assert (first["env_name"], first["lane"], first["state"]) == ("maths_0", "json", "queued")
    assert 0 <= first["age_s"] < 60


def test_groups_are_chosen_by_state_environment_and_score(service: Service) -> None:
    for score, env_id in ((0.1, 0), (0.9, 0), (0.9, None)):
        service.post("/scored_data", json=make_group(1, score=score, env_id=env_id))
    service.push(2, env_id=1)

    def ids(query: str) -> list[int]:
        return [group["id"] for group in service.get(f"/groups?{query}").json()["groups"]]

    assert len(ids("state=queued")) == 3
    assert len(ids("env_id=0")) == 2
    assert len(ids("env_id=0&min_score=0.5")) == 1
    assert len(ids("max_score=0.5")) == 1
    assert len(ids("state=buffered")) == 1
    assert ids("state=past") == []


def test_listing_goes_on_at_the_offset_it_names(service: Service) -> None:
    service.push(1, 1, 1)

    first = service.get("/groups?limit=2").json()
    rest = service.get(f"/groups?limit=2&offset={first['next_offset']}").json()

    assert (len(first["groups"]), len(rest["groups"])) == (2, 1)
    assert rest["next_offset"] is None


@pytest.mark.parametrize(
    "query",
    [
        "state=elsewhere",
        "limit=0",
        "limit=1001",
        "offset=-1",
        "offset=1e400",
        f"offset={2**70}",
        "min_score=nan",
        "max_score=inf",
        "env_id=-1",
        f"env_id={2**64}",
    ],
)
def test_impossible_listings_are_refused(service: Service, query: str) -> None:
    assert service.get(f"/groups?{query}").status_code == 422


@pytest.mark.parametrize("offset", [5, 10**15])
def test_listing_behind_the_end_is_empty(service: Service, offset: int) -> None:
    service.push(1)

    for path in ("/groups", "/groups?state=past", "/envs"):
        separator = "&" if "?" in path else "?"
        page = service.get(f"{path}{separator}offset={offset}").json()
        assert page["next_offset"] is None
        assert (page.get("groups") or page.get("envs") or []) == []


def test_group_and_payload_are_found_wherever_the_group_is(service: Service) -> None:
    service.push(4, 4)
    taken = service.take()
    service.push(2, env_id=1)
    assert taken is not None
    listed = {
        state: service.get(f"/groups?state={state}").json()["groups"][0]["id"]
        for state in ("queued", "past", "buffered")
    }

    for state, group_id in listed.items():
        assert service.get(f"/groups/{group_id}").json()["state"] == state
        payload = service.get(f"/groups/{group_id}/payload")
        assert payload.headers["content-type"] == "application/json"
        assert set(payload.json()) == GROUP_KEYS


async def test_group_of_the_binary_format_is_shown_as_json(service: Service) -> None:
    body = encode_group(make_group(2, length=3), "msgpack")
    await service.app.state.run.admit([decode_group(body, "msgpack")])

    (group,) = service.get("/groups").json()["groups"]

    assert group["lane"] == "msgpack"
    for path in ("/latest_example", f"/groups/{group['id']}/payload"):
        assert service.get(path).json()["tokens"] == [[0, 1, 2], [0, 1, 2]]


def test_payload_is_msgpack_where_that_is_asked_for(service: Service) -> None:
    service.push(2)
    (group,) = service.get("/groups").json()["groups"]

    accept = {"Accept": "application/msgpack"}
    payload = service.get(f"/groups/{group['id']}/payload", headers=accept)

    assert payload.status_code == 200
    assert payload.headers["content-type"] == "application/msgpack"
    assert payload.content[:1] != b"{"


def test_group_that_is_gone_is_410_and_one_that_never_was_404() -> None:
    service = Service(ApiSettings(keep_past_groups=0))
    service.start(batch_size=4)
    service.push(4, 4)
    first = service.get("/groups").json()["groups"][0]["id"]
    assert service.take() is not None

    for path in (f"/groups/{first}", f"/groups/{first}/payload"):
        answer = service.get(path)
        assert answer.status_code == 410
        assert "is no longer kept" in answer.json()["detail"]
    for path in ("/groups/999999", "/groups/999999/payload"):
        assert service.get(path).status_code == 404


@pytest.mark.parametrize("group_id", ["-1", "x", str(2**63), "1.5"])
def test_impossible_group_ids_are_refused(service: Service, group_id: str) -> None:
    assert service.get(f"/groups/{group_id}").status_code == 422
    assert service.get(f"/groups/{group_id}/payload").status_code == 422


def test_envs_are_listed_in_order_of_registration(service: Service) -> None:
    service.push(2, env_id=0)
    service.push(3, env_id=1)
    service.post("/disconnect-env", json={"env_id": 0})

    page = service.get("/envs").json()

    assert page["total"] == 2
    maths, code = page["envs"]
    assert (maths["name"], maths["is_connected"], maths["queued_sequences"]) == (
        "maths_0",
        False,
        2,
    )
    assert (code["group_size"], code["buffered_sequences"]) == (8, 3)
    assert service.get("/envs?offset=1&limit=1").json()["envs"] == [
        {**code, "silent_s": pytest.approx(code["silent_s"], abs=60)}
    ]


def test_latest_example_is_the_group_queued_last(service: Service) -> None:
    assert service.get("/latest_example").json()["tokens"] == []
    service.push(4)
    service.push(2, env_id=1)

    assert len(service.get("/latest_example").json()["tokens"]) == 4
    assert service.take() is not None
    assert len(service.get("/latest_example").json()["tokens"]) == 4


def test_unknown_environment_is_told_to_register_again(service: Service) -> None:
    answer = service.status_env(17)

    assert answer.status_code == 404
    assert "register the environment again" in answer.json()["detail"]


def test_group_without_a_version_counts_from_the_policy_it_arrived_under(service: Service) -> None:
    service.post("/policy", json={"version": 7})
    service.push(1)
    service.post("/scored_data", json=make_group(1, policy_version=5))
    service.post("/policy", json={"version": 9})

    groups = service.get("/groups").json()["groups"]

    assert [(group["policy_version"], group["staleness"]) for group in groups] == [(7, 2), (5, 4)]
    assert "atropos_queue_oldest_staleness_steps 4.0" in service.get("/metrics").text

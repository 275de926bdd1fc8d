"""Counts that clients name are bounded, and a run that took worse from an earlier version opens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atroposlib.api import records
from atroposlib.api.journal import restore, snapshot
from atroposlib.api.queue import QueuedGroup, oldest_combination
from atroposlib.api.records import encode_record
from atroposlib.api.run import Run
from atroposlib.api.schemas import MAX_BATCH_SIZE, MAX_GROUP_SIZE
from atroposlib.api.state import RunState
from atroposlib.api.store.base import Payload, RunStore
from atroposlib.api.store.open import open_store
from tests.api.helpers import REGISTRATION, Service, make_group
from tests.api.run_helpers import env_request, registration, take

pytestmark = pytest.mark.slow

MakeStore = Callable[[], RunStore]
ENV: dict[str, Any] = {"max_token_length": 1000, "desired_name": "env", "weight": 1.0}
POISON = encode_record(records.EnvRegistered(0, {**ENV, "group_size": 2**40}, 0.0))


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return what makes a store of one run, the same run each time; one is open at a time."""
    if request.param == "memory":
        store = open_store("memory", data_dir=tmp_path, run_name="run")
        return lambda: store
    url = "sqlite"
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    name = uuid.uuid4().hex
    return lambda: open_store(url, data_dir=tmp_path, run_name=name)


async def write(store: RunStore, *contents: bytes, payloads: list[Payload]) -> None:
    """Leave records in a run, as an earlier version wrote them, without applying any."""
    await store.open(lambda position, record: None, lambda content: None)
    await store.new_group_ids(len(payloads))
    fence = 0
    for content in contents:
        is_guarded = b"groups_admitted" not in content
        brings = [] if is_guarded else payloads
        assert await store.append(content, brings, fence=fence if is_guarded else None)
        fence += is_guarded
    await store.close()


def encode_groups(*env_ids: int | None) -> bytes:
    groups = [QueuedGroup(i, env_id, 2, 2, 1) for i, env_id in enumerate(env_ids)]
    return encode_record(records.GroupsAdmitted(0, groups, 0.0))


TRAINER = encode_record(records.TrainerRegistered(registration().model_dump(), "2a", 0.0))
LATER_ENV = encode_record(records.EnvRegistered(1, env_request(group_size=4).model_dump(), 0.0))


@pytest.mark.parametrize(
    "poison",
    [
        POISON,
        encode_record(records.EnvRegistered(0, {**ENV, "group_size": "many"}, 0.0)),
        encode_record(records.EnvRegistered(0, {}, 0.0)),
        POISON[:-20],
    ],
    ids=["gigantic", "mistyped", "empty", "cut off"],
)
async def test_run_with_a_poisoned_record_opens_without_it(make_store, poison):
    # A group of an environment that cannot be read, one of nobody, and two halves for the last.
    groups = encode_groups(0, None, 1, 1)
    await write(
        make_store(),
        *(TRAINER, poison, LATER_ENV, groups),
        payloads=[Payload(i, b"%d" % i) for i in range(4)],
    )

    run = Run(make_store())
    await run.open()

    assert run.failure is None
    assert run.state.counters["records/set_aside_env_registered"] == 1
    assert run.state.num_set_aside == 1
    assert [env.real_name for env in run.state.envs] == ["unreadable_0", "env_0"]
    assert [await take(run), await take(run), await take(run)] == [[0, 1], [2, 3], None]
    assert await run.register_env(env_request()) is not None
    await run.close()


async def test_registration_that_names_too_much_is_left_out(make_store):
    settings = {**registration().model_dump(), "batch_size": 2**62}
    giant = encode_record(records.TrainerRegistered(settings, "2a", 0.0))
    payloads = [Payload(i, b"%d" % i) for i in range(2)]
    await write(make_store(), giant, encode_groups(None, None), payloads=payloads)

    run = Run(make_store())
    await run.open()
    assert (run.state.registration, run.state.num_set_aside) == (None, 1)
    await run.register_trainer(registration(batch_size=4))

    assert await take(run) == [0, 1]
    await run.close()


async def test_damaged_batch_is_formed_again_and_those_behind_it_hold():
    store = open_store("memory", data_dir=Path(), run_name="run")
    formed = [encode_record(records.BatchFormed(i, [2 * i, 2 * i + 1], "", 0.0)) for i in range(2)]
    payloads = [Payload(i, b"%d" % i) for i in range(4)]
    groups = encode_groups(None, None, None, None)
    await write(store, TRAINER, groups, formed[0][:-9], formed[1], payloads=payloads)

    run = Run(store)
    await run.open()

    assert [await run.acknowledge(token) for token in ("1-1", "0-1")] == ["acked", "unknown"]
    assert [await take(run), await take(run)] == [[0, 1], None]
    assert run.state.counters["records/set_aside_batch_formed"] == 1


def test_snapshot_of_an_earlier_version_lets_groups_pass_that_could_never_add_up():
    state = RunState()
    state.apply(records.decode_record(TRAINER))
    env = state.envs.add(env_request(group_size=8), now=0.0)
    state.apply(records.decode_record(encode_groups(None, 0)))
    assert state.envs.buffered_sequences == 2
    assert state.registration is not None
    env.group_size, state.registration.batch_size = 2**40, 2**62
    content = snapshot(state)

    again = RunState()
    restore(again, content)

    assert [group.group_id for group in again.queue] == [0, 1]
    assert again.envs.buffered_sequences == 0
    assert again.registration is None
    assert again.num_set_aside == 1


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *(("register-env", "group_size", n) for n in (2**40, 2**63 - 1, MAX_GROUP_SIZE + 1)),
        *(("register-env", name, 2**62) for name in ("max_token_length", "weight")),
        ("register-env", "weight", -1e300),
        ("register-env", "min_batch_allocation", 2**40),
        ("register-env", "desired_name", "x" * 257),
        ("register-env", "desired_name", "a\x1b[2J"),
        ("register-env", "run_id", "x" * 257),
        *(("register", "batch_size", n) for n in (2**40, 2**63 - 1, MAX_BATCH_SIZE + 1)),
        *(
            ("register", name, sign * 2**62)
            for name in ("num_steps", "starting_step", "max_token_len", "save_checkpoint_interval")
            for sign in (1, -1)
        ),
        ("register", "wandb_group", "a\nb"),
        ("register", "wandb_project", "x" * 257),
        ("register", "checkpoint_dir", "x" * 4097),
        ("register", "checkpoint_dir", "a\nCRITICAL: b"),
        ("register-env", "run_id", "a\x1b[2J"),
        ("policy", "version", 2**62),
    ],
)
def test_number_or_name_beyond_its_bound_is_refused_by_its_path(path, name, value):
    service = Service()
    service.start()
    body = {"register": REGISTRATION, "register-env": ENV, "policy": {}}[path]

    answer = service.post(f"/{path}", json={**body, name: value})

    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"] == ["body", name]
    assert service.get("/envs").json()["total"] == 0


@pytest.mark.parametrize("format_name", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("reward_parts", [{"x" * 257: 1.0}, {}], ["reward_parts", 0]),
        ("reward_parts", [{}, {"a\n# TYPE b counter": 1.0}], ["reward_parts", 1]),
        ("reward_parts", [{f"part_{n}": 1.0 for n in range(257)}, {}], ["reward_parts", 0]),
        ("finish_reasons", ["stop", "s" * 257], ["finish_reasons", 1]),
        ("finish_reasons", ["a\x1b[2J", None], ["finish_reasons", 0]),
        ("scores", [0.0, 1e308], ["scores", 1]),
    ],
)
def test_label_or_score_of_a_group_beyond_its_bound_is_refused_by_its_path(
    format_name, name, value, path
):
    service = Service()
    service.start()
    group = {**make_group(2), name: value}
    content = json.dumps(group).encode()
    if format_name == "msgpack":
        allowed = {**make_group(2), "scores": value} if name == "scores" else group
        content = forged_binary(allowed)

    answer = service.post(
        "/scored_data", content=content, headers={"Content-Type": f"application/{format_name}"}
    )

    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"] == ["body", *path]
    assert service.status()["queue_size"] == 0


def forged_binary(group: dict[str, Any]) -> bytes:
    """Return the bytes of a group as a sender without our checks writes them."""
    rows = [np.array(row, "i8").tobytes() for row in group["tokens"]]
    lengths = np.array([len(row) for row in group["tokens"]], "u4").tobytes()
    column = {"dtype": "i8", "data": b"".join(rows), "lengths": lengths}
    masks = {k: v for k, v in column.items() if k != "lengths"}
    values: dict[str, Any] = {
        "format": 1,
        "tokens": column,
        "masks": masks,
        "scores": {"dtype": "f8", "data": np.array(group["scores"], "f8").tobytes()},
    }
    for name in ("reward_parts", "finish_reasons"):
        if name in group:
            values[name] = json.dumps(group[name]).encode()
    return msgspec.msgpack.encode(values)


@pytest.mark.parametrize("query", ["wait=1e9", "wait=nan", "wait=-1", "lease=1e300", "lease=0"])
def test_time_beyond_its_bound_is_refused_by_its_path(query):
    answer = Service().get(f"/batch?{query}")

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", query.partition("=")[0]]


@pytest.mark.parametrize(
    "changes", [{"group_size": MAX_GROUP_SIZE}, {"weight": -1.0}, {"weight": 0}]
)
def test_number_within_its_bound_is_taken(changes):
    service = Service()
    service.start(batch_size=MAX_BATCH_SIZE, num_steps=2**53 - 1, max_token_len=-1)

    assert service.register_env(**changes)["status"] == "success"


def test_two_requests_that_destroyed_a_run_leave_it_whole():
    service = Service()
    service.start(batch_size=2)

    refused = service.post("/register-env", json={**ENV, "group_size": 2**40})
    answer = service.post("/scored_data", json=make_group(2, env_id=0))

    assert refused.status_code == 422
    assert answer.json() == {"status": "received"}
    assert service.take() == [0.0]


async def test_what_was_set_aside_is_told(make_store):
    await write(make_store(), TRAINER, POISON, payloads=[])
    run = Run(make_store())
    await run.open()
    service = Service()
    service.app.state.run.state.counters = run.state.counters

    assert service.status()["set_aside_records"] == 1
    assert (
        'atropos_records_set_aside_total{kind="env_registered"} 1' in service.get("/metrics").text
    )
    assert service.get("/health/ready").json()["counters"]["records/set_aside_env_registered"] == 1
    await run.close()


@pytest.mark.parametrize("target", [2**40, 2**62])
def test_search_for_more_than_there_is_ends_at_once(target):
    assert oldest_combination([1, 2, 3], target) == []


def test_search_is_bounded_where_it_cannot_be_exact():
    sizes = [2] * 100_000 + [1]

    assert oldest_combination(sizes, 199_999) == []

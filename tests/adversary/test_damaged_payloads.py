"""Payloads that a store lost or spoilt leave the run alone; every other group is delivered once."""

from __future__ import annotations

import random
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from atroposlib.api.journal import snapshot
from atroposlib.api.queue import QueuedGroup, RunLimits
from atroposlib.api.run import Run
from atroposlib.api.store.base import MemoryRunStore, RunStore
from atroposlib.api.store.open import open_store, run_file
from atroposlib.errors import ConfigError
from atroposlib.wire import decode_group
from tests.api.helpers import Service, make_group
from tests.api.run_helpers import decoded, registration, take

pytestmark = pytest.mark.slow


class Place:
    """Where a run lives, and how its payloads are spoilt."""

    def __init__(self, kind: str, folder: Path, url: str) -> None:
        self.kind = kind
        self._folder = folder
        self._url = url
        self._name = uuid.uuid4().hex
        self._memory = MemoryRunStore()

    def store(self) -> RunStore:
        if self.kind == "memory":
            return self._memory
        return open_store(self._url, data_dir=self._folder, run_name=self._name)

    async def spoil(self, group_id: int, content: bytes | None) -> None:
        if self.kind == "memory":
            if content is None:
                del self._memory._payloads[group_id]
            else:
                self._memory._payloads[group_id] = content
        elif self.kind == "sqlite":
            with closing(sqlite3.connect(run_file(self._folder, self._name))) as file:
                if content is None:
                    file.execute("DELETE FROM payload WHERE group_id = ?", (group_id,))
                else:
                    file.execute(
                        "UPDATE payload SET content = ? WHERE group_id = ?", (content, group_id)
                    )
                file.commit()
        else:
            from redis import Redis

            with Redis.from_url(self._url) as client:
                key = f"atropos:{{{self._name}}}:payloads"
                if content is None:
                    client.hdel(key, str(group_id))
                else:
                    client.hset(key, str(group_id), content)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    url = request.getfixturevalue("redis_server").url if kind == "redis" else kind
    return Place(kind, tmp_path, url)


async def opened(place: Place) -> Run:
    run = Run(place.store(), limits=RunLimits(keep_past_groups=0))
    await run.open()
    return run


def payload(number: int) -> bytes:
    return b'{"number": %d, "tokens": "%s"}' % (number, b"x" * 200)


async def filled(place: Place, num_groups: int, *, batch_size: int = 4) -> list[int]:
    """Leave a closed run with groups of two sequences each; return their ids."""
    run = await opened(place)
    await run.register_trainer(registration(batch_size=batch_size))
    for number in range(num_groups):
        await run.admit([decoded(2, content=payload(number))], key=f"key-{number}", digest=number)
    group_ids = [group.group_id for group in run.state.queue]
    await run.close()
    return group_ids


SPOILT = {
    "missing": lambda content: None,
    "flipped": lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
    "cut off": lambda content: content[:-1],
    "longer": lambda content: content + b" ",
    "empty": lambda content: b"",
    "of another": lambda content: payload(99),
}


@pytest.mark.parametrize("how", SPOILT)
async def test_spoilt_payload_is_set_aside_and_the_others_leave_in_full_batches(place, how):
    ids = await filled(place, 6)
    await place.spoil(ids[1], SPOILT[how](payload(1)))
    run = await opened(place)

    batches = [await take(run) for _ in range(3)]

    assert batches == [[ids[0], ids[2]], [ids[3], ids[4]], None]
    flaw = "missing" if how == "missing" else "damaged"
    assert list(run.state.set_aside_groups) == [(ids[1], flaw)]
    assert run.state.counters[f"groups/set_aside_{flaw}"] == run.state.num_set_aside_groups == 1
    assert run.state.counters["sequences/set_aside"] == 2
    assert (run.state.step, [group.group_id for group in run.state.queue]) == (2, [ids[5]])
    assert (await run.admit([decoded(2)], key="key-1", digest=1)).is_repeat
    await run.close()

    again = await opened(place)
    assert list(again.state.set_aside_groups) == [(ids[1], flaw)]
    await again.admit([decoded(2, content=b"[]")])
    last = await take(again)
    assert last is not None
    assert (last[0], len(last)) == (ids[5], 2)
    await again.close()


async def test_payload_spoilt_while_a_batch_is_out_ends_no_lease(place):
    ids = await filled(place, 4)
    run = await opened(place)
    first = await run.next_batch(lease_s=600)
    assert first is not None
    second = await run.next_batch(lease_s=600)
    assert second is not None
    await run.close()
    await place.spoil(ids[0], None)
    await place.spoil(ids[2], b"{}")
    again = await opened(place)

    assert await again.acknowledge(first[0].token) == "acked"
    assert await again.return_batch(second[0].token) == "returned"
    assert await again.next_batch() is None
    assert await again.acknowledge(second[0].token) in ("expired", "unknown")
    await again.admit([decoded(2, content=b"[]")])
    batch = await take(again)

    assert batch is not None
    assert (batch[0], len(batch), again.state.step) == (ids[3], 2, 2)
    assert list(again.state.set_aside_groups) == [(ids[2], "damaged")]
    await again.close()


async def test_snapshot_remembers_what_was_set_aside(place):
    ids = await filled(place, 3)
    await place.spoil(ids[0], None)
    run = await opened(place)
    assert await take(run) == ids[1:]
    await run.store.compact(snapshot(run.state), position=run._log._position)
    await run.close()

    again = await opened(place)
    assert list(again.state.set_aside_groups) == [(ids[0], "missing")]
    assert again.state.num_set_aside_groups == 1
    await again.close()


@pytest.mark.parametrize("seed", range(4))
async def test_random_damage_is_accounted_for_exactly(place, seed):
    rng = random.Random(seed)
    ids = await filled(place, 40)
    spoilt = set(rng.sample(ids, rng.randint(1, 39)))
    for group_id in spoilt:
        how = rng.choice(list(SPOILT))
        await place.spoil(group_id, SPOILT[how](payload(ids.index(group_id))))
    run = await opened(place)

    delivered: list[int] = []
    while (found := await run.next_batch(lease_s=rng.choice((None, 60.0)))) is not None:
        batch, payloads = found
        assert batch.num_sequences == 4
        for group_id, stored in zip(batch.group_ids, payloads, strict=True):
            assert stored.content == payload(ids.index(group_id))
        if rng.random() < 0.3:
            assert await run.return_batch(batch.token) == "returned"
            continue
        assert await run.acknowledge(batch.token) == "acked"
        delivered += batch.group_ids
    left = [group.group_id for group in run.state.queue]
    set_aside = run.state.num_set_aside_groups
    await run.close()

    assert sorted([*delivered, *left]) == sorted(set(delivered) | set(left))
    assert len(delivered) + len(left) + set_aside == 40
    assert spoilt.isdisjoint(delivered)
    assert len(left) <= 1 + (set_aside < len(spoilt))


def uncheck(store: MemoryRunStore) -> None:
    """Make a run look as an earlier version left it: groups without a checksum and later fields."""
    num_fields = QueuedGroup.__struct_fields__.index("checksum")
    for index, record in enumerate(store._records):
        fields = msgspec.msgpack.decode(record[1:])
        if fields[0] == "groups_admitted":
            fields[2] = [group[:num_fields] for group in fields[2]]
            store._records[index] = record[:1] + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("how", [None, "missing", "cut off", "longer", "empty"])
async def test_run_of_an_earlier_version_opens_without_checksums(tmp_path, how):
    place = Place("memory", tmp_path, "memory")
    ids = await filled(place, 4)
    uncheck(place.store())  # type: ignore[arg-type]
    if how is not None:
        await place.spoil(ids[1], SPOILT[how](payload(1)))
    run = await opened(place)

    assert all(group.checksum is None for group in run.state.queue)
    assert await take(run) == ([ids[0], ids[1]] if how is None else [ids[0], ids[2]])
    await run.close()


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
async def test_damaged_group_of_an_earlier_version_never_answers_500_twice(accept):
    service = Service()
    service.start(batch_size=2)
    service.push(2, 2)
    run: Run = service.app.state.run
    store = run.store.store  # type: ignore[attr-defined]
    uncheck(store)
    content = store._payloads[0]
    store._payloads[0] = content.replace(b'"tokens":[', b'"tokens":{', 1)
    again = Service()
    again.app.state.run.store.store.__dict__.update(store.__dict__)

    answers = [again.get("/batch", headers={"Accept": accept}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    status = again.status()
    assert (status["set_aside_groups"], status["set_aside_group_ids"]) == (1, [0])
    assert status["current_step"] == 1


async def test_binary_group_of_an_earlier_version_that_cannot_be_converted_is_set_aside():
    service = Service()
    service.start(batch_size=2)
    service.push(2, 2)
    run: Run = service.app.state.run
    store = run.store.store  # type: ignore[attr-defined]
    groups = list(run.state.queue)
    run.state.queue.remove([group.group_id for group in groups])
    broken = b"\x81" * len(store._payloads[0])
    store._payloads[0] = broken
    changed = msgspec.structs.replace(groups[0], wire_format="msgpack", checksum=None)
    for group in (changed, groups[1]):
        run.state.queue.append(group)

    answer = service.get("/batch")

    assert (answer.status_code, len(answer.json()["batch"])) == (200, 1)
    assert service.status()["set_aside_group_ids"] == [0]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_conversion_that_fails_for_want_of_memory_costs_no_group(has_checksums, monkeypatch):
    service = Service()
    service.start(batch_size=2)
    service.push(2, 2)
    run: Run = service.app.state.run
    if not has_checksums:
        groups = [msgspec.structs.replace(group, checksum=None) for group in run.state.queue]
        run.state.queue.remove([group.group_id for group in groups])
        for group in groups:
            run.state.queue.append(group)

    def fail(*args: object, **options: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("atroposlib.api.routes.convert_payload", fail)
        answer = service.get("/batch", headers={"Accept": "application/msgpack"})

    assert answer.status_code == 500
    assert "set_aside_groups" not in service.status()
    assert [service.take(), service.take()] == [[0.0], [1.0]]


def test_what_was_set_aside_is_shown():
    service = Service()
    service.start(batch_size=2)
    service.push(2, 2, 2)
    store = service.app.state.run.store.store
    del store._payloads[0]
    store._payloads[1] = b"{}"

    assert service.take() == [2.0]

    status = service.status()
    assert (status["set_aside_groups"], status["set_aside_group_ids"]) == (2, [0, 1])
    metrics = service.get("/metrics").text
    assert 'atropos_groups_set_aside_total{flaw="missing"} 1.0' in metrics
    assert 'atropos_groups_set_aside_total{flaw="damaged"} 1.0' in metrics
    assert service.get("/health/ready").status_code == 200


def test_payload_that_is_damaged_is_not_shown():
    service = Service()
    service.start(batch_size=4)
    service.push(2)
    service.app.state.run.store.store._payloads[0] = b"{}"

    answer = service.get("/groups/0/payload")

    assert (answer.status_code, service.get("/latest_example").json()["tokens"]) == (410, [])
    assert "missing or damaged" in answer.json()["detail"]


async def test_bytes_flipped_in_the_file_itself_never_deliver_another_group(tmp_path):
    """Flips bytes of the closed file: it is refused in one line, or only whole groups leave."""
    place = Place("sqlite", tmp_path, "sqlite")
    run = await opened(place)
    await run.register_trainer(registration(batch_size=2))
    contents = {}
    for number in range(12):
        group = make_group(2, length=9000 + number, score=number / 7)
        whole = decode_group(msgspec.json.encode(group))
        await run.admit([whole])
        contents[number] = whole.payload
    group_ids = [group.group_id for group in run.state.queue]
    await run.close()
    (path,) = tmp_path.glob("*.sqlite3")
    sound = path.read_bytes()
    rng = random.Random(7)
    outcomes = {"refused": 0, "opened": 0, "set aside": 0}
    for _ in range(40):
        spoilt = bytearray(sound)
        at = rng.randrange(len(sound))
        spoilt[at : at + rng.choice((1, 64, 4096))] = rng.randbytes(1)
        path.write_bytes(spoilt[: len(sound)].ljust(len(sound), b"\0"))
        again = Run(place.store(), limits=RunLimits(keep_past_groups=0))
        try:
            await again.open()
        except ConfigError:
            outcomes["refused"] += 1
            continue
        outcomes["opened"] += 1
        while again.failure is None:
            try:
                found = await again.next_batch()
            except (ConfigError, OSError):
                break
            if found is None:
                break
            batch, payloads = found
            for group_id, stored in zip(batch.group_ids, payloads, strict=True):
                assert stored.content == contents[group_ids.index(group_id)]
            try:
                await again.acknowledge(batch.token)
            except OSError:
                break
        outcomes["set aside"] += again.state.num_set_aside_groups > 0
        await again.close()
        for leftover in tmp_path.glob("*.sqlite3-*"):
            leftover.unlink()

    assert outcomes["opened"] > 0
    assert outcomes["set aside"] > 0

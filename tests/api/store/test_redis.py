from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time

import pytest

from atroposlib.api.store.base import Payload
from atroposlib.api.store.redis import RedisRunStore
from atroposlib.errors import ConfigError, MissingExtraError
from tests.api.store.redis_replicas import Replica, replicas
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

SOON_S = 2.0


async def until(condition, *, within_s: float = SOON_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_open_of_a_new_run_applies_nothing(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        assert (replica.applied, replica.num_restored) == ([], 0)


async def test_open_again_applies_what_was_appended(redis_server: RedisServer) -> None:
    first = await Replica(redis_server.url, "again").open()
    await first.append_group(b"bytes")
    await first.append_guarded(b"batch")
    await first.store.close()

    second = await Replica(redis_server.url, "again").open()

    assert second.applied == first.applied
    assert second.num_guarded == 1
    await second.store.close()


async def test_open_after_compaction_restores_then_applies(redis_server: RedisServer) -> None:
    first = await Replica(redis_server.url, "compacted").open()
    for number in range(5):
        await first.store.append(b"%d" % number)
    await first.compact()
    await first.store.append(b"5")
    await first.store.close()

    second = await Replica(redis_server.url, "compacted").open()

    assert second.num_restored == 1
    assert second.applied == [b"%d" % number for number in range(6)]
    await second.store.close()


async def test_open_of_a_log_longer_than_a_page_applies_all(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (writer,):
        await asyncio.gather(*[writer.store.append(b"%d" % number) for number in range(1500)])

        reader = await Replica(redis_server.url, writer.run_name).open()

        assert reader.applied == writer.applied
        assert len(reader.applied) == 1500
        await reader.store.close()


async def test_append_from_two_replicas_is_applied_in_one_order(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as (first, second):
        await asyncio.gather(
            *[
                replica.store.append(b"%s %d" % (name, number))
                for number in range(300)
                for name, replica in ((b"first", first), (b"second", second))
            ]
        )
        await asyncio.gather(first.store.sync(), second.store.sync())

        assert first.applied == second.applied
        assert len(set(first.applied)) == 600
        own = [record for record in first.applied if record.startswith(b"first")]
        assert own == [b"first %d" % number for number in range(300)]


async def test_append_reaches_a_replica_that_only_reads(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as (writer, reader):
        await writer.store.append(b"news")

        await until(lambda: reader.applied == [b"news"], within_s=1.0)


async def test_append_cancelled_is_applied_or_absent_everywhere(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as (first, second):
        tasks = [asyncio.create_task(first.store.append(b"%d" % number)) for number in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(first.store.sync(), second.store.sync())

        assert first.applied == second.applied
        assert {b"%d" % number for number in range(1, 20, 2)} <= set(first.applied)


async def test_fence_contention_lets_every_record_in_once(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as both:
        attempts = await asyncio.gather(
            *[
                replica.append_guarded(b"%d-%d" % (which, number))
                for which, replica in enumerate(both)
                for number in range(25)
            ]
        )
        await asyncio.gather(*[replica.store.sync() for replica in both])

        assert both[0].applied == both[1].applied
        expected = {b"guarded %d-%d" % (which, number) for which in (0, 1) for number in range(25)}
        assert sorted(both[0].applied) == sorted(expected)
        assert max(attempts) > 1


async def test_refused_append_writes_nothing_and_shows_the_other(
    redis_server: RedisServer,
) -> None:
    async with replicas(redis_server.url, 2, poll_s=60.0) as (first, second):
        await first.append_guarded(b"batch")

        is_written = await second.store.append(b"guarded late", [Payload(7, b"late")], fence=0)

        assert not is_written
        assert second.applied == [b"guarded batch"]
        with pytest.raises(KeyError):
            await second.store.fetch([7])


async def test_payloads_come_in_the_order_asked_for(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as (writer, reader):
        contents = [os.urandom(40_000) for _ in range(40)]
        ids = [await writer.append_group(content) for content in contents]

        fetched = await reader.store.fetch(ids[::-1])

        assert fetched == contents[::-1]


async def test_payloads_discarded_are_gone_and_discard_repeats(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        kept, dropped = [await replica.append_group(b"x") for _ in range(2)]

        await replica.store.discard([dropped, 10**6])
        await replica.store.discard([dropped])

        assert await replica.store.fetch([kept]) == [b"x"]
        with pytest.raises(KeyError):
            await replica.store.fetch([kept, dropped])


async def test_payload_of_many_megabytes_goes_through(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        content = os.urandom(24 * 2**20)

        group_id = await replica.append_group(content)

        assert await replica.store.fetch([group_id]) == [content]


async def test_group_ids_never_meet(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as both:
        counts = [1, 700, 700, 3000, 5]
        blocks = await asyncio.gather(
            *[replica.store.new_group_ids(count) for count in counts for replica in both]
        )

        ids = [group_id for block in blocks for group_id in block]
        assert len(ids) == len(set(ids)) == 2 * sum(counts)


async def test_many_callers_at_once_share_ids_and_connections(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        ids = await asyncio.gather(*[replica.append_group(b"%d" % n) for n in range(300)])
        fetched = await asyncio.gather(*[replica.store.fetch([group_id]) for group_id in ids])

        assert sorted(ids) == list(range(300))
        assert fetched == [[b"%d" % number] for number in range(300)]
        assert "does not respond" not in caplog.text


async def test_compaction_gives_a_replica_that_fell_behind_the_snapshot(
    redis_server: RedisServer,
) -> None:
    async with replicas(redis_server.url, 2, poll_s=60.0) as (ahead, behind):
        await behind.store.append(b"known")
        for number in range(50):
            await ahead.store.append(b"%d" % number)
        await ahead.compact()
        await ahead.store.append(b"after")

        await behind.store.append(b"own")

        assert behind.num_restored == 1
        assert behind.applied == [*ahead.applied, b"own"]


async def test_compaction_by_the_slower_replica_changes_nothing(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2, poll_s=60.0) as (ahead, behind):
        await behind.store.append(b"0")
        await ahead.store.append(b"1")
        await ahead.compact()

        await behind.compact()

        third = await Replica(redis_server.url, ahead.run_name).open()
        assert third.applied == [b"0", b"1"]
        await third.store.close()


async def test_compaction_of_an_earlier_position_keeps_the_records_behind_it(
    redis_server: RedisServer,
) -> None:
    async with replicas(redis_server.url, 1) as (writer,):
        for number in range(4):
            await writer.store.append(b"%d" % number)

        await writer.store.compact(b'["0", "1"]', position=2)
        await writer.store.append(b"4")

        reader = await Replica(redis_server.url, writer.run_name).open()
        assert reader.num_restored == 1
        assert reader.applied == writer.applied == [b"%d" % number for number in range(5)]
        await reader.store.close()


async def test_compaction_under_load_keeps_every_record(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2) as (first, second):
        for round_number in range(10):
            await asyncio.gather(
                *[first.store.append(b"a%d-%d" % (round_number, n)) for n in range(20)],
                *[second.store.append(b"b%d-%d" % (round_number, n)) for n in range(20)],
                first.compact(),
                second.compact(),
            )
        await asyncio.gather(first.store.sync(), second.store.sync())

        assert first.applied == second.applied
        assert len(set(first.applied)) == len(first.applied) == 400


async def test_runs_do_not_see_each_other(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (one,), replicas(redis_server.url, 1) as (other,):
        await one.append_group(b"x")

        await other.store.sync()

        assert other.applied == []


def test_run_without_a_name_is_refused(redis_server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="--run"):
        RedisRunStore(redis_server.url, "")


def test_missing_client_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)

    with pytest.raises(MissingExtraError, match=r"'\.\[redis\]'"):
        RedisRunStore("redis://localhost", "run")


async def test_alive_replicas_lists_who_is_there(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 2, expiry_s=0.3) as (first, second):
        await asyncio.sleep(0)
        third = await Replica(redis_server.url, first.run_name, replica="third").open()
        assert await first.store.alive_replicas() == {
            first.store.replica,
            second.store.replica,
            "third",
        }

        await third.store.close()

        assert await first.store.alive_replicas() == {first.store.replica, second.store.replica}


def serve_until_killed(url: str, run_name: str, replica: str, pipe) -> None:  # type: ignore[no-untyped-def]
    """A second process: appends numbers, and tells each after it was acknowledged."""

    async def serve() -> None:
        process = await Replica(url, run_name, replica=replica, expiry_s=0.5).open()
        number = 0
        while True:
            await process.store.append(b"%s %d" % (replica.encode(), number))
            pipe.send_bytes(b"%s %d" % (replica.encode(), number))
            number += 1

    asyncio.run(serve())


async def test_replica_killed_loses_nothing_and_is_noticed(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1, expiry_s=0.5) as (survivor,):
        context = multiprocessing.get_context("spawn")
        told, telling = context.Pipe(duplex=False)
        process = context.Process(
            target=serve_until_killed,
            args=(redis_server.url, survivor.run_name, "doomed", telling),
        )
        process.start()
        await until(told.poll, within_s=30.0)
        for number in range(50):
            await survivor.store.append(b"survivor %d" % number)
        assert "doomed" in (await survivor.store.alive_replicas() or ())

        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        telling.close()
        acknowledged = []
        while told.poll():
            try:
                acknowledged.append(told.recv_bytes())
            except EOFError:
                break
        await survivor.store.sync()

        theirs = [record for record in survivor.applied if record.startswith(b"doomed")]
        assert theirs == [b"doomed %d" % number for number in range(len(theirs))]
        assert acknowledged == theirs[: len(acknowledged)]
        assert len(theirs) - len(acknowledged) <= 1
        deadline = time.monotonic() + 60
        while "doomed" in (await survivor.store.alive_replicas() or ()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

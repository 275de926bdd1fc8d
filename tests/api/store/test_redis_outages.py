from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from atroposlib.api.store.redis import RedisFullError, RedisRunStore, RunLostError
from atroposlib.errors import ConfigError, RunStoreError
from tests.api.store.redis_replicas import Replica, replicas
from tests.redis_server import FaultyWire, RedisServer

pytestmark = pytest.mark.slow

StartRedis = Callable[..., RedisServer]


@pytest.fixture
def start_redis() -> Iterator[StartRedis]:
    """Starts servers of the test's own, with the options given."""
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        servers.append(RedisServer(*options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def durable_server(start_redis: StartRedis) -> RedisServer:
    return start_redis("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
async def wire(redis_server: RedisServer) -> AsyncIterator[FaultyWire]:
    async with FaultyWire(redis_server) as faulty:
        yield faulty


async def append_until(replica: Replica, name: bytes, stop: asyncio.Event) -> list[bytes]:
    """Append numbered groups one after the other; return those acknowledged."""
    acknowledged: list[bytes] = []
    while not stop.is_set():
        record = b"%s %d" % (name, len(acknowledged))
        if await replica.store.append(record):
            acknowledged.append(record)
    return acknowledged


async def fill(replica: Replica) -> None:
    """Append 16 MiB."""
    for _ in range(128):
        await replica.append_group(b"x" * 2**17)


async def test_redis_killed_under_load_keeps_what_it_acknowledged_once(
    durable_server: RedisServer,
) -> None:
    async with replicas(durable_server.url, 2) as both:
        stop = asyncio.Event()
        writers = [
            asyncio.create_task(append_until(replica, b"%d-%d" % (which, writer), stop))
            for which, replica in enumerate(both)
            for writer in range(4)
        ]
        for _ in range(3):
            await asyncio.sleep(0.15)
            await asyncio.to_thread(durable_server.kill)
            await asyncio.to_thread(durable_server.start)
        await asyncio.sleep(0.1)
        stop.set()
        acknowledged = [record for part in await asyncio.gather(*writers) for record in part]
        await asyncio.gather(*[replica.store.sync() for replica in both])

        fresh = await Replica(durable_server.url, both[0].run_name).open()
        assert both[0].applied == both[1].applied == fresh.applied
        assert sorted(fresh.applied) == sorted(acknowledged)
        assert len(acknowledged) > 100
        await fresh.store.close()


async def test_append_whose_reply_is_lost_is_written_once(wire: FaultyWire) -> None:
    async with replicas(wire.url, 1) as (replica,):
        await replica.append_group(b"before")

        wire.drop_reply_to(b"precious")
        group_id = await replica.append_group(b"precious")

        assert wire.num_dropped == 1
        assert replica.applied == [b"group 0", b"group 1"]
        assert await replica.store.fetch([group_id]) == [b"precious"]


async def test_guarded_append_whose_reply_is_lost_is_not_refused(wire: FaultyWire) -> None:
    async with replicas(wire.url, 1) as (replica,):
        wire.drop_reply_to(b"guarded precious")

        attempts = await replica.append_guarded(b"precious")

        assert (wire.num_dropped, attempts) == (1, 1)
        assert replica.applied == [b"guarded precious"]


async def test_append_waits_while_redis_hangs(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        redis_server.freeze()
        task = asyncio.create_task(replica.store.append(b"late"))
        await asyncio.sleep(0.1)
        assert not task.done()

        redis_server.thaw()

        assert await task
        assert replica.applied == [b"late"]


async def test_append_gives_up_and_names_the_address(start_redis: StartRedis) -> None:
    server = start_redis()
    async with replicas(server.url, 1, outage_s=0.2) as (replica,):
        server.kill()

        with pytest.raises(RunStoreError, match=str(server.socket)) as caught:
            await replica.store.append(b"nowhere")

        assert isinstance(caught.value, OSError)
        assert "attempts" in str(caught.value)


async def test_store_goes_on_after_an_append_gave_up(durable_server: RedisServer) -> None:
    async with replicas(durable_server.url, 1, outage_s=0.1) as (replica,):
        await replica.store.append(b"before")
        durable_server.kill()
        with pytest.raises(RunStoreError):
            await replica.store.append(b"refused")
        durable_server.start()

        await replica.store.append(b"after")

        assert replica.applied == [b"before", b"after"]


async def test_flushed_redis_is_an_error_for_good(start_redis: StartRedis) -> None:
    server = start_redis()
    async with replicas(server.url, 1) as (replica,):
        await replica.append_group(b"x")
        server.command("FLUSHALL")

        with pytest.raises(RunLostError, match="lost data of this run") as caught:
            await replica.store.append(b"more")

        assert isinstance(caught.value, ConfigError)
        with pytest.raises(RunLostError):
            await replica.store.sync()
        with pytest.raises(RunLostError):
            await replica.store.new_group_ids(2000)
        assert replica.applied == [b"group 0"]


async def test_log_cut_and_grown_by_another_replica_is_noticed(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1, poll_s=60.0) as (replica,):
        for number in range(3):
            await replica.store.append(b"%d" % number)
        log = f"atropos:{{{replica.run_name}}}:log"
        redis_server.command("RPOP", log)
        late = await Replica(redis_server.url, replica.run_name).open()
        await late.store.append(b"other")

        with pytest.raises(RunLostError, match="other records"):
            await replica.store.sync()
        await late.store.close()


async def test_ids_given_out_before_redis_lost_them_are_not_used(
    redis_server: RedisServer,
) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        await replica.store.new_group_ids(1)
        session = replica.store._keys.session
        redis_server.command("HSET", session, "ids", "0")

        with pytest.raises(RunLostError, match="no longer knows"):
            await replica.store.append(b"group")


async def test_full_redis_refuses_groups_but_lets_batches_leave(start_redis: StartRedis) -> None:
    server = start_redis("--maxmemory", "8mb")
    async with replicas(server.url, 1) as (replica,):
        with pytest.raises(RedisFullError, match="maxmemory"):
            await fill(replica)
        stored = [int(record.split()[1]) for record in replica.applied]

        assert await replica.append_guarded(b"batch leaves") == 1
        await replica.store.discard(stored)
        await replica.append_group(b"there is room again")

        assert len(replica.applied) == len(stored) + 2


async def test_full_redis_still_takes_a_light_record_sent_along(start_redis: StartRedis) -> None:
    server = start_redis("--maxmemory", "8mb")
    async with replicas(server.url, 1) as (replica,):
        with pytest.raises(RedisFullError):
            await fill(replica)

        heavy, light = await asyncio.gather(
            replica.append_group(b"x" * 2**17),
            replica.store.append(b"light"),
            return_exceptions=True,
        )

        assert isinstance(heavy, RedisFullError)
        assert light is True


async def test_silence_of_others_counts_only_after_an_outage_is_over(
    durable_server: RedisServer,
) -> None:
    async with replicas(durable_server.url, 2, expiry_s=0.3) as (first, second):
        both = {first.store.replica, second.store.replica}
        await asyncio.sleep(0.2)
        durable_server.kill()
        await asyncio.sleep(0.2)
        await asyncio.sleep(0.2)
        durable_server.start()

        seen = [await first.store.alive_replicas() for _ in range(3)]

        assert seen == [both] * 3


async def test_open_warns_when_redis_does_not_keep_what_it_acknowledged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(redis_server.url, 1):
        assert "appendonly off" in caplog.text


async def test_open_warns_when_redis_may_throw_data_away(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    async with replicas(server.url, 1):
        assert "allkeys-lru" in caplog.text


async def test_open_tells_when_a_power_cut_may_lose_the_last_second(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async with replicas(start_redis("--appendonly", "yes").url, 1):
        assert "appendfsync everysec" in caplog.text
        assert "appendonly off" not in caplog.text


async def test_password_appears_nowhere(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis("--requirepass", "s3cret")
    caplog.set_level(logging.DEBUG)
    right = server.url.replace("unix://", "unix://:s3cret@")
    async with replicas(right, 1, outage_s=0.1) as (replica,):
        await replica.store.append(b"let in")
        server.kill()
        with pytest.raises(RunStoreError) as away:
            await replica.store.append(b"not now")
        server.start()
        wrong = Replica(server.url.replace("unix://", "unix://:s3cret-wrong@"), "run")
        with pytest.raises(ConfigError) as refused:
            await wrong.open()
        await wrong.store.close()

    assert "s3cret" not in f"{away.value} {refused.value} {caplog.text}"


@pytest.mark.parametrize(
    "url", ["redis://:s3cret/slash@host:6379/0", "http://:s3cret@host", "redis://h:s3cret"]
)
def test_malformed_url_is_refused_without_quoting_it(url: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="redis://") as caught:
        RedisRunStore(url, "run")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_open_of_nothing_is_refused_at_once(free_port: int) -> None:
    pytest.importorskip("redis")
    replica = Replica(f"redis://127.0.0.1:{free_port}/3", "run", outage_s=0.1)

    with pytest.raises(ConfigError, match=f"127.0.0.1:{free_port}/3"):
        await replica.open()

    await replica.store.close()


async def test_old_redis_is_refused() -> None:
    pytest.importorskip("redis")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"redis_version:6.2.14\r\naof_enabled:1\r\n"
        while data := await reader.read(2**16):
            is_info = b"\r\nINFO\r\n" in data
            replies = data.count(b"*")
            reply = b"$%d\r\n%s\r\n" % (len(info), info) if is_info else b"+OK\r\n" * replies
            writer.write(reply)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    replica = Replica(f"redis://127.0.0.1:{port}", "run", outage_s=0.1)
    with pytest.raises(ConfigError, match=r"Redis 6\.2\.14.*7\.0"):
        await replica.open()
    await replica.store.close()
    listener.close()


async def test_run_of_another_format_is_refused(redis_server: RedisServer) -> None:
    redis_server.command("HSET", "atropos:{future}:meta", "format", "2")
    replica = Replica(redis_server.url, "future")

    with pytest.raises(ConfigError, match="format 2"):
        await replica.open()

    await replica.store.close()


async def test_closed_store_refuses(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        pass

    with pytest.raises(RunStoreError, match="closed"):
        await replica.store.append(b"too late")


async def test_close_writes_what_waits(redis_server: RedisServer) -> None:
    async with replicas(redis_server.url, 1) as (replica,):
        tasks = [asyncio.create_task(replica.store.append(b"%d" % n)) for n in range(600)]
        await asyncio.sleep(0)

    assert await asyncio.gather(*tasks) == [True] * 600


async def test_close_does_not_wait_for_a_redis_that_is_gone(start_redis: StartRedis) -> None:
    server = start_redis()
    async with replicas(server.url, 1):
        server.close()


@pytest.mark.long
async def test_close_ends_whatever_a_beat_is_doing(redis_server: RedisServer) -> None:
    for beats in range(60):
        async with replicas(redis_server.url, 1, expiry_s=0.003, poll_s=0.001) as (replica,):
            await asyncio.sleep(beats * 1e-4)
            closing = asyncio.create_task(replica.store.close())
            _, late = await asyncio.wait([closing], timeout=60)
            assert not late, f"still closing after {beats * 1e-4:.4f} s of beats"

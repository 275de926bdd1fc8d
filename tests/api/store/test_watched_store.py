"""A store that remembers whether it works."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.api.store.base import MemoryRunStore, Payload, StoreFullError, WatchedStore


class FragileStore(MemoryRunStore):
    """Fails, or hangs, as it is told."""

    error: Exception | None = None
    sync_error: Exception | None = None
    hangs = False

    async def append(self, *args, **options):
        if self.error is not None:
            raise self.error
        return await super().append(*args, **options)

    async def sync(self):
        if self.hangs:
            await asyncio.Event().wait()
        if self.sync_error is not None:
            raise self.sync_error


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fragile() -> FragileStore:
    return FragileStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def watched(fragile: FragileStore, clock: Clock) -> WatchedStore:
    store = WatchedStore(fragile, clock=clock)
    await store.open(lambda position, record: None, lambda snapshot: None)
    return store


async def test_store_that_works_has_no_problem(watched: WatchedStore) -> None:
    assert await watched.append(b"record", [Payload(0, b"payload")])

    assert await watched.fetch([0]) == [b"payload"]
    assert await watched.problem() is None


async def test_failed_write_is_a_problem_until_one_works(
    watched: WatchedStore, fragile: FragileStore
) -> None:
    fragile.error = OSError("the disk is full")
    with pytest.raises(OSError, match="full"):
        await watched.append(b"record")
    assert await watched.problem() == "append: OSError: the disk is full"

    fragile.error = None
    await watched.append(b"record")

    assert await watched.problem() is None


async def test_reads_that_work_do_not_hide_writes_that_fail(
    watched: WatchedStore, fragile: FragileStore
) -> None:
    await watched.append(b"record", [Payload(0, b"payload")])
    fragile.error = OSError("the disk is full")
    with pytest.raises(OSError, match="full"):
        await watched.append(b"record")

    await watched.new_group_ids(3)
    await watched.fetch([0])

    assert await watched.problem() == "append: OSError: the disk is full"


async def test_full_store_is_no_problem_as_it_still_delivers(
    watched: WatchedStore, fragile: FragileStore, caplog: pytest.LogCaptureFixture
) -> None:
    fragile.error = StoreFullError("the disk is full")
    for _ in range(2):
        with pytest.raises(StoreFullError):
            await watched.append(b"record", [Payload(0, b"payload")])

    assert await watched.problem() is None
    assert caplog.text.count("the store fails to append") == 1


async def test_failed_write_is_forgotten_when_nobody_tries_again(
    watched: WatchedStore, fragile: FragileStore, clock: Clock
) -> None:
    fragile.error = OSError("the disk is full")
    with pytest.raises(OSError, match="full"):
        await watched.append(b"record")

    clock.now = 29.0
    assert await watched.problem() is not None
    clock.now = 31.0
    assert await watched.problem() is None


async def test_store_that_cannot_be_asked_has_a_problem(
    watched: WatchedStore, fragile: FragileStore
) -> None:
    fragile.sync_error = ConnectionError("refused")

    assert await watched.problem() == "ConnectionError: refused"


async def test_store_that_does_not_answer_has_a_problem(
    watched: WatchedStore, fragile: FragileStore
) -> None:
    fragile.hangs = True

    problem = await watched.problem(timeout_s=0.01)
    assert problem == "the store did not answer within 0.01 s"


async def test_group_that_is_not_there_is_no_problem(watched: WatchedStore) -> None:
    with pytest.raises(KeyError):
        await watched.fetch([17])

    assert await watched.problem() is None


async def test_observer_hears_of_what_succeeded(fragile: FragileStore) -> None:
    heard: list[tuple[str, float]] = []
    watched = WatchedStore(fragile, observe=lambda *what: heard.append(what))
    await watched.open(lambda position, record: None, lambda snapshot: None)

    await watched.append(b"record", [Payload(0, b"payload")])
    await watched.fetch([0])
    fragile.error = OSError()
    with pytest.raises(OSError):  # noqa: PT011 - any failure of the store
        await watched.append(b"record")

    assert [operation for operation, _ in heard] == ["append", "fetch"]
    assert all(seconds >= 0 for _, seconds in heard)


async def test_failure_and_recovery_are_logged_once(
    watched: WatchedStore, fragile: FragileStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fragile.error = OSError("the disk is full")
    for _ in range(3):
        with pytest.raises(OSError, match="full"):
            await watched.append(b"record")
    fragile.error = None
    await watched.append(b"record")
    await watched.append(b"record")

    assert [record.getMessage() for record in caplog.records] == [
        "the store fails to append: OSError: the disk is full",
        "the store can append again",
    ]

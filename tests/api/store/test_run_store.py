"""What every store of a run does; `make_store` runs each test on each of them."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.api.store.base import DamagedPayloadError, Payload
from tests.api.store.stores import MakeStore, OpenRun, is_stored, opened

pytestmark = pytest.mark.slow


async def test_open_of_a_new_run_applies_nothing(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        assert run.records == []


async def test_append_applies_the_record_before_it_returns(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        assert await run.store.append(b"one") is True
        assert run.records == [b"one"]


async def test_append_one_after_another_keeps_the_order(make_store: MakeStore) -> None:
    expected = [b"%d" % number for number in range(50)]
    async with opened(make_store) as run:
        for record in expected:
            await run.store.append(record)

        assert run.records == expected


async def test_append_at_once_applies_each_record_once(make_store: MakeStore) -> None:
    expected = [b"%d" % number for number in range(500)]
    async with opened(make_store) as run:
        answers = await asyncio.gather(*[run.store.append(record) for record in expected])

        assert all(answers)
        assert sorted(run.records) == sorted(expected)


async def test_open_again_applies_the_same_log(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        await asyncio.gather(*[run.store.append(b"%d" % number) for number in range(2500)])
        expected = run.records
    async with opened(make_store) as again:
        assert again.records == expected
        await again.store.append(b"next")
        assert again.records == [*expected, b"next"]


@pytest.mark.parametrize("record", [b"", b"\x00\xff\x00", b"r" * 300_000])
async def test_records_of_any_bytes_survive_a_restart(make_store: MakeStore, record: bytes) -> None:
    async with opened(make_store) as run:
        await run.store.append(record)
    async with opened(make_store) as again:
        assert again.records == [record]


async def test_guarded_append_under_the_present_fence_is_written(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        answers = [await run.guarded(b"a"), await run.guarded(b"b")]

        assert answers == [True, True]
        assert run.records == [b"guarded a", b"guarded b"]


async def test_guarded_append_behind_another_is_refused(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        answers = await asyncio.gather(*[run.guarded(fence=0) for _ in range(5)])

        assert sorted(answers) == [False, False, False, False, True]
        assert len(run.records) == 1


async def test_refused_append_writes_no_payload(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        await run.guarded(b"first")
        (group_id,) = await run.store.new_group_ids(1)

        assert await run.store.append(b"late", [Payload(group_id, b"bytes")], fence=0) is False
        assert not await is_stored(run.store, group_id)


async def test_records_without_a_fence_do_not_move_it(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        await run.store.append(b"free")

        assert await run.guarded(b"a", fence=0) is True


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_fence_goes_on_after_a_restart(make_store: MakeStore, is_compacted: bool) -> None:
    async with opened(make_store) as run:
        for _ in range(3):
            await run.guarded()
        if is_compacted:
            await run.compact()
            await run.guarded()
        fence = run.fence
    async with opened(make_store) as again:
        assert await again.guarded(fence=fence - 1) is False
        assert await again.guarded(fence=fence) is True


async def test_cancelled_append_is_applied_whole_or_not_at_all(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        ids = list(await run.store.new_group_ids(40))
        tasks = [
            asyncio.create_task(run.store.append(b"%d" % group_id, [Payload(group_id, b"bytes")]))
            for group_id in ids
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await run.store.append(b"last")

        applied = {int(record) for record in run.records[:-1]}
        assert applied >= set(ids[1::2])
        assert {group_id for group_id in ids if await is_stored(run.store, group_id)} == applied
        expected = run.records
    async with opened(make_store) as again:
        assert again.records == expected


@pytest.mark.parametrize("size", [0, 1, 300, 33_000, 270_000, 1_000_000])
async def test_payloads_of_any_size_survive_a_restart(make_store: MakeStore, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    async with opened(make_store) as run:
        group_id = await run.group(content[:size])
        assert await run.store.fetch([group_id]) == [content[:size]]
    async with opened(make_store) as again:
        assert await again.store.fetch([group_id]) == [content[:size]]


async def test_fetch_keeps_the_order_asked_for(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        ids = [await run.group(b"%d" % number) for number in range(5)]

        asked = [ids[3], ids[0], ids[4], ids[0]]
        assert await run.store.fetch(asked) == [b"3", b"0", b"4", b"0"]
        assert await run.store.fetch([]) == []


async def test_fetch_of_an_unknown_group_raises_key_error(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        group_id = await run.group(b"bytes")

        for unknown in (group_id + 1, 2**63, 10**30):
            with pytest.raises(KeyError):
                await run.store.fetch([group_id, unknown])


async def test_discarded_payloads_are_gone_also_after_a_restart(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        ids = [await run.group(b"x" * 50_000) for _ in range(100)]

        await run.store.discard([*ids[:90], ids[-1] + 1000])
        stored = [group_id for group_id in ids if await is_stored(run.store, group_id)]
        await run.store.discard(ids[:5])

        assert stored == ids[90:]
    async with opened(make_store) as again:
        assert [group_id for group_id in ids if await is_stored(again.store, group_id)] == stored


async def test_group_ids_are_never_given_twice(make_store: MakeStore) -> None:
    given: list[int] = []
    for _ in range(3):
        async with opened(make_store) as run:
            ranges = await asyncio.gather(*[run.store.new_group_ids(n) for n in (1, 3, 0, 2000)])
            given += [group_id for ids in ranges for group_id in ids]

    assert len(set(given)) == len(given) == 3 * 2004


async def test_compaction_is_restored_with_what_came_behind_it(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        for number in range(20):
            await run.store.append(b"%d" % number)
        await run.compact()
        await run.store.append(b"behind")
        expected = run.records
    for _ in range(2):
        async with opened(make_store) as again:
            assert again.snapshot_records == 20
            assert again.records == expected


async def test_compaction_keeps_records_behind_its_position(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        for number in range(10):
            await run.store.append(b"%d" % number)
        await run.store.compact(b'["a", "b", "c"]', position=3)
    async with opened(make_store) as again:
        assert again.records == [b"a", b"b", b"c", *[b"%d" % number for number in range(3, 10)]]


async def test_compaction_older_than_the_last_changes_nothing(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        for number in range(4):
            await run.store.append(b"%d" % number)
        await run.compact()
        await run.store.compact(b'["stale"]', position=1)
    async with opened(make_store) as again:
        assert again.records == [b"0", b"1", b"2", b"3"]


async def test_compaction_while_others_append_loses_nothing(make_store: MakeStore) -> None:
    async def append_some(run: OpenRun, name: int) -> None:
        for number in range(60):
            if number % 7 == 0:
                await run.guarded(b"%d" % name)
            await run.group(b"%d %d" % (name, number))

    async def compact_often(run: OpenRun, work: asyncio.Future[list[None]]) -> None:
        while not work.done():
            await run.compact()
            await asyncio.sleep(0.001)

    async with opened(make_store) as run:
        work = asyncio.gather(*[append_some(run, name) for name in range(8)])
        await asyncio.gather(work, compact_often(run, work))
        expected = run.records
        assert sum(record.startswith(b"group") for record in expected) == 480
    async with opened(make_store) as again:
        assert again.records == expected
        assert again.snapshot_records > 0
        assert await again.guarded() is True


async def test_sync_without_other_replicas_changes_nothing(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        await run.store.append(b"one")
        await run.store.sync()

        assert run.records == [b"one"]


async def test_fetch_checks_each_payload(make_store: MakeStore) -> None:
    async with opened(make_store) as run:
        ids = [await run.group(b"%d" % number) for number in range(40)]
        seen: list[bytes] = []

        def accept(content: bytes) -> bool:
            seen.append(content)
            return True

        assert await run.store.fetch(ids, [accept] * 40) == seen == [b"%d" % n for n in range(40)]

        with pytest.raises(DamagedPayloadError, match=f"group {ids[20]} "):
            await run.store.fetch(ids, [lambda content: content != b"20"] * 40)
        assert await run.store.fetch(ids[:1]) == [b"0"]

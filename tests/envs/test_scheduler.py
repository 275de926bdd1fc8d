"""The scheduler with scripted rollouts: no service, no environment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from atroposlib.envs.scheduler import RolloutScheduler

INTERVAL_S = 0.02


class Unhashable:
    """An item that refuses everything the library must not do with it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("items must not be compared")

    def __copy__(self) -> Any:
        raise AssertionError("items must not be copied")

    def __bool__(self) -> bool:
        raise AssertionError("items must not be judged")


class Rig:
    """A scheduler whose rollouts run until they are released."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items = list(items)
        self.started: list[Any] = []
        self.cancelled: list[Any] = []
        self.failures: Counter[str] = Counter()
        self.stragglers: Counter[str] = Counter()
        self.releases: dict[int, asyncio.Future[Any]] = {}
        self.scheduler = RolloutScheduler(
            run_rollout=self.run_rollout,
            next_item=self.next_item,
            count_failure=lambda name: self.failures.update([name]),
            count_straggler=lambda name: self.stragglers.update([name]),
        )

    async def next_item(self) -> Any:
        return self.items.pop(0) if self.items else None

    async def run_rollout(self, item_uuid: str) -> Any:
        item = self.scheduler.running_items[item_uuid]["item"]
        self.releases[len(self.started)] = release = asyncio.get_running_loop().create_future()
        self.started.append(item)
        try:
            return await release
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        finally:
            self.scheduler.running_items.pop(item_uuid, None)

    async def fill(self, limit: int, timeout_s: float = 0.0, retries: int = 0) -> None:
        await self.scheduler.fill(lambda: limit, timeout_s=timeout_s, retries=retries)
        await turn()


async def turn() -> None:
    """Let every ready task and callback run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_fill_starts_up_to_the_limit() -> None:
    rig = Rig("abcdef")

    await rig.fill(4)

    assert rig.started == list("abcd")
    assert len(rig.scheduler.workers) == len(rig.scheduler.running_items) == 4
    await rig.scheduler.shut_down(grace_s=1)


async def test_fill_lower_limit_cancels_nothing() -> None:
    rig = Rig("abcdef")
    await rig.fill(4)

    await rig.fill(1)

    assert len(rig.scheduler.workers) == 4
    assert rig.cancelled == []
    await rig.scheduler.shut_down(grace_s=1)


async def test_fill_takes_the_backlog_first_and_from_its_end() -> None:
    rig = Rig("ab")
    rig.scheduler.backlog.extend(["first", "last"])

    await rig.fill(3)

    assert rig.started == ["last", "first", "a"]
    await rig.scheduler.shut_down(grace_s=1)


async def test_fill_limit_sinking_while_an_item_is_awaited_keeps_the_item() -> None:
    rig = Rig("a")
    limits = iter([1, 0])

    await rig.scheduler.fill(lambda: next(limits), timeout_s=0)

    assert rig.scheduler.backlog == ["a"]
    assert rig.started == []


async def test_items_are_never_hashed_copied_or_compared() -> None:
    item = Unhashable()
    rig = Rig([item])
    await rig.fill(1)

    rig.scheduler.set_running_aside()
    await turn()
    await rig.fill(1)

    assert len(rig.started) == 2
    assert all(started is item for started in rig.started)
    await rig.scheduler.shut_down(grace_s=1)


async def test_finished_rollout_leaves_room_and_is_remembered() -> None:
    rig = Rig("a")
    await rig.fill(1)

    rig.releases[0].set_result({"scores": [1.0]})
    await turn()

    assert rig.scheduler.workers == set()
    assert rig.scheduler.last_completed_item == {"scores": [1.0]}


async def test_raising_rollout_is_counted_under_its_name(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("a")
    await rig.fill(1)

    rig.releases[0].set_exception(ZeroDivisionError("reward"))
    await turn()

    assert rig.failures == {"ZeroDivisionError": 1}
    assert "reward" in caplog.text
    assert rig.scheduler.workers == set()


async def test_time_out_cancels_drops_and_counts() -> None:
    rig = Rig("a")
    await rig.fill(1, timeout_s=0.01)

    await asyncio.sleep(0.03)

    assert rig.cancelled == ["a"]
    assert rig.failures == {"worker_timeout": 1}
    assert rig.scheduler.backlog == []
    assert rig.scheduler.workers == set()


async def test_time_out_with_retries_tries_the_item_again_and_then_gives_it_up() -> None:
    item = Unhashable()
    rig = Rig([item])
    for _ in range(3):
        await rig.fill(1, timeout_s=0.01, retries=2)
        await asyncio.sleep(0.02)

    await rig.fill(1)

    assert [started is item for started in rig.started] == [True] * 3
    assert rig.stragglers == {"retried": 2}
    assert rig.failures == {"worker_timeout": 1}
    assert rig.scheduler.workers == set()


async def test_time_out_spares_a_rollout_that_delivers() -> None:
    rig = Rig("a")
    await rig.fill(1, timeout_s=0.01)
    rig.scheduler.running_items.clear()  # as `handle_env` does once the group exists

    await asyncio.sleep(0.03)

    assert rig.cancelled == []
    rig.releases[0].set_result(None)
    await turn()
    assert rig.scheduler.workers == set()


async def test_set_running_aside_cancels_and_keeps_the_items() -> None:
    rig = Rig("ab")
    await rig.fill(2)

    num_items = rig.scheduler.set_running_aside()
    await turn()

    assert num_items == 2
    assert sorted(rig.cancelled) == sorted(rig.scheduler.backlog) == ["a", "b"]
    assert rig.failures == {}


async def test_run_starts_the_next_rollout_at_once_after_one_finishes() -> None:
    rig = Rig("abc")

    async def refresh() -> bool:
        return True

    running = asyncio.create_task(
        rig.scheduler.run(refresh=refresh, fill=lambda: rig.fill(1), interval_s=3600)
    )
    await turn()
    rig.releases[0].set_result(None)
    await turn()
    rig.releases[1].set_result(None)
    await turn()

    assert rig.started == list("abc")
    running.cancel()
    await asyncio.wait({running})
    await rig.scheduler.shut_down(grace_s=1)


async def test_run_ends_when_refresh_says_so_even_while_an_item_is_awaited() -> None:
    rig = Rig()
    answers = iter([True, True, False])

    async def refresh() -> bool:
        return next(answers)

    async def fill_for_ever() -> None:
        await asyncio.Event().wait()

    await asyncio.wait_for(
        rig.scheduler.run(refresh=refresh, fill=fill_for_ever, interval_s=INTERVAL_S), 60
    )

    assert next(answers, None) is None


async def test_run_passes_on_what_fill_raises() -> None:
    rig = Rig()

    async def refresh() -> bool:
        return True

    async def fill() -> None:
        raise RuntimeError("data set is gone")

    with pytest.raises(RuntimeError, match="data set is gone"):
        await rig.scheduler.run(refresh=refresh, fill=fill, interval_s=INTERVAL_S)


async def test_run_does_not_take_a_cancellation_inside_fill_for_its_end() -> None:
    rig = Rig()

    async def refresh() -> bool:
        return True

    async def fill() -> None:
        task = asyncio.create_task(asyncio.sleep(100))
        task.cancel()
        await task

    with pytest.raises(RuntimeError, match="cancelled by its own code"):
        await rig.scheduler.run(refresh=refresh, fill=fill, interval_s=INTERVAL_S)


async def test_request_refresh_comes_before_the_interval_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep = asyncio.sleep
    # Requests within half an interval are merged; the test does not wait for that.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
    rig = Rig()
    refreshed = asyncio.Event()
    num_refreshes = 0

    async def refresh() -> bool:
        nonlocal num_refreshes
        num_refreshes += 1
        if num_refreshes == 2:
            refreshed.set()
        return True

    running = asyncio.create_task(
        rig.scheduler.run(refresh=refresh, fill=lambda: rig.fill(0), interval_s=3600.0)
    )
    await turn()
    rig.scheduler.request_refresh()
    await asyncio.wait_for(refreshed.wait(), 60)

    running.cancel()
    await asyncio.wait({running})


async def test_shut_down_leaves_no_task_and_lets_deliveries_finish() -> None:
    before = asyncio.all_tasks()
    rig = Rig("abc")
    await rig.fill(3)
    delivering = next(iter(rig.scheduler.running_items))
    del rig.scheduler.running_items[delivering]
    asyncio.get_running_loop().call_later(0.01, rig.releases[0].set_result, "sent")

    await rig.scheduler.shut_down(grace_s=1)

    assert rig.cancelled == ["b", "c"]
    assert rig.scheduler.last_completed_item == "sent"
    assert asyncio.all_tasks() == before


async def test_shut_down_does_not_interrupt_the_clean_up_of_a_cancelled_rollout() -> None:
    rig = Rig("ab")
    cleaned_up = []

    async def run_rollout(item_uuid: str) -> None:
        if rig.scheduler.running_items[item_uuid]["item"] == "a":  # its group is sent
            del rig.scheduler.running_items[item_uuid]
            await asyncio.sleep(0.01)
            return
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.1)
            cleaned_up.append(item_uuid)

    rig.scheduler._run_rollout = run_rollout
    await rig.fill(2)

    await rig.scheduler.shut_down(grace_s=5)

    assert len(cleaned_up) == 1


async def test_shut_down_counts_groups_that_were_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("ab")
    await rig.fill(2)
    rig.scheduler.running_items.clear()  # both have a group, which is sent

    await rig.scheduler.shut_down(grace_s=0.01)

    assert rig.failures == {"not_sent": 2}
    assert "2 groups were not sent within 0.01 s" in caplog.text


async def test_shut_down_lets_rollouts_finish_within_their_grace() -> None:
    rig = Rig("ab")
    await rig.fill(2)
    asyncio.get_running_loop().call_later(0.01, rig.releases[0].set_result, "in time")

    await rig.scheduler.shut_down(grace_s=1, rollout_grace_s=0.05)

    assert rig.scheduler.last_completed_item == "in time"
    assert rig.cancelled == ["b"]


async def test_shut_down_cancelled_skips_the_grace_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    rig = Rig("ab")
    await rig.fill(2)
    closing = asyncio.create_task(rig.scheduler.shut_down(grace_s=1, rollout_grace_s=3600))
    await turn()

    closing.cancel()
    await asyncio.wait({closing}, timeout=1)

    assert closing.cancelled()
    assert rig.cancelled == ["a", "b"]
    assert asyncio.all_tasks() == before


async def test_shut_down_names_a_task_that_ignores_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = asyncio.Event()

    async def stubborn(_: str) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    scheduler = RolloutScheduler(
        run_rollout=stubborn, next_item=Rig("a").next_item, count_failure=lambda _: None
    )
    await scheduler.fill(lambda: 1, timeout_s=0)
    await turn()

    await scheduler.shut_down(grace_s=0.01)

    assert "ignores its cancellation" in caplog.text
    over.set()
    await turn()

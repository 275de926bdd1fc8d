"""Random operations and restarts, compared with a model of a run: a list and a dictionary."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.store.base import MemoryRunStore, Payload, RunStore
from atroposlib.api.store.sqlite import SqliteRunStore
from tests.api.store.stores import OpenRun, is_stored

pytestmark = pytest.mark.slow

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "group", "groups", "guarded", "late", "discard", "compact", "restart"]
        ),
        st.integers(0, 40_000),
    ),
    max_size=25,
)


@dataclass
class Model:
    records: list[bytes] = field(default_factory=list)
    payloads: dict[int, bytes] = field(default_factory=dict)
    given_ids: set[int] = field(default_factory=set)


async def add_groups(run: OpenRun, model: Model, count: int, size: int) -> None:
    ids = await run.store.new_group_ids(count)
    assert model.given_ids.isdisjoint(ids)
    model.given_ids.update(ids)
    payloads = [Payload(group_id, b"%d" % group_id * size) for group_id in ids]
    assert await run.store.append(b"groups", payloads)
    model.records.append(b"groups")
    model.payloads.update(payloads)


async def take_step(run: OpenRun, model: Model, name: str, number: int) -> None:
    """Do one thing to the store and the same to the model."""
    if name == "append":
        assert await run.store.append(b"%d" % number)
        model.records.append(b"%d" % number)
    elif name in ("group", "groups"):
        await add_groups(run, model, 1 if name == "group" else number % 4, number)
    elif name == "guarded":
        assert await run.guarded(b"%d" % number)
        model.records.append(b"guarded %d" % number)
    elif name == "late" and run.fence:
        assert not await run.guarded(fence=number % run.fence)
    elif name == "discard" and model.given_ids:
        unwanted = sorted(model.given_ids)[number % len(model.given_ids) :: 2]
        await run.store.discard(unwanted)
        for group_id in unwanted:
            model.payloads.pop(group_id, None)
    elif name == "compact":
        await run.compact()


async def check(run: OpenRun, model: Model) -> None:
    assert run.records == model.records
    assert await run.store.fetch(list(model.payloads)) == list(model.payloads.values())
    for group_id in model.given_ids - model.payloads.keys():
        assert not await is_stored(run.store, group_id)


async def play(make_store: type[RunStore], steps: list[tuple[str, int]]) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        memory = MemoryRunStore()

        async def open_run() -> OpenRun:
            is_memory = make_store is MemoryRunStore
            run = OpenRun(memory if is_memory else SqliteRunStore(Path(folder) / "run.sqlite3"))
            await run.store.open(run.apply, run.restore)
            return run

        run = await open_run()
        for name, number in [*steps, ("restart", 0)]:
            if name == "restart":
                await run.store.close()
                run = await open_run()
            await take_step(run, model, name, number)
            await check(run, model)
        await run.store.close()


@pytest.mark.parametrize("make_store", [MemoryRunStore, SqliteRunStore])
def test_random_operations_lead_to_what_the_model_says(make_store: type[RunStore]) -> None:
    @settings(max_examples=60)
    @given(steps=STEPS)
    def run_example(steps: list[tuple[str, int]]) -> None:
        asyncio.run(play(make_store, steps))

    run_example()

"""Kill the process that writes a run at random moments: what it was told stays true."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atroposlib.api.store.sqlite import SqliteRunStore
from tests.api.store.crashing_process import content_of
from tests.api.store.stores import OpenRun, is_stored, opened

pytestmark = pytest.mark.slow

READY_S = 20.0


class Notes:
    """What the killed processes noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, word: str) -> list[str]:
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [line[len(word) + 1 :] for line in lines if line.startswith(word + " ")]

    def ids(self, word: str) -> set[int]:
        return {int(group_id) for group_id in self.of(word)}


def write_until_killed(run_file: Path, notes: Notes, *, after_s: float) -> None:
    """Let a process write for a while after its first note, and kill it."""
    num_before = len(notes.of("applied"))
    command = [sys.executable, "-m", "tests.api.store.crashing_process", run_file, notes.path]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + READY_S
        while len(notes.of("applied")) == num_before:
            assert process.poll() is None, "the process ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(after_s)
        process.kill()


async def check(run: OpenRun, notes: Notes) -> None:
    applied = [record.encode() for record in notes.of("applied")]
    remaining = iter(run.records)
    assert all(record in remaining for record in applied), "what was applied is there, in order"
    groups = {int(record.split()[1]) for record in run.records if record.startswith(b"group")}
    assert notes.ids("acknowledged") <= groups
    for group_id in groups - notes.ids("discarding"):
        assert await run.store.fetch([group_id]) == [content_of(group_id)]
    for group_id in notes.ids("discarded"):
        assert not await is_stored(run.store, group_id)


def crash_and_check(folder: Path, num_kills: int) -> None:
    run_file, notes = folder / "run.sqlite3", Notes(folder / "notes")
    moments = random.Random(num_kills)
    for _ in range(num_kills):
        write_until_killed(run_file, notes, after_s=moments.uniform(0.0, 0.15))

        async def reopen() -> None:
            async with opened(lambda: SqliteRunStore(run_file)) as run:
                await check(run, notes)

        if moments.random() < 0.5:  # otherwise the next process finds what was left behind
            asyncio.run(reopen())
    asyncio.run(reopen())


def test_killed_process_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    crash_and_check(tmp_path, num_kills=5)


@pytest.mark.long
def test_process_killed_a_hundred_times_loses_nothing(tmp_path: Path) -> None:
    crash_and_check(tmp_path, num_kills=100)

"""What only the file of a run does: locks, foreign files, a full disk, growth."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.store.base import Payload
from atroposlib.api.store.sqlite import SqliteRunStore, Writer
from atroposlib.errors import ConfigError, RunStoreError
from tests.api.store.stores import OpenRun, is_stored, opened

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "run.sqlite3"


async def open_error(path: Path) -> str:
    """Return what opening a file is refused with."""
    with pytest.raises(ConfigError) as caught:
        async with opened(lambda: SqliteRunStore(path)):
            pass
    return str(caught.value)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)


def read(path: Path) -> bytes:
    return path.read_bytes()


def total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def replace(path: Path) -> None:
    path.unlink()
    path.touch()


def move_away(path: Path) -> Path:
    return path.rename(path.with_name("kept"))


def move_back(kept: Path, path: Path) -> None:
    kept.replace(path)


def write_new(path: Path) -> None:
    path.touch()


def files_of(path: Path) -> list[Path]:
    return list(path.parent.iterdir())


def set_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_open_while_another_holds_the_file_is_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        assert "in use by another process" in await open_error(path)
        assert await run.store.append(b"still works")
    async with opened(lambda: SqliteRunStore(path)) as again:
        assert again.records == [b"still works"]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
async def test_open_of_a_file_in_use_is_refused_by_every_name_it_has(path: Path, link) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        other = path.parent.parent / "other.sqlite3"
        link(other, path)

        assert "other.sqlite3 is in use by another process" in await open_error(other)
        assert await run.store.append(b"still works")
    async with opened(lambda: SqliteRunStore(other)) as again:
        assert again.records == [b"still works"]


async def test_open_through_a_folder_by_another_name_is_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)):
        (path.parent.parent / "link").symlink_to(path.parent)

        message = await open_error(path.parent.parent / "link" / path.name)

    assert "is in use by another process" in message


LOCKED = """
import asyncio, sys
from pathlib import Path
from atroposlib.api.store.sqlite import SqliteRunStore
store = SqliteRunStore(Path(sys.argv[1]))
asyncio.run(store.open(lambda position, record: None, lambda content: None))
"""


async def test_open_by_another_process_under_another_name_is_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        other = path.with_name("other.sqlite3")
        other.hardlink_to(path)
        command = [sys.executable, "-c", LOCKED, str(other)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)

        assert "is in use by another process" in done.stderr
        assert await run.store.append(b"still works")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOLCK])
async def test_file_system_without_locks_of_ranges_is_served_by_the_lock_of_the_name(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, argument: object = 0) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.fcntl", refuse)
    async with opened(lambda: SqliteRunStore(path)) as run:
        assert await run.store.append(b"works")
        assert "is in use by another process" in await open_error(path)


async def test_file_made_anew_under_the_name_of_one_in_use_is_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)):
        replace(path)

        assert "is in use by another process" in await open_error(path)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_file_that_was_deleted_is_written_no_more(path: Path, is_replaced: bool) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        kept = move_away(path)
        if is_replaced:
            write_new(path)

        with pytest.raises(RunStoreError, match="was deleted or replaced"):
            await run.group(b"bytes")
        with pytest.raises(RunStoreError, match="was deleted or replaced"):
            await run.guarded()
        move_back(kept, path)
        assert await run.guarded()


async def test_files_of_a_run_are_for_their_owner_alone(path: Path) -> None:
    umask = os.umask(0o022)
    try:
        async with opened(lambda: SqliteRunStore(path)) as run:
            await run.group(b"bytes")
            modes = {file.name: mode_of(file) for file in files_of(path)}
    finally:
        os.umask(umask)

    names = [f"run.sqlite3{end}" for end in ("", "-shm", "-wal", ".lock", ".reserve")]
    assert modes == dict.fromkeys(names, 0o600)
    assert mode_of(path.parent) == 0o700


async def test_folder_and_file_that_were_there_keep_their_permissions(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    async with opened(lambda: SqliteRunStore(path)):
        pass
    set_mode(path, 0o640)

    async with opened(lambda: SqliteRunStore(path)) as run:
        await run.group(b"bytes")

    assert mode_of(path) == 0o640
    assert mode_of(path.parent) == 0o755


async def test_open_of_a_file_that_is_no_database_is_refused(path: Path) -> None:
    write(path, content := b"not a database, but long enough to be looked at " * 100)

    assert "cannot be used as the file of a run" in await open_error(path)
    assert read(path) == content


async def test_open_of_another_programs_database_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE notes (text)")
    other.close()

    assert "database of another program" in await open_error(path)


async def test_open_of_a_later_schema_is_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)):
        pass
    with sqlite3.connect(path) as later:
        later.execute("PRAGMA user_version = 99")
    later.close()

    assert "schema 99" in await open_error(path)


async def test_open_where_no_directory_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")

    message = await open_error(tmp_path / "data" / "run.sqlite3")

    assert "data is a file; expected a folder; choose another place with --data-dir" in message


async def test_open_after_creation_was_interrupted_begins_the_run(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as early:
        early.execute("PRAGMA journal_mode = WAL")
    early.close()

    async with opened(lambda: SqliteRunStore(path)) as run:
        assert await run.store.append(b"one")


async def test_closed_run_leaves_one_file(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path, fsync=True)) as run:
        await run.group(b"bytes")

    assert [file.name for file in path.parent.iterdir()] == ["run.sqlite3"]


async def test_methods_of_a_closed_store_are_refused(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        group_id = await run.group(b"bytes")

    with pytest.raises(RunStoreError, match="is not open"):
        await run.store.append(b"late")
    with pytest.raises(RunStoreError, match="is not open"):
        await run.store.fetch([group_id])
    await run.store.close()


async def test_full_disk_fails_what_does_not_fit_and_nothing_else(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        ids = await run.store.new_group_ids(8)
        with full_disk(2**20):
            large = [
                run.store.append(b"%d" % group_id, [Payload(group_id, b"x" * 2**21)])
                for group_id in ids[:6]
            ]
            small = [run.store.append(b"%d" % i, [Payload(i, b"x" * 10)]) for i in ids[6:]]
            answers = await asyncio.gather(*large, *small, return_exceptions=True)

        assert [type(answer) for answer in answers[:6]] == [RunStoreError] * 6
        assert answers[6:] == [True, True]
        assert [group_id for group_id in ids if await is_stored(run.store, group_id)] == [*ids[6:]]
        assert run.records == [b"%d" % group_id for group_id in ids[6:]]


async def test_store_goes_on_when_there_is_space_again(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        with full_disk(2**20), pytest.raises(RunStoreError, match="could not be written"):
            await run.group(b"x" * 2**22)
        group_id = await run.group(b"y" * 2**22)
        await run.guarded()
    async with opened(lambda: SqliteRunStore(path)) as again:
        assert again.records == [b"group %d" % group_id, b"guarded "]
        assert await again.store.fetch([group_id]) == [b"y" * 2**22]


async def test_files_stay_small_while_groups_pass_through(path: Path) -> None:
    largest = 0
    async with opened(lambda: SqliteRunStore(path)) as run:
        for _ in range(40):
            ids = await asyncio.gather(*[run.group(b"x" * 130_000) for _ in range(40)])
            await run.store.fetch(ids)
            await run.store.discard(ids)
            await run.compact()
            largest = max(largest, total_bytes(path.parent))

    assert largest < 100 * 2**20, "208 MB went through, 5 MB at a time"
    assert total_bytes(path.parent) < 2**20, "the file is shrunk on closing"


async def test_discarding_much_does_not_hold_up_appends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    goes_on = threading.Event()
    goes_on.set()
    delete_slice, write_appends = Writer._delete_slice, Writer._write_appends

    def delete(writer: Writer) -> bool:
        goes_on.wait(60)
        done.append("slice")
        return delete_slice(writer)

    def append(writer: Writer, appends: Any) -> None:
        done.append("append")
        write_appends(writer, appends)

    monkeypatch.setattr(Writer, "_delete_slice", delete)
    monkeypatch.setattr(Writer, "_write_appends", append)
    async with opened(lambda: SqliteRunStore(path)) as run:
        content = b"x" * 30_000
        for _ in range(10):
            ids = await run.store.new_group_ids(200)
            await run.store.append(b"many", [Payload(group_id, content) for group_id in ids])
        done.clear()
        goes_on.clear()

        discarding = asyncio.ensure_future(run.store.discard(range(ids[-1] + 1)))
        appending = asyncio.ensure_future(run.store.append(b"one"))
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(discarding, appending)

    assert run.records[-1] == b"one"
    assert done.index("append") <= 1
    assert done.count("slice") > 10


async def test_appends_of_one_moment_come_back_in_the_order_they_were_made(path: Path) -> None:
    expected = [b"%d" % number for number in range(1000)]
    async with opened(lambda: SqliteRunStore(path)) as run:
        await asyncio.gather(*[run.store.append(record) for record in expected])

        assert run.records == expected


async def test_close_writes_what_is_still_waiting(path: Path) -> None:
    run = OpenRun(SqliteRunStore(path))
    await run.store.open(run.apply, run.restore)
    waiting = [asyncio.create_task(run.store.append(b"%d" % number)) for number in range(300)]
    await asyncio.sleep(0)

    await run.store.close()

    assert all(await asyncio.gather(*waiting))
    assert len(run.records) == 300


async def test_append_that_cannot_be_written_fails_alone(path: Path) -> None:
    async with opened(lambda: SqliteRunStore(path)) as run:
        answers = await asyncio.gather(
            run.store.append(b"a", [Payload(2**64, b"no such id")]),
            run.store.append(b"b"),
            return_exceptions=True,
        )

        assert type(answers[0]) is RunStoreError
        assert run.records == [b"b"]

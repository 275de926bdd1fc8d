"""A full disk under SQLite: groups are refused, batches leave to the last one, space returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.api.run import Run
from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.base import StoreFullError
from atroposlib.api.store.open import open_store
from atroposlib.api.store.sqlite import SPACE_CHECK_S
from atroposlib.errors import ConfigError, RunStoreError
from tests.api.helpers import Service, StoreOfServices, make_group
from tests.api.run_helpers import decoded, env_request, registration, take

pytestmark = pytest.mark.slow

DISK_MIB = 24
NUM_LOOKS = 300


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system in memory; skips where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def take_the_rest(folder: Path) -> Path:
    """Fill the disk with a file of another program, to the last byte."""
    hog = folder / "hog"
    for _ in range(NUM_LOOKS):  # a run that is open may give up some of its reserve meanwhile
        with hog.open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size) == size:
                        pass
        if os.statvfs(folder).f_bavail == 0:
            return hog
    raise AssertionError("the disk could not be filled")


def leave(folder: Path, num_mib: int) -> None:
    """Fill the disk up to so much."""
    (folder / "ballast").write_bytes(b"x" * (DISK_MIB - num_mib) * 2**20)


def new_run(folder: Path) -> Run:
    return Run(open_store("sqlite", data_dir=folder, run_name="run"))


def payload(number: int, size: int) -> bytes:
    rng = random.Random(number)
    return b'{"n": %d, "x": "%s"}' % (number, rng.randbytes(size // 2).hex().encode())


async def fill(run: Run, *, size: int, start: int = 0) -> list[int]:
    """Post groups until one is refused; return the numbers of those that were taken."""
    taken = []
    for number in range(start, start + 10**6):
        try:
            await run.admit(
                [decoded(2, content=payload(number, size))], key=f"{number}", digest=number
            )
        except StoreFullError:
            return taken
        taken.append(number)
    raise AssertionError("the disk did not fill")


async def drain(run: Run, *, size: int, lease_s: float | None = None) -> list[int]:
    """Take every batch; return the numbers of its groups, whose contents are checked."""
    numbers = []
    while (found := await run.next_batch(lease_s=lease_s)) is not None:
        batch, payloads = found
        assert batch.num_sequences == 4
        for stored in payloads:
            number = int(stored.content.split(b",")[0].split()[1])
            assert stored.content == payload(number, size)
            numbers.append(number)
        assert await run.acknowledge(batch.token) == "acked"
        await run.tick()
    return numbers


async def wait_for_room(run: Run) -> None:
    for _ in range(NUM_LOOKS):
        await run.tick()
        if run.full_reason is None:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still full: {run.full_reason}")


async def started(folder: Path) -> Run:
    run = new_run(folder)
    await run.open()
    await run.register_trainer(registration(batch_size=4))
    return run


@pytest.mark.parametrize("size", [300, 20_000, 700_000])
@pytest.mark.parametrize("lease_s", [None, 600.0])
async def test_full_disk_is_drained_to_the_last_group_and_the_run_goes_on(disk, size, lease_s):
    if size == 300:
        leave(disk, 3)
    run = await started(disk)
    taken = await fill(run, size=size)
    assert len(taken) > 4
    hog = take_the_rest(disk)

    assert run.full_reason is not None
    assert await run.register_env(env_request()) is None  # no trainer has asked yet
    repeated = await run.admit([decoded(2)], key=f"{taken[0]}", digest=taken[0])
    assert repeated.is_repeat
    delivered = await drain(run, size=size, lease_s=lease_s)
    assert delivered == taken[: len(delivered)]
    assert len(taken) - len(delivered) <= 1

    await wait_for_room(run)  # what has left made it, with the other program's file still there
    number = taken[-1] + 1
    await run.admit([decoded(2, content=payload(number, size))])
    hog.unlink()
    more = await fill(run, size=size, start=number + 1)
    rest = await drain(run, size=size)
    left = taken[len(delivered) :]
    assert rest == [*left, number, *more][: len(rest)]
    assert len(left) + 1 + len(more) - len(rest) <= 1
    assert run.state.step == (len(delivered) + len(rest)) // 2
    await run.close()


async def test_disk_that_another_program_fills_refuses_groups_and_lets_batches_leave(disk):
    run = await started(disk)
    for number in range(60):
        await run.admit([decoded(2, content=payload(number, 50_000))])
    hog = take_the_rest(disk)

    more = await fill(run, size=50_000, start=60)
    delivered = await drain(run, size=50_000)

    assert delivered == [*range(60), *more][: len(delivered)]
    assert 60 + len(more) - len(delivered) <= 1
    hog.unlink()
    await wait_for_room(run)
    await run.close()
    assert not list(disk.glob("*.reserve"))


async def test_program_that_takes_every_byte_that_is_given_up_keeps_no_batch(disk):
    run = await started(disk)
    taken = await fill(run, size=20_000)
    stopped = asyncio.Event()

    async def eat() -> None:
        with (disk / "hog").open("ab", buffering=0) as file:
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    file.write(b"x" * 4096)
                await asyncio.sleep(0)

    eating = asyncio.create_task(eat())
    delivered = await drain(run, size=20_000)
    stopped.set()
    await eating

    assert delivered == taken[: len(delivered)]
    assert len(taken) - len(delivered) <= 1
    await run.close()


async def test_log_file_deleted_to_free_the_disk_does_not_end_the_writing_thread(disk):
    leave(disk, 8)
    run = await started(disk)
    taken = await fill(run, size=300_000)
    with pytest.raises(StoreFullError):
        await run.admit([decoded(2, content=payload(10**6, 6_000_000))])
    (disk / "run.sqlite3-wal").unlink()
    await asyncio.sleep(3 * SPACE_CHECK_S)
    with contextlib.suppress(RunStoreError):
        await asyncio.wait_for(run.admit([decoded(2, content=payload(10**6 + 1, 200))]), 240)
    assert len(taken) > 2
    await asyncio.wait_for(run.close(), 240)


FILLER = """
import asyncio, sys
from pathlib import Path
from tests.adversary.test_full_disk import fill, started, take_the_rest
async def main():
    run = await started(Path(sys.argv[1]))
    taken = await fill(run, size=20_000)
    take_the_rest(Path(sys.argv[1]))
    found = await run.next_batch()
    print(len(taken), flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def test_service_killed_while_the_disk_is_full_goes_on_where_it_was(disk):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FILLER, str(disk), **pipes)
    assert process.stdout is not None
    num_taken = int(await process.stdout.readline())
    process.kill()
    await process.communicate()
    take_the_rest(disk)

    run = new_run(disk)
    await run.open()
    # Where the killed process had not yet used what it was given, some groups fit in.
    num_taken += len(await fill(run, size=20_000, start=num_taken))
    assert run.full_reason is not None
    with pytest.raises(StoreFullError, match="is full"):
        await run.admit([decoded(2, content=payload(0, 20_000))])
    delivered = await drain(run, size=20_000)

    assert delivered == list(range(num_taken))[: len(delivered)]
    assert num_taken - len(delivered) <= 1
    (disk / "hog").unlink()
    await wait_for_room(run)
    await run.close()
    again = new_run(disk)
    await again.open()
    assert again.state.step == len(delivered) // 2
    await again.close()


async def test_run_closed_while_the_disk_is_full_keeps_its_reserve(disk):
    run = await started(disk)
    taken = await fill(run, size=20_000)
    take_the_rest(disk)
    assert await take(run) is not None
    await run.close()
    take_the_rest(disk)

    again = new_run(disk)
    await again.open()
    delivered = await drain(again, size=20_000)
    assert len(taken) - 2 - len(delivered) <= 1
    await again.close()


async def test_run_on_a_disk_without_a_byte_is_refused_in_one_line(disk):
    take_the_rest(disk)
    run = new_run(disk)

    with pytest.raises(ConfigError, match=r"disk is full.*free some space"):
        await run.open()


def test_full_disk_is_told_and_counted(disk, monkeypatch):
    with StoreOfServices("sqlite", disk) as home:
        monkeypatch.setattr(Service, "home", home)
        service = Service(ApiSettings())
        service.start(batch_size=4)
        leave(disk, 4)
        group = make_group(2, length=1000)
        while (answer := service.post("/scored_data", json=group)).status_code == 200:
            pass
        take_the_rest(disk)

        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert "is full" in answer.json()["detail"]
        assert "new groups are rejected until space is freed" in answer.json()["detail"]
        assert "is full" in service.status()["store_full"]
        ready = service.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert "is full" in ready.json()["store_full"]
        metrics = service.get("/metrics").text
        assert "atropos_store_full 1.0" in metrics
        assert 'atropos_requests_refused_total{reason="store_full"} 1.0' in metrics
        assert service.take() is not None

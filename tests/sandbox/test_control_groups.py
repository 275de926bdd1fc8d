"""Where control groups can be used, and where they are left alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from atroposlib.sandbox import SandboxLimits
from atroposlib.sandbox import limits as control_groups
from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.interface import PYTHON
from atroposlib.sandbox.limits import PARENT, ControlGroups, Membership


@pytest.fixture
def root() -> Iterator[Path]:
    """A tree as of version 1, in which somebody else has made the parents already."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for controller in ("memory", "pids"):
            (root / controller / PARENT).mkdir(parents=True)
        yield root


def test_parents_of_ones_own_are_used(root: Path) -> None:
    assert ControlGroups(root).are_usable


async def test_group_that_a_killed_process_of_the_same_id_left_is_not_reused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ControlGroups(root)
    monkeypatch.setattr(control_groups, "_numbers", itertools.count())
    (root / "memory" / PARENT / f"{os.getpid()}-0").mkdir()

    async with groups.join(SandboxLimits()) as members:
        names = [Path(folder).name for folder in members.folders]

    assert names == [f"{os.getpid()}-1"] * 2


async def test_all_groups_of_a_program_are_removed_although_the_wait_for_it_is_cancelled(
    root: Path,
) -> None:
    groups = ControlGroups(root)

    async def join() -> None:
        async with groups.join(SandboxLimits()) as members:
            (Path(members.folders[0]) / "busy").touch()  # as a process that has not ended yet
            folders.extend(map(Path, members.folders))
            joined.set()

    folders: list[Path] = []
    joined = asyncio.Event()
    joining = asyncio.create_task(join())
    await joined.wait()
    joining.cancel()
    await asyncio.wait({joining})
    (folders[0] / "busy").unlink()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    assert [folder.exists() for folder in folders] == [False, False]


def unified(root: Path, path: str, *, handed_down: str) -> Path:
    """Make a group of version 2 with what lies above it, as the kernel shows them."""
    folder = root
    for name in ("", *Path(path).parts[1:]):
        folder = folder / name
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.controllers").touch()
        (folder / "cgroup.procs").touch()
        (folder / "cgroup.subtree_control").write_text(handed_down)
    return folder


USER = "/user.slice/user-1000.slice/user@1000.service/app.slice"


@pytest.fixture
def only_delegated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of all groups cannot be written, as for a user of a laptop."""
    monkeypatch.setattr(control_groups, "_unified", lambda root: ())


@pytest.mark.usefixtures("only_delegated")
def test_part_that_systemd_hands_to_a_user_is_used(tmp_path: Path) -> None:
    app = unified(tmp_path, USER, handed_down="cpu memory pids")
    own = tmp_path / "own"
    own.write_text(f"0::{USER}/terminal.scope\n")
    (app / PARENT).mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (app / PARENT / name).touch()

    groups = ControlGroups(tmp_path, own)

    assert groups.count_memory
    assert (app / PARENT / "cgroup.subtree_control").read_text() == "+memory +pids"


@pytest.mark.usefixtures("only_delegated")
@pytest.mark.parametrize("handed_down", ["", "cpu pids", "memory"])
def test_part_without_both_controllers_is_left_alone(tmp_path: Path, handed_down: str) -> None:
    app = unified(tmp_path, USER, handed_down=handed_down)
    own = tmp_path / "own"
    own.write_text(f"0::{USER}/terminal.scope\n")

    assert not ControlGroups(tmp_path, own).are_usable
    assert not (app / PARENT).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
@pytest.mark.usefixtures("only_delegated")
def test_part_of_somebody_else_is_left_alone(root: Path) -> None:
    session = unified(root, "/user.slice/user-1000.slice", handed_down="memory pids")
    own = root / "own"
    own.write_text("0::/user.slice/user-1000.slice/session-1.scope\n")
    for name in ("memory", "pids"):  # of version 1
        (root / name / PARENT).rmdir()
        (root / name).rmdir()
    os.seteuid(65534)
    try:
        groups = ControlGroups(root, own)
    finally:
        os.seteuid(0)

    assert not groups.are_usable
    assert not (session / PARENT).exists()


async def test_memory_is_bounded_with_swap_and_with_what_tcp_holds() -> None:
    names = ("memsw.limit_in_bytes", "kmem.tcp.limit_in_bytes", "limit_in_bytes")
    async with ControlGroups().join(SandboxLimits()) as members:
        files = [
            file
            for folder in members.folders
            for name in names
            if (file := Path(folder, f"memory.{name}")).exists()
        ]
        written = {file.read_text().strip() for file in files}
    if not files:
        pytest.skip("no control group of version 1 can be written")

    assert written == {str((512 + 2 * 64) * 2**20)}


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
def test_parents_of_somebody_else_are_not_used(root: Path) -> None:
    os.seteuid(65534)
    try:
        groups = ControlGroups(root)
    finally:
        os.seteuid(0)

    assert not groups.are_usable


async def test_memory_is_measured_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    kills: list[int] = []

    def measured(pid: int, enough: int, written: tuple[str, ...]) -> int:
        threads.append(threading.current_thread())
        return enough + 1

    monkeypatch.setattr(control_groups, "_memory_of", measured)
    members = Membership((), 100, is_memory_counted=False, written=())

    await members.watch(7, lambda: kills.append(1))

    assert (len(threads), kills, members.ran_out_of_memory) == (1, [1], True)
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("opened", "tables"),
    [("socket.socketpair()", set()), ("socket.create_server(('127.0.0.1', 0))", {"tcp"})],
)
async def test_tables_of_connections_are_read_only_for_a_program_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: str, tables: set[str]
) -> None:
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    measured: asyncio.Queue[int] = asyncio.Queue()
    read: list[str] = []
    text_of, memory_of = Path.read_text, control_groups._memory_of

    def noted(self: Path, *args: Any, **options: Any) -> str:
        read.append(self.name)
        return text_of(self, *args, **options)

    def reported(*args: Any) -> int:
        result = memory_of(*args)
        loop.call_soon_threadsafe(measured.put_nowait, result)
        return result

    monkeypatch.setattr(Path, "read_text", noted)
    monkeypatch.setattr(control_groups, "_memory_of", reported)
    program = f"import socket, time\nheld = {opened}\nprint(1, flush=True)\ntime.sleep(600)"
    limits = SandboxLimits(wall_s=600.0)
    running = asyncio.create_task(
        Bubblewrap(limits=limits, groups=ControlGroups(tmp_path)).run(
            [*PYTHON, "-c", program], on_output=lambda *_: started.set()
        )
    )
    await started.wait()
    while not measured.empty():
        measured.get_nowait()
    for _ in range(3):  # the first one may have been running
        await measured.get()
    running.cancel()
    await asyncio.wait({running})

    assert {"tcp", "tcp6"} & set(read) == tables

"""Bounds for all processes of a sandbox together, where this process may set them.

Both generations of Linux control groups; where neither is writable the limits of each process
remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from atroposlib.sandbox.interface import SandboxError, SandboxLimits

__all__ = ["PARENT", "ControlGroups", "Membership", "remove_abandoned", "remove_group"]

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PARENT = "atropos-sandbox"
LIMITS = ("memory.max", "memory.swap.max", "pids.max", "memory.limit_in_bytes")
COUNTS = ("memory.events", "memory.oom_control")
READ_BYTES = 4096
REMOVE_TRIES = 50
REMOVE_PAUSE_S = 0.002

_numbers = itertools.count()


@dataclass(frozen=True)
class Membership:
    """The control groups of one program."""

    folders: tuple[str, ...]

    def add(self, pid: int) -> bool:
        """Put a process, and whatever it starts from now on, into the groups.

        Returns:
            False when it has ended already.

        Raises:
            SandboxError: the kernel refuses it.
        """
        try:
            for folder in self.folders:
                _write(f"{folder}/cgroup.procs", str(pid))
        except ProcessLookupError:
            return False
        except OSError as error:
            raise SandboxError(f"a control group takes no process in: {error}") from error
        return True

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes for memory."""
        return any(_kills(f"{folder}/{name}") > 0 for folder in self.folders for name in COUNTS)


class ControlGroups:
    """Makes and removes control groups.

    Args:
        root: where the kernel shows them.
    """

    def __init__(self, root: Path = ROOT) -> None:
        parents = _unified(root) or _separate(root)
        self._limits = {
            str(parent): [name for name in LIMITS if (parent / name).exists()] for parent in parents
        }
        remove_abandoned(root)

    @property
    def are_usable(self) -> bool:
        """Whether all processes of a program can be bounded together."""
        return bool(self._limits)

    @contextlib.asynccontextmanager
    async def join(self, limits: SandboxLimits) -> AsyncIterator[Membership]:
        """Make groups with these limits; they are removed at the end."""
        name = f"{os.getpid()}-{next(_numbers)}"
        values = _values(limits)
        folders = tuple(f"{parent}/{name}" for parent in self._limits)
        try:
            for folder, limited in zip(folders, self._limits.values(), strict=True):
                Path(folder).mkdir(parents=True)  # noqa: ASYNC240 - lies in the kernel's memory
                for file in limited:
                    _write(f"{folder}/{file}", values[file])
            yield Membership(folders)
        finally:
            for folder in folders:
                await asyncio.shield(_remove(Path(folder)))


async def remove_group(name: str, root: Path = ROOT) -> None:
    """Kill what is in a group that another program made, in whichever hierarchies, and remove it.

    Args:
        name: of its folder below `PARENT`.
        root: where the kernel shows them.
    """
    for pattern in (f"{PARENT}/{name}", f"*/{PARENT}/{name}"):
        for folder in root.glob(pattern):  # noqa: ASYNC240 - lies in the kernel's memory
            with contextlib.suppress(OSError):
                _kill(_pids(folder))
            await _remove(folder)


def remove_abandoned(root: Path = ROOT) -> None:
    """Remove the groups of processes that ended without doing so, and what is left in them."""
    for parent in (root / PARENT, *root.glob(f"*/{PARENT}")):
        for folder in parent.glob("[0-9]*-[0-9]*"):
            if not Path("/proc", folder.name.split("-")[0]).exists():
                with contextlib.suppress(OSError):
                    _kill([pid for pid in _pids(folder) if _is_orphan(pid)])
                    folder.rmdir()


def _pids(folder: Path) -> list[int]:
    """The processes of a group; the kernel shows those of another pid namespace as 0."""
    return [int(pid) for pid in (folder / "cgroup.procs").read_text().split() if pid != "0"]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_orphan(pid: int) -> bool:
    """Whether the process that started it is gone; where others share the groups, it may not be."""
    status = Path(f"/proc/{pid}/status").read_text()
    return "\nPPid:\t1\n" in status


def _unified(root: Path) -> tuple[Path, ...]:
    """The parent in version 2, when it can be written and hands memory and pids down."""
    if not (root / "cgroup.controllers").exists():
        return ()
    parent = root / PARENT
    try:
        parent.mkdir(exist_ok=True)
        for folder in (root, parent):
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return ()
    return (parent,)


def _separate(root: Path) -> tuple[Path, ...]:
    """The parents in version 1, those that can be written."""
    parents = []
    for controller in ("memory", "pids"):
        parent = root / controller / PARENT
        try:
            parent.mkdir(exist_ok=True)
        except OSError:
            continue
        if os.access(parent, os.W_OK, effective_ids=True):  # it may be somebody else's
            parents.append(parent)
    return tuple(parents)


def _values(limits: SandboxLimits) -> dict[str, str]:
    """What is written to each of the files `LIMITS`."""
    memory = str(limits.memory_bytes + 2 * limits.disk_bytes)  # its folders lie in memory
    processes = str(limits.max_processes + 1)  # and the sandbox's own
    return dict(zip(LIMITS, (memory, "0", processes, memory), strict=True))


def _kills(file: str) -> int:
    """How many processes the kernel killed for memory, by one of the files `COUNTS`."""
    try:
        rows = [line.split() for line in _read(file).splitlines()]
    except FileNotFoundError:
        return 0
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def _write(file: str, text: str) -> None:
    """Write to one of the kernel's files, at a third of the cost of a file object."""
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(file: str) -> str:
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.read(fd, READ_BYTES).decode()
    finally:
        os.close(fd)


async def _remove(folder: Path) -> None:
    """Remove a group; its last processes may take a moment to vanish."""
    for _ in range(REMOVE_TRIES):
        try:
            folder.rmdir()  # noqa: ASYNC240 - lies in the kernel's memory, not on a disk
        except FileNotFoundError:
            return
        except OSError:
            await asyncio.sleep(REMOVE_PAUSE_S)
        else:
            return
    logger.warning("the control group %s of a sandbox could not be removed", folder)

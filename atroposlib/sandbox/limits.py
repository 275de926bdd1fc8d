"""Limits of a sandbox: of all its processes together, and of each process.

Together: control groups of Linux, versions 1 and 2, for root, and in version 2 also for users with
a subtree delegated by systemd. If no control group is writable, the memory of a program is measured
every 50 ms, and the program is killed when it exceeds its limit.

Each process: resource limits, set before the program starts, and a separate user.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxUnavailableError

__all__ = [
    "FOLDERS",
    "NOBODY",
    "OOM_SCORE",
    "PARENT",
    "ControlGroups",
    "Membership",
    "ProcessBounds",
    "bounded_tcp",
    "bounds_swap",
    "find_program",
    "kill_first",
    "limit_process",
    "limit_words",
    "may_limit_others",
    "next_user",
    "remove_abandoned",
    "remove_group",
    "require_bound",
    "user_of",
]

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PARENT = "atropos-sandbox"
OWN = Path("/proc/self/cgroup")
TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
LIMITS = (
    *("memory.max", "memory.swap.max", "pids.max"),
    # without a limit of memory and swap, further memory would be swapped; TCP is counted separately
    *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", TCP_LIMIT),
)
COUNTS = ("memory.events", "memory.oom_control")
READ_BYTES = 4096
REMOVE_TRIES = 50
REMOVE_PAUSE_S = 0.002
WATCH_PAUSE_S = 0.05
WATCH_THREADS = 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FILE_BYTES = 1536  # approximate kernel memory of an empty file
SOCKET_BYTES = 212_992  # buffer of a socket other than TCP: net.core.wmem_default
FOLDERS = ("box", "tmp", "dev/shm")
COUNTED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")

_numbers = itertools.count()


@dataclass
class Membership:
    """The bounds of one program."""

    folders: tuple[str, ...]
    """Folders of its control groups."""
    memory_bytes: int
    """Limit of all its processes and files together."""
    is_memory_counted: bool
    """Whether a control group bounds the memory."""
    written: tuple[str, ...]
    """Folders in memory that the program writes to, relative to its root folder."""
    was_killed_here: bool = False

    def add(self, pid: int) -> bool:
        """Move a process, and its later descendants, into the groups.

        Returns:
            False if the process has already ended.

        Raises:
            SandboxError: the kernel refuses it.
        """
        try:
            for folder in self.folders:
                _write(f"{folder}/cgroup.procs", str(pid))
        except ProcessLookupError:
            return False
        except OSError as error:
            raise SandboxError(f"a process cannot join a control group: {error}") from error
        return True

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether a process was killed for memory."""
        kills = (_kills(f"{folder}/{name}") for folder in self.folders for name in COUNTS)
        return self.was_killed_here or any(number > 0 for number in kills)

    async def watch(self, pid: int, kill: Callable[[], None]) -> None:
        """Poll the memory of a program and kill it over the limit; return if the kernel does so.

        Args:
            pid: id of its first process.
            kill: ends all of its processes.
        """
        measure = functools.partial(_memory_of, pid, self.memory_bytes, self.written)
        loop = asyncio.get_running_loop()
        while not self.is_memory_counted:
            await asyncio.sleep(WATCH_PAUSE_S)
            # In a thread: for programs with many processes or connections, it takes long.
            if await loop.run_in_executor(_watch_threads(), measure) > self.memory_bytes:
                self.was_killed_here = True
                kill()
                return


class ControlGroups:
    """Creates and removes control groups."""

    def __init__(self, root: Path = ROOT, own: Path = OWN) -> None:
        parents = _unified(root) or _separate(root) or _delegated(root, own)
        self._limits = {
            str(parent): [name for name in LIMITS if (parent / name).exists()] for parent in parents
        }
        remove_abandoned(root, parents)

    @property
    def are_usable(self) -> bool:
        """Whether all processes of a program can be bounded together."""
        return bool(self._limits)

    @property
    def count_memory(self) -> bool:
        """Whether all memory of a program can be bounded, that of the kernel included."""
        return any(name in MEMORY_LIMITS for names in self._limits.values() for name in names)

    @contextlib.asynccontextmanager
    async def join(
        self, limits: SandboxLimits, *, written: tuple[str, ...] = FOLDERS
    ) -> AsyncIterator[Membership]:
        """Create groups with these limits, and remove them at the end.

        Args:
            limits: the limits.
            written: folders in memory that the program writes to, relative to its root folder.
        """
        values = _values(limits)
        folders = self._new_folders()
        try:
            for folder, limited in zip(folders, self._limits.values(), strict=True):
                Path(folder).mkdir(parents=True)  # noqa: ASYNC240 - not on a disk
                for file in limited:
                    _write(f"{folder}/{file}", values[file])
            yield Membership(folders, _memory_bytes(limits), self.count_memory, written)
        finally:
            # Together: the wait for the first one may be cancelled.
            await asyncio.shield(_remove_all(folders))

    def _new_folders(self) -> tuple[str, ...]:
        """Return paths without groups; a killed process may have had the id of this one."""
        while True:
            name = f"{os.getpid()}-{next(_numbers)}"
            folders = tuple(f"{parent}/{name}" for parent in self._limits)
            if not any(map(os.path.exists, folders)):
                return folders


def bounds_swap(root: Path = ROOT) -> bool:
    """Whether the kernel can count memory and swap together."""
    is_unified = (root / "cgroup.controllers").exists()
    return is_unified or (root / "memory" / "memory.memsw.limit_in_bytes").exists()


@contextlib.asynccontextmanager
async def bounded_tcp(name: str, limits: SandboxLimits, root: Path = ROOT) -> AsyncIterator[None]:
    """Create the group of a container in advance, with a limit of TCP memory, in version 1.

    Version 1 counts TCP buffers separately, and OCI runtimes no longer set that limit.
    """
    folder = root / "memory" / PARENT / name
    if not (root / "memory" / TCP_LIMIT).exists():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(str(folder / TCP_LIMIT), str(_memory_bytes(limits)))
        yield
    finally:
        await asyncio.shield(_remove(folder))


async def remove_group(name: str, root: Path = ROOT) -> None:
    """Kill the processes of a group that a runtime created, and remove it from all hierarchies."""
    for pattern in (f"{PARENT}/{name}", f"*/{PARENT}/{name}"):
        for folder in root.glob(pattern):  # noqa: ASYNC240 - not on a disk
            with contextlib.suppress(OSError):
                _kill(_pids(folder))
            await _remove(folder)


def require_bound(groups: ControlGroups, *, has_filter: bool) -> None:
    """Check that a program cannot take all memory of the machine.

    Args:
        groups: control groups of this machine.
        has_filter: whether calls whose memory belongs to no process can be blocked. The memory is
            then bounded by the limits per process times their number, and by polling.

    Raises:
        SandboxUnavailableError: nothing bounds the memory.
    """
    if not groups.count_memory and not has_filter:
        raise SandboxUnavailableError(
            "nothing bounds the memory of programs here: no control group can be written, and "
            f"system calls cannot be filtered on {os.uname().machine}; run as root or under "
            "`systemd-run --user --scope`, or set ATROPOS_SANDBOX_UNBOUNDED_MEMORY=1 to run "
            "programs all the same"
        )


def remove_abandoned(root: Path = ROOT, parents: Sequence[Path] = ()) -> None:
    """Remove groups left by ended processes of this library, and kill what is left in them."""
    for parent in {root / PARENT, *root.glob(f"*/{PARENT}"), *parents}:
        for folder in parent.glob("[0-9]*-[0-9]*"):
            if not Path("/proc", folder.name.split("-")[0]).exists():
                with contextlib.suppress(OSError):
                    _kill([pid for pid in _pids(folder) if _is_orphan(pid)])
                    folder.rmdir()


def _pids(folder: Path) -> list[int]:
    """Return the processes of a group; the kernel shows those of other pid namespaces as 0."""
    return [int(pid) for pid in (folder / "cgroup.procs").read_text().split() if pid != "0"]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_orphan(pid: int) -> bool:
    """Whether the parent of a process has ended; groups may be shared with other processes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return "\nPPid:\t1\n" in status


def _unified(root: Path) -> tuple[Path, ...]:
    """Return the parent in version 2, if it is writable and delegates memory and pids."""
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
    """Return the writable parents in version 1."""
    parents = []
    for controller in ("memory", "pids"):
        parent = root / controller / PARENT
        try:
            parent.mkdir(exist_ok=True)
        except OSError:
            continue
        if os.access(parent, os.W_OK, effective_ids=True):  # it may belong to another user
            parents.append(parent)
    return tuple(parents)


def _delegated(root: Path, own: Path) -> tuple[Path, ...]:
    """Return the parent in version 2 within this user's subtree, such as `user@1000.service`.

    It is a sibling of the group of this process: the kernel moves a process only within the subtree
    of its user, and delegates controllers only from groups without processes.
    """
    if not (root / "cgroup.controllers").exists():
        return ()
    rows = own.read_text(encoding="utf-8").splitlines()
    path = next((row[3:] for row in rows if row.startswith("0::/")), "/")
    for above in PurePosixPath(path).parents:
        folder = root / above.relative_to("/")
        handed_down = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
        if not {"memory", "pids"} <= set(handed_down):
            continue
        if not os.access(folder / "cgroup.procs", os.W_OK, effective_ids=True):
            return ()
        with contextlib.suppress(OSError):
            parent = folder / PARENT
            parent.mkdir(exist_ok=True)
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
            return (parent,)
    return ()


def _memory_bytes(limits: SandboxLimits) -> int:
    return limits.memory_bytes + 2 * limits.disk_bytes  # its folders are in memory


def _values(limits: SandboxLimits) -> dict[str, str]:
    memory = str(_memory_bytes(limits))
    processes = str(limits.max_processes + 1)  # plus that of the sandbox
    return dict(zip(LIMITS, (memory, "0", processes, memory, memory, memory), strict=True))


@functools.cache
def _watch_threads() -> ThreadPoolExecutor:
    """Return threads of their own, since others may wait for what a program does."""
    return ThreadPoolExecutor(WATCH_THREADS, thread_name_prefix="atropos-watch")


def _memory_of(pid: int, enough: int, written: Iterable[str]) -> int:
    """Return the bytes of a process, its descendants, their folders and their sockets.

    Shared memory is counted once per process if the sum does not exceed `enough`.
    """
    files = _files_of(pid, written) + _sockets_of(pid)
    pids = _descendants(pid)
    resident = files + sum(map(_resident, pids))
    return resident if resident <= enough else files + sum(map(_share, pids))


def _descendants(pid: int) -> list[str]:
    found = [str(pid)]
    for each in found:  # which grows
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):  # noqa: PTH208 - half the cost
                with contextlib.suppress(OSError):
                    found += _read(f"/proc/{each}/task/{task}/children").split()
    return found


def _resident(pid: str) -> int:
    with contextlib.suppress(OSError):
        return int(_read(f"/proc/{pid}/statm").split()[1]) * PAGE_BYTES
    return 0


def _share(pid: str) -> int:
    """Return the memory of a process, shared memory divided, without reclaimable pages."""
    try:
        rows = (line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines())
        return sum(int(row[1]) * 1024 for row in rows if row[0] in COUNTED)
    except OSError:  # not readable
        return _resident(pid)


def _sockets_of(pid: int) -> int:
    """Return the memory of the sockets of a network namespace, TCP buffers included."""
    folder = f"/proc/{pid}/net"
    taken = 0
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net")):  # noqa: PTH116
            return 0  # not in the box yet
        counts = _counts_of(f"{folder}/sockstat") | _counts_of(f"{folder}/sockstat6")
        taken += SOCKET_BYTES * counts.get("sockets", 0)
        for name in ("tcp", "tcp6"):
            if not counts.get(name.upper()):
                continue  # the kernel searches the connections of the machine for this table
            for row in Path(f"{folder}/{name}").read_text().splitlines()[1:]:
                sent, received = row.split()[4].split(":")
                taken += int(sent, 16) + int(received, 16)
    return taken


def _counts_of(file: str) -> dict[str, int]:
    """Return the numbers of sockets in use by their kind."""
    rows = (line.split() for line in _read(file).splitlines())
    return {row[0].rstrip(":"): int(row[2]) for row in rows if row[1] in ("used", "inuse")}


def _files_of(pid: int, written: Iterable[str]) -> int:
    """Return the memory of the writable folders, contents and inodes."""
    taken = 0
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(f"/proc/{pid}/root/"), os.stat("/")):  # noqa: PTH116
            return 0  # not in the box yet
    for folder in written:
        with contextlib.suppress(OSError):
            state = os.statvfs(f"/proc/{pid}/root/{folder}")
            taken += (state.f_blocks - state.f_bfree) * state.f_frsize
            taken += (state.f_files - state.f_ffree) * FILE_BYTES
    return taken


def _kills(file: str) -> int:
    """Return the number of processes killed for memory, from one of the files `COUNTS`."""
    try:
        rows = [line.split() for line in _read(file).splitlines()]
    except FileNotFoundError:
        return 0
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def _write(file: str, text: str) -> None:
    """Write to a file of the kernel; without O_CREAT, and cheaper than with a file object."""
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


async def _remove_all(folders: Iterable[str]) -> None:
    for folder in folders:
        await _remove(Path(folder))


async def _remove(folder: Path) -> None:
    """Remove a group; retries, since its last processes may take a moment to end."""
    for _ in range(REMOVE_TRIES):
        try:
            folder.rmdir()  # noqa: ASYNC240 - not on a disk
        except FileNotFoundError:
            return
        except OSError:
            await asyncio.sleep(REMOVE_PAUSE_S)
        else:
            return
    logger.warning("the control group %s of a sandbox could not be removed", folder)


OWN_LIMITS = Path("/proc/self")
CAP_SYS_RESOURCE = 24
NOBODY = 65534
USERS_IN_TURN = 16_384
MAX_FILES = 256


@dataclass(frozen=True)
class ProcessBounds:
    """The limits of each process that differ between kinds of programs."""

    memory: Literal["as", "data"] | None = "as"
    """Resource that `memory_bytes` limits; "data" leaves out address space that is reserved only.
    None if a control group suffices."""
    max_files: int = MAX_FILES


OOM_SCORE = 1000
"""Makes programs the first to be killed when the machine runs out of memory."""
UNUSED_USERS = ((1_879_048_192, 2_147_352_575), (60_578, 61_183))
"""Ranges of ids that are not assigned to users, services or containers; the second one is for
containers with 65536 ids. Source: systemd's docs/UIDS-GIDS.md."""


def find_program(program: str, *, package: str) -> str:
    """Return the path of a program.

    Raises:
        SandboxUnavailableError: the program is not installed; the message names `package`.
    """
    path = shutil.which(program)
    if path is None:
        raise SandboxUnavailableError(
            f"{program} is not installed; on Debian and Ubuntu: apt-get install {package}"
        )
    return str(Path(path).resolve())


def limit_words(
    prlimit: str,
    limits: SandboxLimits,
    *,
    processes: bool = True,
    of_process: ProcessBounds = ProcessBounds(),
) -> list[str]:
    """Return the command prefix that sets the limits and then runs the rest.

    Args:
        prlimit: path of the program.
        limits: the limits.
        processes: whether the number of processes is limited; only if the kernel counts the
            processes of the box alone.
        of_process: further limits of each process.
    """
    bounds = _bounds(limits, of_process)
    if not processes:
        del bounds["nproc"]
    return [prlimit, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in bounds.items()), "--"]


def may_limit_others() -> bool:
    """Whether this process may call `limit_process` for the processes of a box.

    Root runs them as another user, and needs a capability that containers often lack.
    """
    if os.geteuid() != 0:
        return True
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(held, 16) >> CAP_SYS_RESOURCE & 1)


def limit_process(
    pid: int, limits: SandboxLimits, of_process: ProcessBounds = ProcessBounds()
) -> bool:
    """Set the limits of a process and of its later descendants.

    Returns:
        False if the process has already ended.

    Raises:
        SandboxError: the kernel refuses it.
    """
    try:
        for name, bound in _bounds(limits, of_process).items():
            resource.prlimit(pid, getattr(resource, f"RLIMIT_{name.upper()}"), bound)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise SandboxError(f"the limits of a process cannot be set: {error}") from error
    return True


def next_user() -> int:
    """Return the user id of the next program of root; `NOBODY` if no other ids are available.

    Concurrent programs have separate users, also those of different processes of this library: a
    user has keyrings, a count of processes, and rights over files and processes.
    """
    return user_of(os.getpid() * USERS_IN_TURN + next(_numbers) % USERS_IN_TURN)


def user_of(number: int) -> int:
    """Return the unused user id with a number; `NOBODY` if no such ids are available."""
    unused = _unused_users()
    if unused is None:
        return NOBODY
    first, last = unused
    return first + number % (last - first + 1)


@functools.cache
def _unused_users() -> tuple[int, int] | None:
    """Return the first of `UNUSED_USERS` that the user namespace of this process contains."""
    maps = [(OWN_LIMITS / f"{kind}_map").read_text().splitlines() for kind in ("uid", "gid")]
    ranges = [[tuple(map(int, row.split())) for row in rows] for rows in maps]
    for first, last in UNUSED_USERS:
        if all(any(a <= first and last < a + size for a, _, size in each) for each in ranges):
            return first, last
    return None


def kill_first(pid: int) -> None:
    """Make the kernel kill a process and its descendants first when the machine lacks memory."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))


def _bounds(limits: SandboxLimits, of_process: ProcessBounds) -> dict[str, tuple[int, int]]:
    """Return soft and hard limits by their names in `prlimit`."""
    processes = limits.max_processes + 1  # plus that of the sandbox, which waits for the program
    memory = of_process.memory
    return {
        **({} if memory is None else {memory: (limits.memory_bytes, limits.memory_bytes)}),
        "cpu": (limits.cpu_s, limits.cpu_s + 1),
        "nproc": (processes, processes),
        "fsize": (limits.disk_bytes, limits.disk_bytes),
        "nofile": (of_process.max_files, of_process.max_files),
        "core": (0, 0),
    }

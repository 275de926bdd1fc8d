"""Limits of a sandbox: of all its processes together, and of each process.

Together: control groups of Linux, versions 1 and 2, for root, and in version 2 for a user to whom
systemd has delegated a subtree. Where none is writable, the memory of a program is measured every
50 ms, and the program is killed when it exceeds its limit.

Each process: resource limits and a user, set by programs that run before the sandboxed one.
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxUnavailableError

__all__ = [
    "NOBODY",
    "OOM_SCORE",
    "PARENT",
    "ControlGroups",
    "Membership",
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
]

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PARENT = "atropos-sandbox"
OWN = Path("/proc/self/cgroup")
TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
LIMITS = (
    *("memory.max", "memory.swap.max", "pids.max"),
    # without the second, what does not fit into the first would go to swap; TCP counts apart
    *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", TCP_LIMIT),
)
COUNTS = ("memory.events", "memory.oom_control")
READ_BYTES = 4096
REMOVE_TRIES = 50
REMOVE_PAUSE_S = 0.002
WATCH_PAUSE_S = 0.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FILE_BYTES = 1536  # what the kernel keeps of an empty file, about
SOCKET_BYTES = 212_992  # what one holds of what is not received, but for TCP: net.core.wmem_default
FOLDERS = ("box", "tmp", "dev/shm")
COUNTED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")

_numbers = itertools.count()


@dataclass
class Membership:
    """The bounds of one program."""

    folders: tuple[str, ...]
    """Its control groups."""
    memory_bytes: int
    """Of all its processes and files."""
    is_memory_counted: bool
    """Whether a control group bounds it."""
    was_killed_here: bool = False

    def add(self, pid: int) -> bool:
        """Move a process, and all that it starts later, into the groups.

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
        """Whether one of its processes was killed for memory."""
        kills = (_kills(f"{folder}/{name}") for folder in self.folders for name in COUNTS)
        return self.was_killed_here or any(number > 0 for number in kills)

    async def watch(self, pid: int, kill: Callable[[], None]) -> None:
        """Kill a program that takes too much; until cancelled, or at once if the kernel does it.

        Args:
            pid: of its first process.
            kill: ends all of them.
        """
        while not self.is_memory_counted:
            await asyncio.sleep(WATCH_PAUSE_S)
            if _memory_of(pid, self.memory_bytes) > self.memory_bytes:
                self.was_killed_here = True
                kill()
                return


class ControlGroups:
    """Makes and removes control groups."""

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
        """Whether the memory of a program can be bounded, whichever part of the kernel holds it."""
        return any(name in MEMORY_LIMITS for names in self._limits.values() for name in names)

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
            yield Membership(folders, _memory_bytes(limits), self.count_memory)
        finally:
            for folder in folders:
                await asyncio.shield(_remove(Path(folder)))


def bounds_swap(root: Path = ROOT) -> bool:
    """Whether the kernel counts memory and swap together, as it may be built without."""
    is_unified = (root / "cgroup.controllers").exists()
    return is_unified or (root / "memory" / "memory.memsw.limit_in_bytes").exists()


@contextlib.asynccontextmanager
async def bounded_tcp(name: str, limits: SandboxLimits, root: Path = ROOT) -> AsyncIterator[None]:
    """Make the group that another program is about to use, where that leaves TCP unbounded.

    Version 1 counts what sockets hold apart, and OCI runtimes do not set the limit any more.
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


def require_bound(groups: ControlGroups, *, has_filter: bool) -> None:
    """Refuse to go on where a program could take all memory of the machine.

    Args:
        groups: those of this machine.
        has_filter: whether calls whose memory belongs to no process can be refused; then the
            limits of each process times their number are a bound, and the watch a closer one.

    Raises:
        SandboxUnavailableError: nothing bounds it; the message says what to do.
    """
    if not groups.count_memory and not has_filter:
        raise SandboxUnavailableError(
            "nothing bounds the memory of programs here: no control group can be written, and "
            f"system calls cannot be filtered on {os.uname().machine}; run as root or under "
            "`systemd-run --user --scope`, or set ATROPOS_SANDBOX_UNBOUNDED_MEMORY=1 to run "
            "programs all the same"
        )


def remove_abandoned(root: Path = ROOT, parents: Sequence[Path] = ()) -> None:
    """Remove the groups of processes that ended without doing so, and what is left in them."""
    for parent in {root / PARENT, *root.glob(f"*/{PARENT}"), *parents}:
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
        if os.access(parent, os.W_OK, effective_ids=True):  # it may belong to another user
            parents.append(parent)
    return tuple(parents)


def _delegated(root: Path, own: Path) -> tuple[Path, ...]:
    """The parent in version 2 in the part that is this user's, as `user@1000.service`.

    It is a sibling of the group of this process, as the kernel moves a process only within a part
    that is the user's, and hands controllers down only from groups that hold no process.
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
    return limits.memory_bytes + 2 * limits.disk_bytes  # its folders lie in memory


def _values(limits: SandboxLimits) -> dict[str, str]:
    memory = str(_memory_bytes(limits))
    processes = str(limits.max_processes + 1)  # and the sandbox's own
    return dict(zip(LIMITS, (memory, "0", processes, memory, memory, memory), strict=True))


def _memory_of(pid: int, enough: int) -> int:
    """The bytes that a process, what it started, their folders and their sockets take.

    Memory they share is counted more than once where that does not exceed `enough`.
    """
    files = _files_of(pid) + _sockets_of(pid)
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
    """Of memory that several processes share, a part each; what the kernel may drop is left out."""
    try:
        rows = (line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines())
        return sum(int(row[1]) * 1024 for row in rows if row[0] in COUNTED)
    except OSError:  # it hides itself
        return _resident(pid)


def _sockets_of(pid: int) -> int:
    """Of its network: sockets that are open or on their way to be, and what waits in TCP's."""
    taken = 0
    with contextlib.suppress(OSError, StopIteration):
        if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net")):  # noqa: PTH116
            return 0  # it is not in the box yet
        rows = Path(f"/proc/{pid}/net/sockstat").read_text().splitlines()
        taken += SOCKET_BYTES * next(int(row.split()[2]) for row in rows if "sockets: used" in row)
        for name in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                sent, received = row.split()[4].split(":")
                taken += int(sent, 16) + int(received, 16)
    return taken


def _files_of(pid: int) -> int:
    """Of the folders it may write to: their content, and that there are files at all."""
    taken = 0
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(f"/proc/{pid}/root/"), os.stat("/")):  # noqa: PTH116
            return 0  # it is not in the box yet
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            state = os.statvfs(f"/proc/{pid}/root/{folder}")
            taken += (state.f_blocks - state.f_bfree) * state.f_frsize
            taken += (state.f_files - state.f_ffree) * FILE_BYTES
    return taken


def _kills(file: str) -> int:
    """Number of processes the kernel killed for memory, from one of the files `COUNTS`."""
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


OWN_LIMITS = Path("/proc/self")
CAP_SYS_RESOURCE = 24
NOBODY = 65534
USERS_IN_TURN = 16_384
MAX_FILES = 256
OOM_SCORE = 1000
"""Programs are the first to be killed when the whole machine runs out of memory."""
UNUSED_USERS = ((1_879_048_192, 2_147_352_575), (60_578, 61_183))
"""First and last ids that no machine gives to users, services or containers; the second range is
for containers of 65536 users. Source: systemd's docs/UIDS-GIDS.md."""


def find_program(program: str, *, package: str) -> str:
    """Return the path of a program.

    Raises:
        SandboxUnavailableError: it is not installed; the message names the package.
    """
    path = shutil.which(program)
    if path is None:
        raise SandboxUnavailableError(
            f"{program} is not installed; on Debian and Ubuntu: apt-get install {package}"
        )
    return str(Path(path).resolve())


def limit_words(prlimit: str, limits: SandboxLimits, *, processes: bool = True) -> list[str]:
    """Return the command prefix that sets the limits and then runs the words after it.

    Args:
        prlimit: path of the program.
        limits: which.
        processes: the number of processes too, where the kernel counts those of the box alone.
    """
    bounds = _bounds(limits)
    if not processes:
        del bounds["nproc"]
    return [prlimit, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in bounds.items()), "--"]


def may_limit_others() -> bool:
    """Whether this process may set the limits of the processes of a box: `limit_process`.

    Their user is the one of this process, except that root hands over to another, whose limits
    it may set only with the capability that containers often take away.
    """
    if os.geteuid() != 0:
        return True
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(held, 16) >> CAP_SYS_RESOURCE & 1)


def limit_process(pid: int, limits: SandboxLimits) -> bool:
    """Set the limits of a process and of all that it starts later.

    Returns:
        False when it has ended already.

    Raises:
        SandboxError: the kernel refuses it.
    """
    try:
        for name, bound in _bounds(limits).items():
            resource.prlimit(pid, getattr(resource, f"RLIMIT_{name.upper()}"), bound)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise SandboxError(f"the limits of a process cannot be set: {error}") from error
    return True


def next_user() -> int:
    """Return the user that the next program runs as, for root, which hands over to it.

    A user has keyrings, a count of processes, and rights over files and processes. Programs that
    run at a time share none of it, nor do those of two processes of this kind on one machine.

    Returns:
        `NOBODY` always where this process may become no further users.
    """
    unused = _unused_users()
    if unused is None:
        return NOBODY
    first, last = unused
    number = os.getpid() * USERS_IN_TURN + next(_numbers) % USERS_IN_TURN
    return first + number % (last - first + 1)


@functools.cache
def _unused_users() -> tuple[int, int] | None:
    """The first of `UNUSED_USERS` that the user namespace of this process has."""
    maps = [(OWN_LIMITS / f"{kind}_map").read_text().splitlines() for kind in ("uid", "gid")]
    ranges = [[tuple(map(int, row.split())) for row in rows] for rows in maps]
    for first, last in UNUSED_USERS:
        if all(any(a <= first and last < a + size for a, _, size in each) for each in ranges):
            return first, last
    return None


def kill_first(pid: int) -> None:
    """Let the kernel choose a process, and what it starts, when the whole machine lacks memory."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))


def _bounds(limits: SandboxLimits) -> dict[str, tuple[int, int]]:
    """Soft and hard limits by the names `prlimit` and the kernel give them."""
    processes = limits.max_processes + 1  # and the sandbox's own, which waits for the program
    return {
        "as": (limits.memory_bytes, limits.memory_bytes),
        "cpu": (limits.cpu_s, limits.cpu_s + 1),
        "nproc": (processes, processes),
        "fsize": (limits.disk_bytes, limits.disk_bytes),
        "nofile": (MAX_FILES, MAX_FILES),
        "core": (0, 0),
    }

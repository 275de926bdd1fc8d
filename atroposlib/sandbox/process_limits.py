"""The limits and the user of each process of a program, and the programs that set them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
import shutil
from pathlib import Path

from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxUnavailableError

__all__ = [
    "NOBODY",
    "OOM_SCORE",
    "find_program",
    "kill_first",
    "limit_process",
    "limit_words",
    "may_limit_others",
    "next_user",
]

OWN = Path("/proc/self")
CAP_SYS_RESOURCE = 24
NOBODY = 65534
USERS_IN_TURN = 16_384
MAX_FILES = 256
OOM_SCORE = 1000
"""Programs are the first to be killed when the whole machine runs out of memory."""
UNUSED_USERS = ((1_879_048_192, 2_147_352_575), (60_578, 61_183))
"""First and last ids that no machine gives to users, services or containers; the second range is
for containers of 65536 users. Source: systemd's docs/UIDS-GIDS.md."""

_numbers = itertools.count()


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
    """Return what sets the limits and then runs the words behind it.

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
    """Set the limits of a process and of whatever it starts from now on.

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
    maps = [(OWN / f"{kind}_map").read_text().splitlines() for kind in ("uid", "gid")]
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

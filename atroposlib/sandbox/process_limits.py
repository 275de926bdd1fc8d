"""The limits of each process of a program, and the programs of the machine that set them."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxUnavailableError

__all__ = ["find_program", "limit_process", "limit_words", "may_limit_others"]

CAP_SYS_RESOURCE = 24


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


def _bounds(limits: SandboxLimits) -> dict[str, tuple[int, int]]:
    """Soft and hard limits by the names `prlimit` and the kernel give them."""
    processes = limits.max_processes + 1  # and the sandbox's own, which waits for the program
    return {
        "as": (limits.memory_bytes, limits.memory_bytes),
        "cpu": (limits.cpu_s, limits.cpu_s + 1),
        "nproc": (processes, processes),
        "fsize": (limits.disk_bytes, limits.disk_bytes),
        "core": (0, 0),
    }

"""The limits of each process of a program, and the programs of the machine that set them."""

from __future__ import annotations

import shutil
from pathlib import Path

from atroposlib.sandbox.interface import SandboxLimits, SandboxUnavailableError

__all__ = ["find_program", "limit_words"]


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
    return [
        prlimit,
        f"--as={limits.memory_bytes}",
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        *([f"--nproc={limits.max_processes}"] if processes else []),
        f"--fsize={limits.disk_bytes}",
        "--core=0",
        "--",
    ]

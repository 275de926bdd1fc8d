"""What a container is allowed, as the `config.json` of the OCI runtime specification.

Own pid, network, mount, ipc and host name; /usr read-only; writable: /box, /tmp, /dev/shm; a user
of its own without capabilities; a filter of system calls. The limits of each process are set
within, by prlimit, as gVisor enforces no others.

Source: Open Container Initiative, "Runtime Specification", version 1.0.2, config.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from atroposlib.sandbox.interface import SandboxLimits
from atroposlib.sandbox.process_limits import OOM_SCORE
from atroposlib.sandbox.system_calls import call_rules

__all__ = ["FOLDERS", "container_spec"]

GRACE_S = 5
MASKED = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/scsi")
WRITABLE = ("/tmp", "/box", "/dev/shm")
FOLDERS = ("proc", "dev", "usr", "tmp", "box", "input")
"""The empty folders a root needs for the mounts."""
COPY_AND_RUN = 'cp -r /input/. . && exec "$@"'


def container_spec(
    command: Sequence[str],
    *,
    root: str,
    files: str,
    limits: SandboxLimits,
    limit_words: Sequence[str],
    group: str | None,
    bounds_swap: bool,
    user: int,
    is_memory_counted: bool,
    has_own_kernel: bool,
) -> dict[str, Any]:  # JSON
    """Return the configuration of one program's container.

    Args:
        command: the program and its arguments.
        root: the folder that becomes /, with `FOLDERS` in it.
        files: the folder whose content the program finds in /box.
        limits: of memory, processes and disk.
        limit_words: what sets the limits of each process and then runs the words behind it.
        group: path of the control group the runtime makes; None for none.
        bounds_swap: whether the runtime can bound memory and swap together.
        user: whom the program runs as.
        is_memory_counted: whether a control group bounds its memory.
        has_own_kernel: whether the runtime is gVisor.
    """
    # The first process cannot be killed from within, and with it all others end: the container
    # outlives nobody, even when this process ends without removing it.
    end = ["/usr/bin/timeout", "--signal=KILL", str(math.ceil(limits.wall_s) + GRACE_S)]
    words = [*end, "/usr/bin/sh", "-c", COPY_AND_RUN, "sh", *limit_words, *command]
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
        "maskedPaths": list(MASKED),
        "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger"],
        "seccomp": call_rules(is_memory_counted=is_memory_counted, has_own_kernel=has_own_kernel),
    }
    if group is not None:
        memory = limits.memory_bytes + 2 * limits.disk_bytes  # its folders lie in memory
        processes = limits.max_processes + 1  # and the one that ends it
        linux["cgroupsPath"] = group
        bounds = dict.fromkeys(("limit", "swap") if bounds_swap else ("limit",), memory)
        linux["resources"] = {"memory": bounds, "pids": {"limit": processes}}
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": root, "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": user},
            "args": words,
            "env": ["HOME=/box", "PATH=/usr/bin", "LANG=C.UTF-8"],
            "cwd": "/box",
            "capabilities": {name: [] for name in sets},
            "noNewPrivileges": True,
            "oomScoreAdj": OOM_SCORE,
        },
        "mounts": _mounts(files, limits.disk_bytes),
        "linux": linux,
    }


def _mounts(files: str, disk_bytes: int) -> list[dict[str, Any]]:
    mounts = [
        _mount("/proc", "proc", "proc", "noexec", "ro"),
        _mount("/dev", "tmpfs", "tmpfs", "mode=755", "size=65536"),
    ]
    mounts += [_mount(path, "bind", path, "rbind", "ro") for path in ("/usr",)]
    for path in WRITABLE:
        mounts.append(_mount(path, "tmpfs", "tmpfs", "mode=1777", f"size={disk_bytes}"))
    return [*mounts, _mount("/input", "bind", files, "rbind", "ro")]


def _mount(path: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    options = ("nosuid", "nodev", *options) if path != "/dev" else ("nosuid", *options)
    return {"destination": path, "type": kind, "source": source, "options": list(options)}

"""Sandboxes by an OCI runtime: a container by runc or crun, or gVisor's own kernel by runsc.

    config.json, files ──► runtime run ──► timeout ──► copy files ──► prlimit ──► program
    timeout or cancellation ──► runtime delete --force

No image is used: /usr of the machine is mounted read-only. Before the first program, trial programs
exceed each limit; a runtime that does not enforce all of them is rejected.

A container has its own pid, network, mount, ipc and host name namespaces, /usr read-only, the
writable folders /box, /tmp and /dev/shm, a separate user without capabilities, and a filter of
system calls. The limits of each process are set inside by prlimit, the only ones gVisor enforces.

Source: Open Container Initiative, "Runtime Specification", version 1.0.2, config.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from atroposlib.sandbox.interface import (
    MEBIBYTE,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
    as_bytes,
    checked_path,
)
from atroposlib.sandbox.limits import (
    OOM_SCORE,
    PARENT,
    ControlGroups,
    bounded_tcp,
    bounds_swap,
    find_program,
    limit_words,
    next_user,
    remove_abandoned,
    remove_group,
    require_bound,
)
from atroposlib.sandbox.streams import result_of, run_bounded
from atroposlib.sandbox.system_calls import call_rules, has_filter
from atroposlib.utils.aio import LoopSemaphore

__all__ = ["CONTAINER", "GVISOR", "Containers"]

GRACE_S = 5
MASKED = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/scsi")
WRITABLE = ("/tmp", "/box", "/dev/shm")
FOLDERS = ("proc", "dev", "usr", "tmp", "box", "input")
"""Mount points in the root."""
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
    """Return the configuration of the container of one program.

    Args:
        command: program and arguments.
        root: folder that becomes /, with `FOLDERS` in it.
        files: folder with the files of the program.
        limits: limits of memory, processes and disk.
        limit_words: command prefix that sets the limits of each process and runs the rest.
        group: path of the control group that the runtime creates; None for no group.
        bounds_swap: whether memory and swap can be bounded together.
        user: id of the user of the program.
        is_memory_counted: whether a control group bounds the memory.
        has_own_kernel: whether the runtime is gVisor.
    """
    # The first process cannot be killed from inside, and its end ends all others: so the container
    # ends after its time limit, even if this process does not remove it.
    end = ["/usr/bin/timeout", "--signal=KILL", str(math.ceil(limits.wall_s) + GRACE_S)]
    words = [*end, "/usr/bin/sh", "-c", COPY_AND_RUN, "sh", *limit_words, *command]
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
        "maskedPaths": list(MASKED),
        "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger"],
        "seccomp": call_rules(is_memory_counted=is_memory_counted, has_own_kernel=has_own_kernel),
    }
    if group is not None:
        memory = limits.memory_bytes + 2 * limits.disk_bytes  # its folders are in memory
        processes = limits.max_processes + 1  # plus `timeout`
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
    size = f"size={disk_bytes}"
    return [
        _mount("/proc", "proc", "proc", "noexec", "ro"),
        _mount("/dev", "tmpfs", "tmpfs", "mode=755", "size=65536"),
        _mount("/usr", "bind", "/usr", "rbind", "ro"),
        *(_mount(path, "tmpfs", "tmpfs", "mode=1777", size) for path in WRITABLE),
        _mount("/input", "bind", files, "rbind", "ro"),
    ]


def _mount(path: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    options = ("nosuid", "nodev", *options) if path != "/dev" else ("nosuid", *options)
    return {"destination": path, "type": kind, "source": source, "options": list(options)}


PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
LIMITS = SandboxLimits(
    wall_s=60.0,
    cpu_s=30,
    memory_bytes=256 * MEBIBYTE,
    max_processes=8,
    disk_bytes=MEBIBYTE,
    output_bytes=10_000,
)
SPIN = "while True: pass"
ALLOCATE = """
try:
    bytearray(512 * 2**20)
except MemoryError:
    print('held')
"""
FORK = """
import os, signal
signal.alarm(30)
try:
    for _ in range(32):
        if os.fork() == 0:
            signal.pause()
except OSError:
    print('held')
"""
FILL = """
for folder in ('/box', '/tmp', '/dev/shm'):
    try:
        for number in range(4):
            open(f'{folder}/{number}', 'wb').write(bytes(600_000))
    except OSError:
        print('held')
"""


class Trial(NamedTuple):
    """A program that exceeds a limit."""

    limit: str
    command: tuple[str, ...]
    holds: Callable[[SandboxResult], bool]
    """Whether a result shows that the limit was enforced."""
    limits: SandboxLimits = LIMITS


TRIALS = (
    Trial("memory", (*PYTHON, ALLOCATE), lambda result: result.stdout == "held\n"),
    Trial("processes", (*PYTHON, FORK), lambda result: result.stdout == "held\n"),
    Trial("disk", (*PYTHON, FILL), lambda result: result.stdout == "held\n" * 3),
    Trial(
        "processor time",
        (*PYTHON, SPIN),
        lambda result: result.ended_by == "cpu_time",
        replace(LIMITS, cpu_s=1),
    ),
)


JOIN_GROUPS = 'set -e; for file in $1; do echo 0 > "$file"; done; shift; exec "$@"'
KERNEL_BYTES = 256 * MEBIBYTE  # memory of gVisor itself
KERNEL_THREADS = 512
DELETE_TIMEOUT_S = 60

_numbers = itertools.count()


@dataclass(frozen=True)
class Runtime:
    """An OCI runtime."""

    name: str
    programs: tuple[str, ...]
    """Alternative programs; the first one that is installed is used."""
    options: tuple[str, ...] = ()
    has_own_kernel: bool = False
    """Whether it has its own kernel, which counts processes; this process then creates the control
    group."""


CONTAINER = Runtime("container", ("runc", "crun"))
GVISOR = Runtime(
    "gvisor",
    ("runsc",),
    options=("--network=none", "--platform=ptrace", "--ignore-cgroups", "--oci-seccomp"),
    has_own_kernel=True,
)


class Containers:
    """Runs programs with an OCI runtime, as root.

    Args:
        runtime: `CONTAINER` or `GVISOR`.
        limits: default limits of `run`.
        max_parallel: number of concurrent programs; None for one per usable processor.
        allow_unbounded_memory: whether programs also run if nothing bounds their memory.

    Raises:
        SandboxUnavailableError: a required program is missing, this process is not root, or
            nothing bounds memory here.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        limits: SandboxLimits | None = None,
        max_parallel: int | None = None,
        allow_unbounded_memory: bool = False,
    ) -> None:
        self.name = runtime.name
        self._runtime = runtime
        self._limits = limits or SandboxLimits()
        self._program = _find_runtime(runtime)
        self._prlimit = find_program("prlimit", package="util-linux")
        if os.geteuid() != 0:
            raise SandboxUnavailableError(
                f"the sandbox {runtime.name!r} bounds its programs by control groups, which needs "
                "root; without, use bubblewrap"
            )
        remove_abandoned()
        # The other runtimes do not start a container without its control group.
        self._groups = ControlGroups() if runtime.has_own_kernel else None
        if self._groups is not None and not allow_unbounded_memory:
            require_bound(self._groups, has_filter=has_filter())
        self._bounds_swap = bounds_swap()
        self._slots = LoopSemaphore(max_parallel or len(os.sched_getaffinity(0)))
        self._trying = LoopSemaphore(1)
        self._is_tried = False

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        paths = {checked_path(path): text for path, text in (files or {}).items()}
        async with self._trying.of_loop():
            if not self._is_tried:
                await self._try_limits()
                self._is_tried = True
        return await self._run(command, paths, as_bytes(stdin), limits or self._limits)

    async def _try_limits(self) -> None:
        for trial in TRIALS:
            result = await self._run(trial.command, {}, b"", trial.limits)
            if not trial.holds(result):
                raise SandboxUnavailableError(
                    f"under {self._program} the limit of {trial.limit} does not hold here (its "
                    f"trial ended by {result.ended_by}, {result.exit_code}): use bubblewrap, or a "
                    "newer runtime"
                )

    async def _run(
        self,
        command: Sequence[str],
        files: Mapping[str, str | bytes],
        stdin: bytes,
        limits: SandboxLimits,
    ) -> SandboxResult:
        name = f"{os.getpid()}-{next(_numbers)}-container"
        async with self._slots.of_loop(), self._joined(name, limits) as join:
            with TemporaryDirectory(prefix="atropos-sandbox-") as folder:
                bundle = Path(folder)
                filling = asyncio.create_task(
                    asyncio.to_thread(self._fill, bundle, name, command, files, limits)
                )
                try:
                    await asyncio.shield(filling)
                except asyncio.CancelledError:
                    await asyncio.wait({filling})  # the folder is removed after its last file
                    raise
                runtime = [self._program, "--root", str(bundle / "state"), *self._runtime.options]
                started = bundle / "pid"
                words = [*runtime, "run", "--bundle", folder, "--pid-file", str(started), name]
                finished = await run_bounded(
                    [*join, *words],
                    stdin=stdin,
                    limits=limits,
                    kill=functools.partial(_kill, runtime, name),
                )
                is_stopped = finished.stopped_for is not None
                return result_of(
                    finished,
                    exit_code=None if is_stopped or not _has_text(started) else finished.returncode,
                    ran_out_of_memory=False,
                    around=self._program,
                )

    @contextlib.asynccontextmanager
    async def _joined(self, name: str, limits: SandboxLimits) -> AsyncIterator[list[str]]:
        """Yield a command prefix that moves gVisor into a control group and runs the rest.

        It is empty for other runtimes, which create the group themselves.
        """
        if self._groups is None:
            async with bounded_tcp(name, limits):
                yield []
            return
        around = replace(
            limits,
            memory_bytes=limits.memory_bytes + KERNEL_BYTES,
            max_processes=limits.max_processes + KERNEL_THREADS,
        )
        async with self._groups.join(around) as members:
            files = " ".join(f"{folder}/cgroup.procs" for folder in members.folders)
            yield ["/bin/sh", "-c", JOIN_GROUPS, "sh", files]

    def _fill(
        self,
        bundle: Path,
        name: str,
        command: Sequence[str],
        files: Mapping[str, str | bytes],
        limits: SandboxLimits,
    ) -> None:
        root, given = bundle / "root", bundle / "files"
        for folder in (given, root, *(root / each for each in FOLDERS)):
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask is: the program runs as another user
        for each in ("tmp", "box"):
            (root / each).chmod(0o1777)
        for each in ("bin", "lib", "lib64"):
            (root / each).symlink_to(f"usr/{each}")
        for path, content in files.items():
            (given / path).parent.mkdir(parents=True, exist_ok=True)
            (given / path).write_bytes(as_bytes(content))
        for copied in given.rglob("*"):
            copied.chmod(0o755 if copied.is_dir() else 0o644)
        own_kernel = self._runtime.has_own_kernel
        spec = container_spec(
            command,
            root=str(root),
            files=str(given),
            limits=limits,
            limit_words=limit_words(self._prlimit, limits, processes=own_kernel),
            group=None if own_kernel else f"/{PARENT}/{name}",
            bounds_swap=self._bounds_swap,
            user=next_user(),
            is_memory_counted=self._groups is None or self._groups.count_memory,
            has_own_kernel=own_kernel,
        )
        (bundle / "config.json").write_text(json.dumps(spec))


def _find_runtime(runtime: Runtime) -> str:
    for program in runtime.programs:
        with contextlib.suppress(SandboxUnavailableError):
            return find_program(program, package=program)
    names = " or ".join(runtime.programs)
    raise SandboxUnavailableError(
        f"{names} is not installed; on Debian and Ubuntu: apt-get install {runtime.programs[0]}"
    )


def _has_text(file: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(file.read_text().strip())
    return False


async def _kill(runtime: Sequence[str], name: str) -> None:
    """Kill and remove a container, if it exists."""
    words = [*runtime, "delete", "--force", name]
    try:
        await asyncio.to_thread(
            subprocess.run, words, env={}, capture_output=True, timeout=DELETE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{runtime[0]} cannot remove the container {name}: {error}") from error
    finally:
        await remove_group(name)

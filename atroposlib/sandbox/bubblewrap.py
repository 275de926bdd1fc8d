"""The default sandbox: Linux namespaces through bubblewrap, limits set before the program runs.

own pid, network, mount, user, ipc and host name; /usr read-only; writable: /box, /tmp, /dev/shm
a filter of system calls; as root each program runs as another user of the machine
boxes are set up ahead, while the programs before them run
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from atroposlib.sandbox.box_files import checked_path, content_fd
from atroposlib.sandbox.control_groups import ControlGroups, Membership, require_bound
from atroposlib.sandbox.gate import Gate, end_abandoned, new_gate
from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxResult
from atroposlib.sandbox.process_limits import (
    NOBODY,
    find_program,
    kill_first,
    limit_process,
    limit_words,
    may_limit_others,
    next_user,
)
from atroposlib.sandbox.results import result_of
from atroposlib.sandbox.streams import Finished, run_bounded
from atroposlib.sandbox.system_calls import call_filter, has_filter

__all__ = ["Bubblewrap"]

NOT_FOUND = 127  # as a shell ends for a program that it cannot start
BOXES_PER_SLOT = 3  # setting one up is mostly waiting for the kernel
KEYS = "/proc/keys"  # would show the keys of who started this process


class Bubblewrap:
    """Runs programs under `bwrap`.

    Args:
        limits: used when `run` is given none.
        read_only: further folders of the machine the program may read.
        max_parallel: programs at a time; None for one per processor this process may use.
        allow_unbounded_memory: run programs where nothing bounds their memory, too.
        groups: None for the control groups of this machine.

    Raises:
        SandboxUnavailableError: a program it needs is missing, or nothing bounds memory here.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        read_only: Sequence[str] = (),
        max_parallel: int | None = None,
        allow_unbounded_memory: bool = False,
        groups: ControlGroups | None = None,
    ) -> None:
        self._limits = limits or SandboxLimits()
        self._read_only = tuple(read_only)
        slots = max_parallel or len(os.sched_getaffinity(0))
        self._slots = asyncio.Semaphore(slots)
        self._boxes = asyncio.Semaphore(BOXES_PER_SLOT * slots)
        self._groups = groups or ControlGroups()
        self._bwrap = find_program("bwrap", package="bubblewrap")
        self._prlimit: str | None = None  # starting it takes a tenth of a short program's time
        if not may_limit_others():
            self._prlimit = find_program("prlimit", package="util-linux")
        self._chroot: str | None = None
        if os.geteuid() == 0:
            self._chroot = find_program("chroot", package="coreutils")
        self._has_filter = has_filter()
        if not allow_unbounded_memory:
            require_bound(self._groups, has_filter=self._has_filter)
        end_abandoned()
        self._masked = [KEYS] if Path(KEYS).exists() else []

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a command in an empty folder, see `Sandbox.run`."""
        limits = limits or self._limits
        content = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        async with self._boxes, self._groups.join(limits) as members:
            with contextlib.ExitStack() as held:
                gate = held.enter_context(new_gate())
                fds = {
                    checked_path(path): held.enter_context(content_fd(content))
                    for path, content in (files or {}).items()
                }
                filters = []
                if self._has_filter:
                    calls = call_filter(is_memory_counted=members.is_memory_counted)
                    filters.append(held.enter_context(content_fd(calls)))
                words = self._command(command, fds, filters, limits, gate)
                try:
                    finished = await run_bounded(
                        words,
                        stdin=content,
                        limits=limits,
                        pass_fds=[*fds.values(), *filters, *gate.fds],
                        turn=self._turn(gate, limits, members),
                    )
                except OSError as error:
                    raise SandboxError(f"{words[0]} cannot be started: {error}") from error
                return result_of(
                    finished,
                    exit_code=None if finished.stopped_for else _exit_code(finished, gate),
                    ran_out_of_memory=members.ran_out_of_memory,
                    around=self.name,
                )

    @contextlib.asynccontextmanager
    async def _turn(
        self, gate: Gate, limits: SandboxLimits, members: Membership
    ) -> AsyncIterator[None]:
        pid = await gate.wait_for_box()
        # The kernel may take milliseconds to put a process into a control group.
        if pid is None or not await asyncio.to_thread(self._bound, pid, limits, members):
            yield  # bwrap says why on standard error
            return
        try:
            async with self._slots:
                gate.open()
                watch = asyncio.create_task(members.watch(pid, gate.kill_box))
                try:
                    yield
                finally:
                    watch.cancel()
        finally:
            gate.kill_box()

    def _bound(self, pid: int, limits: SandboxLimits, members: Membership) -> bool:
        """Bound a process and what it starts; False when it has ended already."""
        kill_first(pid)
        return members.add(pid) and (self._prlimit is not None or limit_process(pid, limits))

    def _command(
        self,
        command: Sequence[str],
        files: Mapping[str, int],
        filters: Sequence[int],
        limits: SandboxLimits,
        gate: Gate,
    ) -> list[str]:
        disk = str(limits.disk_bytes)
        words = [self._bwrap, *gate.words]
        if self._chroot is not None:
            user = next_user()  # to /, so that the user alone changes
            words = [self._chroot, f"--userspec=+{user}:+{user}", "--groups=", "/", *words]
            words += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        words += ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
        words += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        for folder in self._read_only:
            words += ["--ro-bind", folder, folder]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for path in self._masked:
            words += ["--ro-bind", "/dev/null", path]
        for folder in ("/tmp", "/box", "/dev/shm"):
            words += ["--size", disk, "--tmpfs", folder]
        for path, fd in files.items():
            words += ["--file", str(fd), f"/box/{path}"]
        for path in ("/proc", "/dev", "/"):  # in /proc, what belongs to its own namespaces too
            words += ["--remount-ro", path]
        words += ["--chdir", "/box", "--setenv", "HOME", "/box", "--setenv", "PATH", "/usr/bin"]
        words += ["--setenv", "LANG", "C.UTF-8"]
        for fd in filters:
            words += ["--seccomp", str(fd)]
        words.append("--")
        if self._prlimit is not None:
            words += limit_words(self._prlimit, limits)
        return [*words, *command]


def _exit_code(finished: Finished, gate: Gate) -> int | None:
    """The program's; None when the box could not be set up."""
    code = gate.exit_code()
    if code is None and finished.stderr.startswith(b"bwrap: execvp "):
        return NOT_FOUND
    return code

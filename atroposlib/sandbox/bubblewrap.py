"""The default sandbox: Linux namespaces through bubblewrap, limits through prlimit.

own pid, network, mount, user, ipc and host name; /usr read-only; writable: /box, /tmp, /dev/shm
as root the program runs as user 65534, so that limits on processes hold
boxes are set up ahead, while the programs before them run
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence

from atroposlib.sandbox.box_files import checked_path, content_fd
from atroposlib.sandbox.control_groups import ControlGroups, Membership
from atroposlib.sandbox.gate import Gate, new_gate
from atroposlib.sandbox.interface import SandboxError, SandboxLimits, SandboxResult
from atroposlib.sandbox.process_limits import find_program, limit_words
from atroposlib.sandbox.results import result_of
from atroposlib.sandbox.streams import run_bounded

__all__ = ["Bubblewrap"]

NOBODY = "65534"
BOXES_PER_SLOT = 2  # setting one up is mostly waiting for the kernel


class Bubblewrap:
    """Runs programs under `bwrap`.

    Args:
        limits: used when `run` is given none.
        read_only: further folders of the machine the program may read.
        max_parallel: programs at a time; None for one per processor this process may use.

    Raises:
        SandboxUnavailableError: a program it needs is missing.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        read_only: Sequence[str] = (),
        max_parallel: int | None = None,
    ) -> None:
        self._limits = limits or SandboxLimits()
        self._read_only = tuple(read_only)
        slots = max_parallel or len(os.sched_getaffinity(0))
        self._slots = asyncio.Semaphore(slots)
        self._boxes = asyncio.Semaphore(BOXES_PER_SLOT * slots)
        self._groups = ControlGroups()
        self._bwrap = find_program("bwrap", package="bubblewrap")
        self._prlimit = find_program("prlimit", package="util-linux")
        self._as_nobody: list[str] = []
        if os.geteuid() == 0:
            chroot = find_program("chroot", package="coreutils")  # to /: changes the user only
            self._as_nobody = [chroot, f"--userspec=+{NOBODY}:+{NOBODY}", "--groups=", "/"]

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
                words = self._command(command, fds, limits, gate)
                try:
                    finished = await run_bounded(
                        words,
                        stdin=content,
                        limits=limits,
                        pass_fds=[*fds.values(), *gate.fds],
                        turn=self._turn(gate, members),
                    )
                except OSError as error:
                    raise SandboxError(f"{words[0]} cannot be started: {error}") from error
                return result_of(
                    finished,
                    exit_code=None if finished.stopped_for else gate.exit_code(),
                    ran_out_of_memory=members.ran_out_of_memory,
                    around=self.name,
                )

    @contextlib.asynccontextmanager
    async def _turn(self, gate: Gate, members: Membership) -> AsyncIterator[None]:
        pid = await gate.wait_for_box()
        if pid is None or not members.add(pid):  # bwrap says why on standard error
            yield
            return
        try:
            async with self._slots:
                gate.open()
                yield
        finally:
            gate.kill_box()

    def _command(
        self,
        command: Sequence[str],
        files: Mapping[str, int],
        limits: SandboxLimits,
        gate: Gate,
    ) -> list[str]:
        disk = str(limits.disk_bytes)
        words = [*self._as_nobody, self._bwrap, *gate.words]
        words += ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
        words += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        for folder in self._read_only:
            words += ["--ro-bind", folder, folder]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/tmp", "/box", "/dev/shm"):
            words += ["--size", disk, "--tmpfs", folder]
        for path, fd in files.items():
            words += ["--file", str(fd), f"/box/{path}"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/"]
        words += ["--chdir", "/box", "--setenv", "HOME", "/box", "--setenv", "PATH", "/usr/bin"]
        words += ["--setenv", "LANG", "C.UTF-8", "--", *limit_words(self._prlimit, limits)]
        return [*words, *command]

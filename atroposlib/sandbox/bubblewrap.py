"""The default sandbox: Linux namespaces through bubblewrap, limits set before the program runs.

A program (a "box") has its own pid, network, mount, user, ipc and host name namespaces, /usr
read-only, the writable folders /box, /tmp and /dev/shm, and a filter of system calls. As root, each
program runs as a separate user. Boxes are set up in advance, while earlier programs run.

A box waits at a gate until its limits are set from outside:

    bwrap sets up the box ──► reports its process ──► waits for a byte ──► runs the program

bwrap itself holds the writing end of the pipe open while the box exists, so without the byte the
program never starts, whichever process ends first. A box that is waiting when this process is
killed remains until the next `Bubblewrap` is created.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from atroposlib.sandbox.interface import (
    SandboxError,
    SandboxLimits,
    SandboxResult,
    as_bytes,
    checked_path,
    content_fd,
)
from atroposlib.sandbox.limits import (
    FOLDERS,
    NOBODY,
    ControlGroups,
    Membership,
    ProcessBounds,
    find_program,
    kill_first,
    limit_process,
    limit_words,
    may_limit_others,
    next_user,
    require_bound,
)
from atroposlib.sandbox.streams import Finished, OutputCallback, result_of, run_bounded
from atroposlib.sandbox.system_calls import call_filter, has_filter
from atroposlib.utils.aio import LoopSemaphore

logger = logging.getLogger(__name__)

__all__ = ["KERNEL_FOLDERS", "Box", "BoxRun", "Bubblewrap"]

SET_UP_S = 60.0
READ_BYTES = 65_536
WORDS = (b"--block-fd", b"--sync-fd", b"--disable-userns")
"""Arguments that distinguish boxes of this page from those of other users of bubblewrap."""


class Gate:
    """The report of bubblewrap, and the byte it waits for; created by `new_gate`."""

    def __init__(
        self,
        report_fd: int,
        *,
        held: contextlib.ExitStack,
        until_started: contextlib.ExitStack,
        fds: tuple[int, int, int],
    ) -> None:
        self._report_fd = report_fd
        self._held = held
        self._until_started = until_started
        self._reported = b""
        self._box: int | None = None
        self.fds = fds
        """Inherited by bubblewrap: of the report, of the byte's reading and of its writing end."""

    @property
    def words(self) -> list[str]:
        report, reading, writing = map(str, self.fds)
        return ["--json-status-fd", report, "--block-fd", reading, "--sync-fd", writing]

    async def wait_for_box(self) -> int | None:
        """Wait until bubblewrap, already started, reports the box; return the id of its process.

        Returns:
            The id; None if bubblewrap ended instead.

        Raises:
            SandboxError: there is no report within a minute.
        """
        self._until_started.close()  # otherwise the report would never end
        loop = asyncio.get_running_loop()
        reported: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._report_fd, self._read, reported)
        try:
            await asyncio.wait_for(reported, SET_UP_S)
        except asyncio.TimeoutError as error:
            raise SandboxError(f"bubblewrap set up no sandbox within {SET_UP_S:g} s") from error
        finally:
            loop.remove_reader(self._report_fd)
        pid = self._find("child-pid")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._box = os.pidfd_open(pid)
                self._held.callback(os.close, self._box)
        return pid if self._box is not None else None

    def open(self) -> None:
        os.write(self.fds[2], b"!")

    def kill_box(self) -> None:
        """End all processes of the box; a waiting one would outlive bubblewrap."""
        if self._box is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._box, signal.SIGKILL)

    async def wait_for_end(self) -> None:
        """Wait until the processes of the box have ended, after `kill_box`."""
        if self._box is None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        # Its own descriptor: if the caller is cancelled, `_box` is closed during this wait, and
        # its number may belong to the output of another process.
        box = os.dup(self._box)
        loop.add_reader(box, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), SET_UP_S)
        except asyncio.TimeoutError:
            logger.warning("the processes of a sandbox do not end")
        finally:
            loop.remove_reader(box)
            os.close(box)

    def exit_code(self) -> int | None:
        """Return the program's exit code after bubblewrap has ended; None if there is none."""
        while piece := os.read(self._report_fd, READ_BYTES):
            self._reported += piece
        return self._find("exit-code")

    def _read(self, reported: asyncio.Future[None]) -> None:
        piece = os.read(self._report_fd, READ_BYTES)
        self._reported += piece
        if (b"\n" in piece or not piece) and not reported.done():
            reported.set_result(None)

    def _find(self, key: str) -> int | None:
        for line in self._reported.splitlines():
            fields = json.loads(line)
            if key in fields:
                return int(fields[key])
        return None


@contextlib.contextmanager
def new_gate() -> Iterator[Gate]:
    """Create a gate; exit the context only after bubblewrap has ended."""
    with contextlib.ExitStack() as held:
        report, report_end = os.pipe()
        held.callback(os.close, report)
        until_started = held.enter_context(contextlib.ExitStack())
        until_started.callback(os.close, report_end)
        reading, writing = os.pipe()
        held.callback(os.close, reading)
        held.callback(os.close, writing)
        fds = (report_end, reading, writing)
        yield Gate(report, held=held, until_started=until_started, fds=fds)


def end_abandoned() -> None:
    """End the boxes that wait at a gate whose owner has ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError):
            if (folder / "comm").read_text() == "bwrap\n" and _is_abandoned(folder):
                os.kill(int(folder.name), signal.SIGKILL)


def _is_abandoned(folder: Path) -> bool:
    """Whether a process is the first one of a box whose parent, bubblewrap, has ended."""
    rows = dict(row.split(":\t", 1) for row in (folder / "status").read_text().splitlines())
    is_first = rows["NSpid"].split()[-1] == "1"
    words = (folder / "cmdline").read_bytes().split(b"\0")
    if not is_first or not all(word in words for word in WORDS):
        return False
    return Path("/proc", rows["PPid"], "comm").read_text() != "bwrap\n"


NOT_FOUND = 127  # exit code of a shell for a missing program
BOXES_PER_SLOT = 3  # the setup mostly waits for the kernel
KEYS = "/proc/keys"  # lists the keys of the user of this process


KERNEL_FOLDERS = ("--proc", "/proc", "--dev", "/dev")


@dataclass(frozen=True)
class Box:
    """The folders that a program sees, and the user it runs as."""

    mounts: Sequence[str]
    """Arguments of bubblewrap for its root folder, with `KERNEL_FOLDERS`."""
    cwd: str
    env: Mapping[str, str]
    fds: Sequence[int] = ()
    """File descriptors that `enter` and `mounts` refer to."""
    enter: Sequence[str] = ()
    """Command prefix that enters other namespaces before bubblewrap creates its own."""
    user: int | None = None
    """User of the machine as which root runs it; None takes one that no other program has."""
    shown_user: int = NOBODY
    """The user id that programs see."""
    hostname: str = "sandbox"
    mark: str = ""
    """Word in the command line of bubblewrap, by which its processes can be found."""
    written: Sequence[str] = FOLDERS
    """Writable folders in memory, relative to its root folder."""
    of_process: ProcessBounds = field(default_factory=ProcessBounds)


@dataclass(frozen=True)
class BoxRun:
    """A program of a box that has ended."""

    finished: Finished
    exit_code: int | None
    """None if the program was stopped or never ran."""
    ran_out_of_memory: bool


class Bubblewrap:
    """Runs programs with `bwrap`.

    Args:
        limits: default limits of `run`.
        read_only: further folders of the machine that the program may read.
        max_parallel: number of concurrent programs; None for one per usable processor.
        allow_unbounded_memory: whether programs also run if nothing bounds their memory.
        groups: control groups; None for those of this machine.

    Raises:
        SandboxUnavailableError: a required program is missing, or nothing bounds memory here.
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
        self._slots = LoopSemaphore(slots)
        self._boxes = LoopSemaphore(BOXES_PER_SLOT * slots)
        self._groups = groups or ControlGroups()
        self._bwrap = find_program("bwrap", package="bubblewrap")
        self._prlimit: str | None = None  # only if needed: it costs time per program
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
        stdin: str | bytes | int = b"",
        limits: SandboxLimits | None = None,
        on_output: OutputCallback | None = None,
    ) -> SandboxResult:
        """Run a command as `Sandbox.run` does.

        Args:
            command: program and arguments.
            files: contents of files in its folder, by relative path.
            stdin: standard input; a number is the descriptor of a pipe from which it is read.
            limits: limits; None takes the defaults of the sandbox.
            on_output: called with each piece of output; must not raise.

        Raises:
            SandboxError: the sandbox could not be set up.
            ValueError: a path of `files` is outside the folder.
        """
        limits = limits or self._limits
        with contextlib.ExitStack() as held:
            fds = {
                checked_path(path): held.enter_context(content_fd(content))
                for path, content in (files or {}).items()
            }
            run = await self.run_in(
                self._own_box(fds, limits),
                command,
                stdin=stdin if isinstance(stdin, int) else as_bytes(stdin),
                limits=limits,
                on_output=on_output,
            )
            return result_of(
                run.finished,
                exit_code=run.exit_code,
                ran_out_of_memory=run.ran_out_of_memory,
                around=self.name,
            )

    async def run_in(
        self,
        box: Box,
        command: Sequence[str],
        *,
        stdin: bytes | int,
        limits: SandboxLimits,
        on_output: OutputCallback | None = None,
    ) -> BoxRun:
        """Run a command in a box with folders, user and variables of its own choice.

        Raises:
            SandboxError: the box could not be set up.
        """
        groups = self._groups.join(limits, written=tuple(box.written))
        async with self._boxes.of_loop(), groups as members:
            with contextlib.ExitStack() as held:
                gate = held.enter_context(new_gate())
                inherited = [*box.fds, *gate.fds]
                filters = []
                if self._has_filter:
                    calls = call_filter(is_memory_counted=members.is_memory_counted)
                    filters.append(held.enter_context(content_fd(calls)))
                variables = held.enter_context(content_fd(_variables(box.env)))
                of_process = box.of_process
                if members.is_memory_counted and of_process.memory == "data":
                    of_process = replace(of_process, memory=None)
                words = [*box.enter, *self._words(box, [*filters], variables, gate), "--"]
                if self._prlimit is not None:
                    words += limit_words(self._prlimit, limits, of_process=of_process)
                try:
                    finished = await run_bounded(
                        [*words, *command],
                        stdin=stdin,
                        limits=limits,
                        pass_fds=[*inherited, *filters, variables],
                        turn=self._turn(gate, limits, members, of_process),
                        on_output=on_output,
                    )
                except OSError as error:
                    raise SandboxError(f"{words[0]} cannot be started: {error}") from error
                return BoxRun(
                    finished,
                    exit_code=None if finished.stopped_for else _exit_code(finished, gate),
                    ran_out_of_memory=members.ran_out_of_memory,
                )

    @contextlib.asynccontextmanager
    async def _turn(
        self,
        gate: Gate,
        limits: SandboxLimits,
        members: Membership,
        of_process: ProcessBounds,
    ) -> AsyncIterator[None]:
        pid = await gate.wait_for_box()
        # In a thread: the kernel may take milliseconds to move a process into a control group.
        if pid is None or not await asyncio.to_thread(
            self._bound, pid, limits, members, of_process
        ):
            yield  # bwrap writes the reason to standard error
            return
        try:
            async with self._slots.of_loop():
                gate.open()
                watch = asyncio.create_task(members.watch(pid, gate.kill_box))
                try:
                    yield
                finally:
                    watch.cancel()
        finally:
            gate.kill_box()
            await asyncio.shield(gate.wait_for_end())

    def _bound(
        self, pid: int, limits: SandboxLimits, members: Membership, of_process: ProcessBounds
    ) -> bool:
        """Bound a process and its descendants; return False if it has already ended."""
        kill_first(pid)
        return members.add(pid) and (
            self._prlimit is not None or limit_process(pid, limits, of_process)
        )

    def _own_box(self, files: Mapping[str, int], limits: SandboxLimits) -> Box:
        """Return a box with /usr of the machine and an empty folder for the files of a program."""
        words = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        words += [*KERNEL_FOLDERS]
        for folder in ("/tmp", "/box", "/dev/shm"):
            words += ["--size", str(limits.disk_bytes), "--tmpfs", folder]
        for folder in self._read_only:  # may be in /tmp
            words += ["--ro-bind", folder, folder]
        for path, fd in files.items():
            words += ["--file", str(fd), f"/box/{path}"]
        words += ["--remount-ro", "/"]
        env = {"HOME": "/box", "PATH": "/usr/bin", "LANG": "C.UTF-8"}
        return Box(mounts=words, cwd="/box", env=env, fds=list(files.values()))

    def _words(self, box: Box, filters: Sequence[int], variables: int, gate: Gate) -> Iterator[str]:
        if self._chroot is not None:
            user = next_user() if box.user is None else box.user
            # chroot to / changes the user only
            yield from (self._chroot, f"--userspec=+{user}:+{user}", "--groups=", "/")
        yield from (self._bwrap, *gate.words)
        if self._chroot is not None or box.shown_user != NOBODY:
            yield from ("--uid", str(box.shown_user), "--gid", str(box.shown_user))
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
        yield from ("--die-with-parent", "--new-session", "--hostname", box.hostname, "--clearenv")
        if box.mark:
            yield from ("--unsetenv", box.mark)
        yield from box.mounts
        for path in self._masked:
            yield from ("--ro-bind", "/dev/null", path)
        for path in ("/proc", "/dev"):  # /proc includes settings of its own namespaces
            yield from ("--remount-ro", path)
        yield from ("--chdir", box.cwd, "--args", str(variables))
        for fd in filters:
            yield from ("--seccomp", str(fd))


def _variables(env: Mapping[str, str]) -> bytes:
    """Return variables as arguments in a file: command lines are visible to other users."""
    words = [word for name, value in env.items() for word in ("--setenv", name, value)]
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _exit_code(finished: Finished, gate: Gate) -> int | None:
    """Return the program's exit code; None if the box could not be set up."""
    code = gate.exit_code()
    if code is None and finished.stderr.startswith(b"bwrap: execvp "):
        return NOT_FOUND
    return code

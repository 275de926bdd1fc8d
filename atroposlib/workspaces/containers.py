"""Workspaces in containers of podman or docker, on this machine or over SSH.

    prepare   Dockerfile ─► build ─► image          (or an image of a registry)
    fork      image ─► run: a container with a keeper      (from the warm ones, if there is one)
    run       exec: limits, variables, relay of the network ─► command ─► keeper ends all others

The keeper is the first process of the container, a shell. It ends when its standard input does, and
with it all processes and files of the container: also when this process was killed. The image needs
`sh`, `tar`, `dd` and `stat`, and `python3` for commands with a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import posixpath
import re
import secrets
import shlex
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from atroposlib.sandbox.interface import Ending, SandboxError, SandboxLimits
from atroposlib.sandbox.streams import ending_of, run_bounded
from atroposlib.workspaces.container_engine import (
    ChangeKind,
    Keeper,
    WorkspaceEngine,
    message_of,
    new_name,
)
from atroposlib.workspaces.container_saving import Unpacked, packed_changes, unpacked
from atroposlib.workspaces.interface import (
    MAX_SAVED_BYTES,
    NO_NETWORK,
    Base,
    CommandResult,
    FileChange,
    Network,
    Output,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    Workspaces,
    WorkspaceSpec,
)
from atroposlib.workspaces.network import NetworkGate
from atroposlib.workspaces.transfer import (
    MAX_FILES,
    OutputRecord,
    extract,
    regular_files,
    tar_of,
    unified_diff,
)

__all__ = ["ContainerWorkspaces"]

logger = logging.getLogger(__name__)

MEMBER_BYTES = 2048
"""Bytes of one file in an archive, in addition to its content."""
MAX_CHANGES = 1000
MAX_ALL_DIFFS = 4 * 2**20
MAX_WORDS_BYTES = 100_000
UNCHANGED = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", "/run/.containerenv")
OWN_FOLDERS = ("/run/atropos", "/proc", "/sys", "/dev")
HIDDEN = ".atropos-hidden"

COMMAND = """
ulimit -c 0; ulimit -S -t "$1"; ulimit -H -t "$2"; ulimit -f "$3"
eval "$(dd bs=1 count="$4" 2>/dev/null)"
cd "$5" || exit 126
printf %s "$6" >&2
shift 6
exec "$@"
"""
EXISTING = (
    'for path do shift; if [ -e "$path" ] || [ -L "$path" ]; then set -- "$@" "$path"; fi; done'
)
COLLECT = f'cd /; {EXISTING}; [ $# -gt 0 ] || exit 0; exec tar -cf - "$@"'
STATE = f"cd /; {EXISTING}; [ $# -gt 0 ] || exit 0; exec stat -c '%f %s %n' \"$@\""
ATTACH = f"""
for path do
  if [ -e "$path" ] || [ -L "$path" ]; then mv "$path" "$path{HIDDEN}" || exit; fi
done
exec tar -x -o -p -f - -C /
"""
DETACH = f"""
for path do
  rm -rf -- "$path"
  if [ -e "$path{HIDDEN}" ] || [ -L "$path{HIDDEN}" ]; then mv "$path{HIDDEN}" "$path"; fi
done
"""
REMOVE = 'cd /; exec rm -rf -- "$@"'
MAKE_WAY_FOR_FILES = """
cd /
for path do
  if [ -d "$path" ] && [ ! -L "$path" ]; then rm -rf -- "$path" || exit; fi
done
"""
MAKE_WAY_FOR_FOLDERS = """
cd /
for path do
  if [ -L "$path" ] || { [ -e "$path" ] && [ ! -d "$path" ]; }; then rm -f -- "$path" || exit; fi
done
"""
EXTRACT = "exec tar -x -o -p -f - -C /"
STDOUT, STDERR = 1, 2
HIGHEST_EXIT_CODE = 255
SOME_MISSING = 2
"""Highest exit code of `tar` and `stat` if some files could not be read."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ContainerWorkspaces(Workspaces):
    """Workspaces of a container engine.

    Args:
        engine: runs the containers.
        warm: number of workspaces per base that are made in advance.
        max_warm: number of these in total.
    """

    def __init__(
        self,
        engine: WorkspaceEngine,
        *,
        warm: int = 1,
        max_warm: int = 16,
    ) -> None:
        self.name = engine.kind
        self.engine = engine
        self._warm = warm
        self._max_warm = max_warm
        self._bases: set[ContainerBase] = set()
        self._num_forking = 0
        self._preparing = asyncio.Lock()
        self._is_open = False

    async def prepare(self, spec: WorkspaceSpec) -> Base:
        async with self._preparing:
            if not self._is_open:
                await self.engine.open()
                self._is_open = True
            image = await self.engine.image_for(spec)
        settings = await self.engine.workdir_of(image)
        workdir = settings if settings not in ("", "/") else spec.workdir
        base = ContainerBase(self, spec, image, workdir)
        self._bases.add(base)
        return base

    async def close(self) -> None:
        for base in list(self._bases):
            await base.close()
        await self.engine.close()

    def forget(self, base: ContainerBase) -> None:
        self._bases.discard(base)

    @property
    def needs_room(self) -> bool:
        """Whether forks may wait for the end of other workspaces."""
        return self._num_forking > 0 and self.engine.is_full

    @contextlib.asynccontextmanager
    async def making_room(self) -> AsyncIterator[None]:
        """Close a workspace made in advance, of any base, if a fork would wait for its end."""
        self._num_forking += 1
        try:
            warm = next((base for base in self._bases if base.num_warm), None)
            if self.needs_room and warm is not None:
                await warm.close_one_warm()
            yield
        finally:
            self._num_forking -= 1

    def num_warm_for(self, base: ContainerBase) -> int:
        """Return the number of workspaces that a base may make in advance now."""
        others = sum(other.num_warm for other in self._bases if other is not base)
        return min(self._warm, self._max_warm - others)


class ContainerBase(Base):
    """An image, and workspaces of it that were made in advance."""

    def __init__(
        self, owner: ContainerWorkspaces, spec: WorkspaceSpec, image: str, workdir: str
    ) -> None:
        self.spec = spec
        self.engine = owner.engine
        self._owner = owner
        self._image = image
        self._workdir = workdir
        self._warm: list[ContainerWorkspace] = []
        self._open: set[ContainerWorkspace] = set()
        self._refill: asyncio.Task[None] | None = None
        self._unchanged: ContainerWorkspace | None = None
        self._comparing = asyncio.Lock()
        self._is_closed = False

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    async def fork(self) -> Workspace:
        if self._is_closed:
            raise WorkspaceError(f"the base of {self.spec.name} is closed")
        while self._warm:
            workspace = self._warm.pop()
            if workspace.is_running:
                break
            await workspace.close()
        else:
            async with self._owner.making_room():
                workspace = await self._new()
        if self._is_closed:  # while the container started
            await workspace.close()
            raise WorkspaceError(f"the base of {self.spec.name} is closed")
        self._open.add(workspace)
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())
        return workspace

    async def close(self) -> None:
        self._is_closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait({self._refill})
        unchanged = [] if self._unchanged is None else [self._unchanged]
        opened = [*self._warm, *self._open, *unchanged]
        self._warm.clear()
        self._owner.forget(self)
        await asyncio.gather(*(workspace.close() for workspace in opened))

    def forget(self, workspace: ContainerWorkspace) -> None:
        self._open.discard(workspace)

    async def unchanged(self) -> ContainerWorkspace:
        """Return a workspace in which no command has run, for comparisons."""
        async with self._comparing:
            if self._unchanged is None or not self._unchanged.is_running:
                # Not counted: all that are counted may be waiting for this one.
                self._unchanged = await self._new(is_counted=False)
            return self._unchanged

    async def _fill(self) -> None:
        """Make workspaces in advance; a failure is reported by the next fork."""
        try:
            while len(self._warm) < self._owner.num_warm_for(self) and not self.engine.is_full:
                self._warm.append(await self._new())
                if self._owner.needs_room:
                    await self.close_one_warm()
        except WorkspaceError as error:
            logger.warning("no workspace of %s in advance: %s", self.spec.name, error)

    async def close_one_warm(self) -> bool:
        """Close a workspace made in advance; return False if there is none."""
        if not self._warm:
            return False
        await self._warm.pop().close()
        return True

    async def _new(self, *, is_counted: bool = True) -> ContainerWorkspace:
        workspace = ContainerWorkspace(self, self._image, self._workdir)
        try:
            await workspace.start(is_counted=is_counted)
        except BaseException:
            await asyncio.shield(workspace.close())
            raise
        return workspace


class ContainerWorkspace(Workspace):
    """A container, and the commands that run in it."""

    def __init__(self, base: ContainerBase, image: str, workdir: str) -> None:
        self.workdir = workdir
        self._base = base
        self._engine = base.engine
        self._spec = base.spec
        self._image = image
        self.name = new_name()
        self._keeper: Keeper | None = None
        self._is_removed = False
        self._num_runs = 0
        self._revision = 0
        self._lock = asyncio.Lock()

    @property
    def is_running(self) -> bool:
        return self._keeper is not None and self._keeper.is_running

    async def start(self, *, is_counted: bool) -> None:
        """Start the container.

        Args:
            is_counted: whether it waits while the engine is full.

        Raises:
            WorkspaceError: it does not start.
        """
        self._keeper = await self._engine.start(
            self.name, self._image, self._spec, self.workdir, is_counted=is_counted
        )

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        network: Network = NO_NETWORK,
        read_only: Mapping[str, Path] | None = None,
        writable: Mapping[str, Path] | None = None,
        limits: SandboxLimits | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> CommandResult:
        limits = limits or self._spec.limits
        if not command or any("\0" in word for word in command):
            raise WorkspaceError(f"expected a program and its arguments, got {list(command)!r}")
        async with (
            self._lock,
            self._attached(read_only or {}, writable or {}, limits),
            self._network(network) as opened,
        ):
            self._revision += 1
            script = _script({**self._spec.env, **opened.env, **(env or {})})
            record = OutputRecord(on_output)
            marked = MarkedOutput(record, limits.output_bytes, notice=self._engine.exit_notice)
            arguments = [*_limit_words(limits), str(len(script)), cwd or self.workdir]
            arguments += [marked.mark, *opened.words(command)]
            words = self._engine.exec_words(
                self.name, ["sh", "-c", COMMAND, "sh", *arguments], forwards=opened.forwards
            )
            finished = await self._run(words, script + stdin, limits, marked, command[0])
        ended_by, exit_code, duration_s = finished
        return CommandResult(exit_code, ended_by, record.output(), duration_s)

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        async with self._lock:
            return await self._collect(paths, max_bytes)

    async def put(self, archive: bytes) -> None:
        checked = await asyncio.to_thread(regular_files, archive, strict=True)
        async with self._lock:
            self._revision += 1
            await self._tool('exec tar -x -o -p -f - -C "$1"', ["/"], stdin=checked)

    async def changes(self, *, max_diff_bytes: int = 100_000) -> list[FileChange]:
        async with self._lock:
            listed = _shown(await self._engine.changed(self.name, self._unchanged_name))
            kept = [path for path, kind in listed.items() if kind != "removed"]
            states = await self._states(kept[: 10 * MAX_CHANGES])
            small = [path for path, state in states.items() if state.is_small(max_diff_bytes)]
            new = await self._contents(small)
        modified = [path for path in small if listed[path] == "modified"]
        old = await (await self._base.unchanged()).contents(modified) if modified else {}
        return await asyncio.to_thread(_changes, listed, states, old, new)

    @property
    def revision(self) -> int:
        return self._revision

    async def save(self, *, max_bytes: int = MAX_SAVED_BYTES) -> bytes:
        async with self._lock:
            listed = _shown(await self._engine.changed(self.name, self._unchanged_name))
            removed = [path for path, kind in listed.items() if kind == "removed"]
            states = await self._states([path for path in listed if listed[path] != "removed"])
            files = [path for path, state in states.items() if state.is_saved]
            if sum(states[path].size for path in files) > max_bytes:
                raise WorkspaceContentError(
                    f"the changed files of {self._spec.name} exceed max_bytes, {max_bytes} bytes"
                )
            raw = await self._archives(files, max_bytes)
        modes = {path: state.mode for path, state in states.items()}
        return await asyncio.to_thread(
            packed_changes, self._image, removed, modes, raw, max_bytes=max_bytes
        )

    async def load(self, archive: bytes, *, max_bytes: int = MAX_SAVED_BYTES) -> None:
        found = await asyncio.to_thread(unpacked, archive, self._image, max_bytes=max_bytes)
        async with self._lock:
            if self._revision:
                await self._reset(found)
            self._revision += 1
            await self._for_all(REMOVE, found.removed)
            await self._for_all(MAKE_WAY_FOR_FILES, found.files)
            await self._for_all(MAKE_WAY_FOR_FOLDERS, found.folders)
            await self._tool(EXTRACT, [], stdin=found.archive)

    async def _reset(self, saved: Unpacked) -> None:
        """Make what differs from the image and is not in an archive as in the image."""
        removed, kept = set(saved.removed), {*saved.files, *saved.folders}
        listed = _shown(await self._engine.changed(self.name, self._unchanged_name))
        added = [path for path, kind in listed.items() if kind == "added" and path not in kept]
        await self._for_all(REMOVE, added)
        modified = [path for path, kind in listed.items() if kind == "modified"]
        unchanged, now = await self._base.unchanged(), await self._states(modified)
        before = await unchanged._states([path for path in listed if listed[path] != "added"])
        folders, files = [], []
        by_mode: dict[int, list[str]] = {}
        for path, state in before.items():
            if path in removed:
                continue
            if state.is_folder:  # with what is in it, of which the archive has the changes only
                if path not in now or not now[path].is_folder:
                    folders.append(path)
                elif path not in kept:
                    by_mode.setdefault(stat.S_IMODE(state.mode), []).append(path)
            elif state.is_saved and path not in kept:
                files.append(path)
        await self._for_all(MAKE_WAY_FOR_FILES, files)
        await self._for_all(MAKE_WAY_FOR_FOLDERS, folders)
        for raw in await unchanged._archives([*folders, *files], MAX_SAVED_BYTES):
            if raw:
                await self._tool(EXTRACT, [], stdin=raw)
        for mode, paths in by_mode.items():
            await self._for_all(f'cd /; exec chmod {mode:o} "$@"', paths)

    async def _for_all(self, script: str, paths: Sequence[str]) -> None:
        for batch in _batches(paths):
            await self._tool(script, batch)

    async def _archives(self, paths: Sequence[str], max_bytes: int) -> list[bytes]:
        """Return tar archives of files, with all that is in folders."""
        raw = []
        left = max_bytes + MAX_FILES * MEMBER_BYTES
        for batch in _batches(paths):
            raw.append(await self._tool(COLLECT, batch, max_bytes=left, may_fail=True))
            left -= len(raw[-1])
        return raw

    async def _unchanged_name(self) -> str:
        return (await self._base.unchanged()).name

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of regular files, by path; those that do not exist are left out."""
        async with self._lock:
            return await self._contents(paths)

    async def close(self) -> None:
        self._base.forget(self)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()
        if not self._is_removed:
            self._is_removed = True
            await self._engine.remove(self.name)

    @contextlib.asynccontextmanager
    async def _network(self, network: Network) -> AsyncIterator[Opened]:
        """Serve the network of one command."""
        if self._keeper is None:
            raise WorkspaceError(f"the workspace of {self._spec.name} is closed")
        self._num_runs += 1
        if not NetworkGate(network).is_open:
            yield Opened(list, {}, [])
            return
        python = self._keeper.python
        if not python:
            raise WorkspaceError(
                f"the image of {self._spec.name} has no python3, which commands with a network "
                "need: add it to the Dockerfile"
            )
        async with self._engine.carried(self.name, network, self._num_runs) as (gate, forwards):
            yield Opened(lambda words: gate.words(words, python=python), gate.env, forwards)

    async def _run(
        self,
        words: Sequence[str],
        stdin: bytes,
        limits: SandboxLimits,
        marked: MarkedOutput,
        program: str,
    ) -> tuple[Ending, int | None, float]:
        assert self._keeper is not None
        keeper = self._keeper
        kills = keeper.num_memory_kills
        bounded = replace(limits, output_bytes=limits.output_bytes + marked.num_added)
        try:
            finished = await run_bounded(
                words,
                stdin=stdin,
                limits=bounded,
                env=self._engine.env(),
                kill=keeper.end_processes,
                on_output=marked.add,
            )
            is_noticed = marked.finish(finished.returncode, finished.duration_s)
            if finished.stopped_for is None:
                await keeper.end_processes()
            if finished.stopped_for is None and finished.returncode < 0:
                # Of the program of the engine: exit codes of commands are not negative.
                raise WorkspaceError(
                    f"{words[0]}, which ran {program}, was ended by signal {-finished.returncode}"
                )
            if not marked.is_started:
                raise WorkspaceError(f"{program} could not be started: {message_of(finished)}")
            if finished.stopped_for is None and not is_noticed:
                reason = message_of(finished).splitlines()[-1]
                raise WorkspaceError(f"{words[0]} lost the connection to {program}: {reason}")
            ended_by, exit_code = ending_of(
                finished,
                exit_code=finished.returncode,
                ran_out_of_memory=keeper.num_memory_kills > kills,
                around=self._engine.kind,
            )
        except (OSError, SandboxError) as error:
            raise WorkspaceError(f"{program} could not be started: {error}") from error
        return ended_by, exit_code, finished.duration_s

    @contextlib.asynccontextmanager
    async def _attached(
        self,
        read_only: Mapping[str, Path],
        writable: Mapping[str, Path],
        limits: SandboxLimits,
    ) -> AsyncIterator[None]:
        """Copy folders into the container, and remove them at the end; writable ones also back."""
        paths = [*read_only, *writable]
        if not paths:
            yield
            return
        for path in paths:
            if posixpath.normpath(path) != path or not path.startswith("/") or path == "/":
                raise WorkspaceError(f"expected an absolute path for a mount, got {path!r}")
        sources = {path: source.resolve() for path, source in read_only.items()}
        try:
            with contextlib.ExitStack() as held:
                archive = await asyncio.to_thread(
                    held.enter_context, tar_of({**sources, **dict.fromkeys(writable)})
                )
                await self._tool(ATTACH, paths, stdin=archive, user="0")
            for path, folder in writable.items():
                with tar_of({path: folder}) as archive:
                    await self._tool("exec tar -x -o -f - -C /", [], stdin=archive)
            yield
            for path, folder in writable.items():
                files = await self._collect([path], limits.disk_bytes)
                await asyncio.to_thread(extract, files, path, folder)
        finally:
            if self.is_running:
                await asyncio.shield(self._tool(DETACH, paths, user="0"))

    async def _collect(self, paths: Sequence[str], max_bytes: int) -> bytes:
        raw = await self._archives(paths, max_bytes)
        return await asyncio.to_thread(regular_files, *raw, max_bytes=max_bytes)

    async def _contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        if not paths:
            return {}
        archive = await self._collect(paths, 64 * MAX_ALL_DIFFS)
        found = {}
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
            for member in members:
                content = members.extractfile(member)
                if content is not None:
                    found[f"/{member.name}"] = content.read()
        return found

    async def _states(self, paths: Sequence[str]) -> dict[str, State]:
        """Return mode and size of files, by path."""
        found = {}
        for batch in _batches(paths):
            text = await self._tool(STATE, batch, may_fail=True)
            for line in text.decode("utf-8", "surrogateescape").splitlines():
                words = re.fullmatch(r"([0-9a-f]+) ([0-9]+) \.(/.*)", line)
                if words is not None:
                    found[words[3]] = State(int(words[1], 16), int(words[2]))
        return found

    async def _tool(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        stdin: bytes | int = b"",
        max_bytes: int = 8 * 2**20,
        user: str | None = None,
        may_fail: bool = False,
    ) -> bytes:
        """Run a script of this page in the container, and return its output."""
        if self._keeper is None:
            raise WorkspaceError(f"the workspace of {self._spec.name} is closed")
        words = ["sh", "-c", script, "sh", *arguments]
        finished = await self._engine.run(
            self._engine.exec_words(self.name, words, user=user),
            stdin=stdin,
            max_bytes=max_bytes,
            timeout_s=300,
        )
        if finished.stopped_for is not None:
            raise WorkspaceContentError(
                f"the files of a workspace of {self._spec.name} exceed {max_bytes} bytes"
            )
        is_done = finished.returncode == 0 or (may_fail and finished.returncode <= SOME_MISSING)
        if not is_done:
            raise WorkspaceContentError(
                f"the files of a workspace of {self._spec.name} cannot be read or written: "
                f"{message_of(finished)}"
            )
        return finished.stdout


class Opened(NamedTuple):
    """The network of one command."""

    words: Callable[[Sequence[str]], list[str]]
    env: Mapping[str, str]
    forwards: list[tuple[str, str]]


class State(NamedTuple):
    """Mode and size of a file."""

    mode: int
    size: int

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_saved(self) -> bool:
        """Whether it is a file or a symbolic link."""
        return stat.S_ISREG(self.mode) or stat.S_ISLNK(self.mode)

    def is_small(self, max_bytes: int) -> bool:
        return stat.S_ISREG(self.mode) and self.size <= max_bytes


class MarkedOutput:
    """The output of a command, which starts after a mark in standard error.

    `notice`: what the engine's program appends to standard error after an exit code that is not 0;
    it is left out, therefore bytes of its length are delayed.
    """

    def __init__(self, record: OutputRecord, max_bytes: int, *, notice: str = "") -> None:
        self.mark = f"<{secrets.token_hex(16)}>"
        self.num_added = len(self.mark) + len(notice.format(HIGHEST_EXIT_CODE))
        """Bytes of standard error that are not of the command."""
        self._left = {STDOUT: max_bytes, STDERR: max_bytes}
        self.is_started = False
        self._before = b""
        self._record = record
        self._notice = notice
        self._num_held = len(notice.format(HIGHEST_EXIT_CODE))
        self._held = b""

    def finish(self, exit_code: int, time_s: float) -> bool:
        """Add what was held back, without the notice of this exit code.

        Returns:
            False if there is no notice although this exit code should have one.
        """
        held, self._held, self._num_held = self._held, b"", 0
        notice = self._notice.format(exit_code).encode() if exit_code != 0 else b""
        is_noticed = held.endswith(notice)
        self.add(STDERR, held.removesuffix(notice), time_s)
        return is_noticed

    def add(self, fd: int, data: bytes, time_s: float) -> None:
        if fd == STDERR and not self.is_started:
            self._before += data
            _, found, data = self._before.partition(self.mark.encode())
            self.is_started = bool(found)
        if fd == STDERR and self._num_held:
            data = self._held + data
            data, self._held = data[: -self._num_held], data[-self._num_held :]
        data = data[: self._left[fd]]
        self._left[fd] -= len(data)
        if data:
            self._record.add(fd, data, time_s)


def _script(env: Mapping[str, str]) -> bytes:
    """Return the shell commands that set variables."""
    for name, value in env.items():
        if VARIABLE.fullmatch(name) is None or "\0" in value:
            raise WorkspaceError(f"expected a name and a value of a variable, got {name!r}")
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in env.items()]
    return "".join(lines).encode("utf-8", "surrogateescape")


def _limit_words(limits: SandboxLimits) -> list[str]:
    return [str(limits.cpu_s), str(limits.cpu_s + 1), str(-(-limits.disk_bytes // 512))]


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield paths relative to the root folder, as arguments of one command each."""
    batch: list[str] = []
    size = 0
    for path in paths:
        if path.strip("/") == "" or "\0" in path:
            raise WorkspaceContentError(
                f"{path!r} cannot be collected; expected absolute paths below /"
            )
        batch.append("./" + path.strip("/"))
        size += len(os.fsencode(path)) + 3
        if size > MAX_WORDS_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _shown(changed: Mapping[str, ChangeKind]) -> dict[str, ChangeKind]:
    """Return the changes without those of the engine itself."""
    return {
        path: kind
        for path, kind in changed.items()
        if path not in UNCHANGED
        and path != "/run"
        and not any(path == each or path.startswith(f"{each}/") for each in OWN_FOLDERS)
    }


def _changes(
    listed: Mapping[str, ChangeKind],
    states: Mapping[str, State],
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
) -> list[FileChange]:
    found: list[FileChange] = []
    left = MAX_ALL_DIFFS
    parents = {posixpath.dirname(path) for path in listed}
    for path, kind in sorted(listed.items()):
        if len(found) == MAX_CHANGES:
            break
        if kind == "removed":
            found.append(FileChange(path, kind, 0, None))
            continue
        state = states.get(path)
        if state is None:
            continue
        if stat.S_ISDIR(state.mode):
            if kind == "added" and path not in parents:
                found.append(FileChange(f"{path}/", kind, 0, None))
            continue
        before, after = old.get(path), new.get(path)
        if kind == "modified" and before is not None and before == after:
            continue
        diff = None
        if after is not None and (kind == "added" or before is not None):
            diff = unified_diff(path, before, after)
        if diff is not None:
            left -= len(diff)
        found.append(FileChange(path, kind, state.size, diff if left >= 0 else None))
    return found

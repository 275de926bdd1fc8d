"""The interface of workspaces: a state that is prepared once and forked for each rollout.

    WorkspaceSpec ─► prepare ─► Base ─► fork ─► Workspace ─► run, put, collect, changes ─► close
                     once a task          once a rollout

A workspace is a root folder `/` of its own: programs see the system below /usr and the files of the
base, and write to a layer that ends with the workspace. `fork` takes milliseconds, since nothing is
copied. If this process is killed, no file, mount or process of a workspace is left.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.errors import AtroposError
from atroposlib.sandbox import SandboxLimits

__all__ = [
    "NO_NETWORK",
    "Base",
    "CommandResult",
    "FileChange",
    "LazyWorkspace",
    "Network",
    "Output",
    "Workspace",
    "WorkspaceContentError",
    "WorkspaceError",
    "WorkspaceSpec",
    "Workspaces",
]


MAX_SAVED_BYTES = 2**28
"""Default bound of the files of a saved workspace."""


class WorkspaceError(AtroposError, RuntimeError):
    """A workspace could not be prepared, forked or read; the message has the reason."""


class WorkspaceContentError(WorkspaceError):
    """The files of a workspace exceed a limit or cannot be read or written as requested.

    The programs that ran in the workspace are the cause, not the machine.
    """


@dataclass(frozen=True)
class Network:
    """The addresses that programs of a workspace reach.

    There is no route out of a workspace. `allowlist` and `public` are reached through a forward
    proxy, named by HTTP_PROXY and HTTPS_PROXY, that refuses private and loopback addresses.
    """

    mode: Literal["none", "allowlist", "public"] = "none"
    allowed_hosts: tuple[str, ...] = ()
    """Host names, `*.name`, IP addresses or CIDR ranges; for `allowlist`."""
    forwards: Mapping[int, str] = field(default_factory=dict)
    """Ports on 127.0.0.1 of the workspace, each with the `host:port` it leads to: how an agent
    reaches the model."""


NO_NETWORK = Network()


@dataclass(frozen=True)
class WorkspaceSpec:
    """The preparation of a state.

    `source` is a build context with a Dockerfile, or without one a folder whose files are copied to
    `workdir`.
    """

    name: str
    source: Path | None = None
    image: str | None = None
    """Image of a registry or of this machine, in place of a Dockerfile."""
    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Limits of each command; `disk_bytes` is that of the layer of a workspace."""
    build_network: Network = NO_NETWORK
    build_timeout_s: float = 600.0


class Output(NamedTuple):
    """A piece of output, as it arrives."""

    time_s: float
    """Seconds since the start of the command."""
    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class CommandResult:
    """The end of one command."""

    exit_code: int | None
    """Exit code, 128 + n after signal n; None if a limit ended the command."""
    ended_by: Literal["exit", "wall_time", "cpu_time", "memory", "output", "signal"]
    output: tuple[Output, ...]
    """Up to `output_bytes` per stream, in the order of arrival."""
    duration_s: float

    @property
    def is_success(self) -> bool:
        return self.ended_by == "exit" and self.exit_code == 0

    @property
    def text(self) -> str:
        """Output of both streams, as text."""
        return b"".join(piece.data for piece in self.output).decode("utf-8", "replace")


class FileChange(NamedTuple):
    """A difference between a workspace and its base."""

    path: str
    """Absolute path in the workspace, with a final `/` for a folder that is empty, or was removed.
    Bytes that are not UTF-8 are surrogate escapes, as of `os.fsdecode`."""
    kind: Literal["added", "modified", "removed"]
    size: int
    """Bytes of the new content; 0 if removed."""
    diff: str | None
    """Unified diff; None for binary or large files."""


class Workspace(ABC):
    """One fork of a base; commands run in it one after the other, each in a box of its own."""

    workdir: str

    @abstractmethod
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
        """Run a command until it ends; all of its processes end with it. Cancelling kills it.

        Args:
            command: program and arguments, looked up on PATH of the workspace.
            env: variables in addition to those of the base; nothing else of this process.
            cwd: absolute path; None means `workdir`.
            stdin: standard input.
            network: what the command reaches.
            read_only: folders and files of this machine, by the path at which they appear. They are
                visible to this command only.
            writable: folders of this machine that the command may write to. Their regular files and
                folders are copied back at the end, within the limit of disk.
            limits: None takes those of the spec.
            on_output: called with each piece of output.

        Raises:
            WorkspaceError: the command could not be started.
        """

    @abstractmethod
    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """Return files and folders as a tar archive of regular files and folders only.

        Links, devices, sockets and setuid bits are left out; a path that does not exist is left
        out. The archive has paths relative to `/`.

        Raises:
            WorkspaceContentError: the files exceed `max_bytes`, or 100,000 in number.
        """

    @abstractmethod
    async def put(self, archive: bytes) -> None:
        """Extract a tar archive with paths relative to `/` into the workspace.

        Raises:
            WorkspaceContentError: the archive has links, devices, or paths outside the workspace;
                or the files do not fit into it.
        """

    @abstractmethod
    async def changes(self, *, max_diff_bytes: int = 100_000) -> list[FileChange]:
        """Return what differs from the base, by path; up to 1,000 entries."""

    @abstractmethod
    async def close(self) -> None:
        """End all processes and remove all files of the workspace; safe to call twice."""

    @property
    def revision(self) -> int:
        """Increased by all that may change a file; 0 for a workspace in which nothing was done."""
        return 0

    async def save(self, *, max_bytes: int = MAX_SAVED_BYTES) -> bytes:
        """Return an archive of all that differs from the base, for `load`.

        It has the content, permissions and times of files, links, and what was removed. Devices,
        sockets, setuid bits, owners and the times of folders are left out; hard links become
        files. In containers, times are whole seconds. Equal workspaces give equal archives.

        Raises:
            WorkspaceContentError: the files exceed `max_bytes`, or 100,000 in number.
            WorkspaceError: workspaces of this kind cannot be saved.
        """
        raise WorkspaceError(NOT_SAVED)

    async def load(self, archive: bytes, *, max_bytes: int = MAX_SAVED_BYTES) -> None:
        """Make the files those of an archive of `save`, of a workspace of the same base.

        The archive is checked as untrusted content, since programs of the workspace wrote its
        files. After an error, the workspace is to be closed: it may have some of the files.

        Raises:
            WorkspaceContentError: it is of another base, is damaged, has other kinds of files or
                paths outside the workspace, or exceeds a limit.
            WorkspaceError: workspaces of this kind cannot be saved.
        """
        raise WorkspaceError(NOT_SAVED)


NOT_SAVED = "workspaces of this kind cannot be saved; expected one that overrides save and load"


class Base(ABC):
    """A prepared state."""

    spec: WorkspaceSpec

    @abstractmethod
    async def fork(self) -> Workspace:
        """Return a new workspace with the files of the base; one of the warm ones if there is."""

    @abstractmethod
    async def close(self) -> None:
        """Close its warm workspaces, and remove its files unless the cache keeps them."""


class LazyWorkspace(Workspace):
    """A workspace that is forked when it is first used.

    A conversation, which is created without awaiting, has it from the start.

    Args:
        fork: `Base.fork`, or a function that also writes the files of an item.

    Attributes:
        workdir: that of the workspace; empty until the first use.
    """

    def __init__(self, fork: Callable[[], Awaitable[Workspace]]) -> None:
        self.workdir = ""
        self._fork = fork
        self._forked: Workspace | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def revision(self) -> int:
        return 0 if self._forked is None else self._forked.revision

    async def run(self, command: Sequence[str], **options: Any) -> CommandResult:
        return await (await self._opened()).run(command, **options)

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        return await (await self._opened()).collect(paths, max_bytes=max_bytes)

    async def put(self, archive: bytes) -> None:
        await (await self._opened()).put(archive)

    async def changes(self, *, max_diff_bytes: int = 100_000) -> list[FileChange]:
        return await (await self._opened()).changes(max_diff_bytes=max_diff_bytes)

    async def save(self, *, max_bytes: int = MAX_SAVED_BYTES) -> bytes:
        return await (await self._opened()).save(max_bytes=max_bytes)

    async def load(self, archive: bytes, *, max_bytes: int = MAX_SAVED_BYTES) -> None:
        await (await self._opened()).load(archive, max_bytes=max_bytes)

    async def close(self) -> None:
        self._is_closed = True
        async with self._lock:
            if self._forked is not None:
                await self._forked.close()

    async def _opened(self) -> Workspace:
        async with self._lock:
            if self._is_closed:
                raise WorkspaceError("the workspace is closed")
            if self._forked is None:
                self._forked = await self._fork()
                self.workdir = self._forked.workdir
            return self._forked


class Workspaces(ABC):
    """A kind of workspace on this or another machine."""

    name: str

    @abstractmethod
    async def prepare(self, spec: WorkspaceSpec) -> Base:
        """Build a state, or take it from the cache; the same spec is built once.

        Raises:
            WorkspaceError: the build failed; the message has the line and the end of its output.
            ConfigError: this kind of workspace cannot build the spec.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all bases and workspaces; safe to call twice."""

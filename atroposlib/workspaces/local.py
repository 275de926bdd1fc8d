"""Workspaces on this machine: overlays in memory, and programs in boxes of bubblewrap.

    prepare   source ─► layer on an empty root folder ─► steps ─► copied to the cache
    fork      base ─► layer                                  (from the warm ones, if there is one)
    run       nsenter the layer ─► another user ─► bwrap ─► gate ─► relay of the network ─► command

All programs of a base run as one user, which owns its files and appears as user 1000, "agent".
Files are read and written by programs of `box_tools`, in a box as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from atroposlib.errors import ConfigError
from atroposlib.sandbox.bubblewrap import KERNEL_FOLDERS, Box, Bubblewrap
from atroposlib.sandbox.interface import (
    PYTHON,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
)
from atroposlib.sandbox.limits import ProcessBounds, user_of
from atroposlib.sandbox.streams import ending_of
from atroposlib.workspaces.cache import BaseCache, CachedBase, remove_tree
from atroposlib.workspaces.dockerfile import BuildPlan, CopyStep, read_plan
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
from atroposlib.workspaces.overlay import BASE, MERGED, NETWORK, UPPER, Kind, Layer, Mounts
from atroposlib.workspaces.transfer import MAX_FILES, MEMBER_BYTES, OutputRecord, extract

__all__ = ["LocalWorkspaces"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

FORMAT = 2
"""Changed when the same source is prepared differently."""
AGENT = 1000
HOME = "/home/agent"
PATH = f"{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {
    "PATH": PATH,
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    # there is no other place: /usr is read-only
    "PIP_USER": "1",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
}
FOLDERS = (
    *("usr", "proc", "dev", "etc", "home/agent", "root", "run", "tmp", "var/tmp", "var/log"),
    *("mnt", "media", "opt", "srv", "logs"),
)
FROM_MACHINE = ("etc/alternatives", "etc/ssl/certs", "etc/ssl/openssl.cnf", "etc/ld.so.cache")
"""Settings of programs below /usr; copied, since a workspace may change its own."""
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"  # pragma: allowlist secret
    f"agent:x:{AGENT}:{AGENT}::{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nagent:x:{AGENT}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost workspace\n",
    "etc/hostname": "workspace\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/resolv.conf": "",
}
EMPTY_SIZE = (2**25, 10_000)
"""Bound of bytes and number of files of an empty root folder."""
OF_PROCESS = ProcessBounds(memory="data", max_files=4096)
TOOL_LIMITS = SandboxLimits(wall_s=300.0, cpu_s=300, memory_bytes=2**30, max_processes=4)
TOOLS = Path(__file__).with_name("box_tools.py").read_text(encoding="utf-8")
WRITING_TOOLS = ("put", "put-links", "load")
MAX_CHANGES_BYTES = 64 * 2**20
MAX_MESSAGE_CHARACTERS = 2000
MEMORY_WAIT_S = 120.0
MEMORY_PAUSE_S = 0.2
MEMORY_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use of the control group of a container, versions 2 and 1."""


class LocalWorkspaces(Workspaces):
    """Workspaces of the kind `bubblewrap`.

    Args:
        cache: folder of prepared bases.
        cache_bytes: size above which bases that are not in use are removed.
        warm: number of workspaces per base that are made in advance.
        max_warm: number of these in total.
        max_parallel: number of concurrent commands.
        check_every: number of forks after which the files of a base are compared with those that
            were built.
        kind: whether the files of a base are copied or overlaid; "any" copies only where overlays
            are refused.
        reserve_bytes: memory of this machine below which no workspace is handed out; None for a
            tenth, up to 1 GiB.
        memory_wait_s: time that a fork waits for that memory.

    Raises:
        WorkspaceError: bubblewrap or another required program is missing.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        cache: Path,
        cache_bytes: int = 20 * 2**30,
        warm: int = 2,
        max_warm: int = 64,
        max_parallel: int = 256,
        check_every: int = 32,
        kind: Kind = "any",
        reserve_bytes: int | None = None,
        memory_wait_s: float = MEMORY_WAIT_S,
    ) -> None:
        try:
            self.boxes = Bubblewrap(max_parallel=max_parallel)
            self.mounts = Mounts(kind=kind)
        except SandboxUnavailableError as error:
            raise WorkspaceError(str(error)) from error
        if not Path(PYTHON[0]).exists():
            raise WorkspaceError(f"{PYTHON[0]} is missing; on Debian: apt-get install python3")
        self.cache = BaseCache(cache, max_bytes=cache_bytes)
        self.check_every = check_every
        self._warm = warm
        self._max_warm = max_warm
        total = memory_of_machine().total
        self._reserve_bytes = min(total // 10, 2**30) if reserve_bytes is None else reserve_bytes
        self._memory_wait_s = memory_wait_s
        self._bases: set[LocalBase] = set()

    async def prepare(self, spec: WorkspaceSpec) -> Base:
        if spec.image is not None:
            raise ConfigError(
                f"{spec.name}: workspaces of the kind bubblewrap have no images, but the image "
                f"{spec.image!r} is set; expected a Dockerfile or a folder, or the kind podman"
            )
        plan = await asyncio.to_thread(read_plan, spec, variables=ENV)
        base = LocalBase(self, spec, plan)
        await base.open()
        self._bases.add(base)
        return base

    async def close(self) -> None:
        changed = None
        for base in list(self._bases):
            try:
                await base.close()
            except WorkspaceError as error:
                changed = error
        self.mounts.close()
        if changed is not None:
            raise changed

    async def wait_for_memory(self, name: str) -> None:
        """Wait until the machine has memory left for a workspace, whose files are in memory.

        Raises:
            WorkspaceError: it has none within the time.
        """
        deadline = time.monotonic() + self._memory_wait_s
        while (available := memory_of_machine().available) < self._reserve_bytes:
            if time.monotonic() >= deadline:
                raise WorkspaceError(
                    f"no memory for a workspace of {name}: {available >> 20} MiB are available, "
                    f"expected {self._reserve_bytes >> 20} MiB; run fewer workspaces at a time, or "
                    "with smaller limits of disk and memory"
                )
            await asyncio.sleep(MEMORY_PAUSE_S)

    def forget(self, base: LocalBase) -> None:
        self._bases.discard(base)

    def num_warm_for(self, base: LocalBase) -> int:
        """Return the number of workspaces that a base may make in advance now."""
        others = sum(other.num_warm for other in self._bases if other is not base)
        return min(self._warm, self._max_warm - others)


class LocalBase(Base):
    """A base in the cache, and workspaces of it that were made in advance."""

    def __init__(self, owner: LocalWorkspaces, spec: WorkspaceSpec, plan: BuildPlan) -> None:
        self.spec = spec
        self._owner = owner
        self._plan = plan
        is_root = os.geteuid() == 0
        self._key = _key(plan, spec, is_root)
        self.user = user_of(int(self._key[:15], 16)) if is_root else None
        self._cached: CachedBase | None = None
        self._warm: list[LocalWorkspace] = []
        self._open: set[LocalWorkspace] = set()
        self._num_coming = 0
        self._refill: asyncio.Task[None] | None = None
        self._until_check = 0
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def num_warm(self) -> int:
        """Number of workspaces made in advance, and being made."""
        return len(self._warm) + self._num_coming

    async def open(self) -> CachedBase:
        """Take the base from the cache, or build it."""
        if self._cached is None:
            self._cached = await self._owner.cache.get(self._key, self._build)
            self._until_check = self._owner.check_every
        return self._cached

    async def fork(self) -> Workspace:
        self._require_open()
        await self._owner.wait_for_memory(self.spec.name)
        async with self._lock:
            self._require_open()  # it may have been closed during the wait
            try:
                workspace = await self._take()
            finally:
                if self._is_closed:
                    self._release()
            if self._is_closed:
                await workspace.close()
                self._require_open()
        self._open.add(workspace)
        self._start_refill()
        return workspace

    async def close(self) -> None:
        self._is_closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait({self._refill})
        for workspace in [*self._warm, *self._open]:
            await workspace.close()
        self._warm.clear()
        self._owner.forget(self)
        if self._cached is not None:
            try:
                await self._check()
            finally:
                self._release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise WorkspaceError(f"the base of {self.spec.name} is closed")

    async def _take(self) -> LocalWorkspace:
        """Return a workspace made in advance, or a new one."""
        await self.open()
        self._until_check -= 1
        if self._until_check < 0:
            await self._check()
        return self._warm.pop() if self._warm else await self._new()

    def _release(self) -> None:
        if self._cached is not None:
            self._cached.release()
            self._cached = None

    def forget(self, workspace: LocalWorkspace) -> None:
        self._open.discard(workspace)

    async def _check(self) -> None:
        """Compare the files of the base with those that were built."""
        assert self._cached is not None
        changed = await asyncio.to_thread(self._cached.changed_file)
        self._until_check = self._owner.check_every
        if changed is not None:
            cached, self._cached = self._cached, None
            for workspace in self._warm:
                await workspace.close()
            self._warm.clear()
            await self._owner.cache.discard(cached)
            raise WorkspaceError(
                f"the base of {self.spec.name} was changed: {changed} in {cached.root}; it is "
                "built again by the next fork"
            )

    async def _new(self) -> LocalWorkspace:
        cached = await self.open()
        layer = await self._owner.mounts.fork(
            cached.root,
            user=self.user,
            disk_bytes=self.spec.limits.disk_bytes,
            base_size=cached.size,
        )
        env, workdir = cached.settings["env"], cached.settings["workdir"]
        return LocalWorkspace(
            self._owner, layer, self.spec, env, workdir, base_key=self._key, on_close=self.forget
        )

    def _start_refill(self) -> None:
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        """Make workspaces in advance; a failure is reported by the next fork."""
        try:
            while len(self._warm) < self._owner.num_warm_for(self):
                self._num_coming = 1
                async with self._lock:
                    if self._cached is None:
                        return
                    self._warm.append(await self._new())
                    self._num_coming = 0
        except WorkspaceError as error:
            logger.warning("no workspace of %s in advance: %s", self.spec.name, error)
        finally:
            self._num_coming = 0

    async def _build(self, root: Path) -> dict[str, Any]:
        """Write the files of the base to a folder: an empty root folder, then the plan."""
        empty = root.with_name("empty")
        await asyncio.to_thread(_write_empty_root, empty, self.user, self._plan.workdir)
        layer = await self._owner.mounts.fork(
            empty,
            user=self.user,
            disk_bytes=self.spec.limits.disk_bytes,
            base_size=EMPTY_SIZE,
        )
        env = {**ENV, **self._plan.env, **self.spec.env}
        workspace = LocalWorkspace(self._owner, layer, self.spec, ENV, self._plan.workdir)
        try:
            await asyncio.wait_for(self._apply(workspace), self.spec.build_timeout_s)
            await self._owner.mounts.export(layer, root)
        except asyncio.TimeoutError as error:
            raise WorkspaceError(
                f"the base of {self.spec.name} was not built within {self.spec.build_timeout_s:g} s"
            ) from error
        finally:
            await workspace.close()
        await asyncio.to_thread(remove_tree, empty)
        return {"name": self.spec.name, "env": env, "workdir": self._plan.workdir}

    async def _apply(self, workspace: LocalWorkspace) -> None:
        """Execute the steps of the plan."""
        for note in self._plan.notes:
            logger.info("%s", note)
        timeout_s = self.spec.build_timeout_s
        limits = replace(self.spec.limits, wall_s=timeout_s, cpu_s=math.ceil(timeout_s))
        for step in self._plan.steps:
            if isinstance(step, CopyStep):
                archive = await asyncio.to_thread(step.archive)
                await workspace.put(archive, has_links=True)
                continue
            result = await workspace.run(
                step.command,
                env=step.env,
                cwd=step.cwd,
                network=self.spec.build_network,
                limits=limits,
            )
            if not result.is_success:
                ending = f"exit code {result.exit_code}" if result.exit_code else result.ended_by
                raise WorkspaceError(
                    f"{step.where}: RUN ended with {ending}: "
                    f"{result.text[-MAX_MESSAGE_CHARACTERS:].strip() or 'no output'}"
                )


class LocalWorkspace(Workspace):
    """A layer, and the programs that run in it."""

    def __init__(
        self,
        owner: LocalWorkspaces,
        layer: Layer,
        spec: WorkspaceSpec,
        env: Mapping[str, str],
        workdir: str,
        *,
        base_key: str = "",
        on_close: Callable[[LocalWorkspace], None] | None = None,
    ) -> None:
        self.workdir = workdir
        self._base_key = base_key
        self._revision = 0
        self._owner = owner
        self._layer = layer
        self._spec = spec
        self._env = env
        self._on_close = on_close
        self._hidden: set[str] = set()
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def revision(self) -> int:
        return self._revision

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
        work = self._run(
            command,
            env=env or {},
            cwd=cwd or self.workdir,
            stdin=stdin,
            network=network,
            read_only=read_only or {},
            writable=writable or {},
            limits=limits,
            record=OutputRecord(on_output),
        )
        return await self._in_turn(work)

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        return await self._in_turn(self._collect(paths, max_bytes))

    async def put(self, archive: bytes, *, has_links: bool = False) -> None:
        """See `Workspace.put`.

        Args:
            archive: the archive.
            has_links: whether it may have symbolic links.
        """
        await self._in_turn(self._put(archive, has_links=has_links))

    async def changes(self, *, max_diff_bytes: int = 100_000) -> list[FileChange]:
        request = {"max_diff_bytes": max_diff_bytes, "hidden": sorted(self._hidden)}
        work = self._tool("changes", json.dumps(request).encode(), max_bytes=MAX_CHANGES_BYTES)
        return [_change(line) for line in (await self._in_turn(work)).splitlines()]

    async def save(self, *, max_bytes: int = MAX_SAVED_BYTES) -> bytes:
        request = {"max_bytes": max_bytes, "base": self._base_key, "hidden": sorted(self._hidden)}
        bound = max_bytes + MAX_FILES * MEMBER_BYTES
        work = self._tool("save", json.dumps(request).encode(), max_bytes=bound)
        return await self._in_turn(work)

    async def load(self, archive: bytes, *, max_bytes: int = MAX_SAVED_BYTES) -> None:
        request = {"max_bytes": max_bytes, "base": self._base_key}
        await self._in_turn(self._load(json.dumps(request).encode() + b"\n" + archive))

    async def _load(self, stdin: bytes) -> None:
        self._revision += 1
        await self._tool("load", stdin, max_bytes=65_536)

    async def close(self) -> None:
        self._is_closed = True
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._layer.close()
        if self._on_close is not None:
            self._on_close(self)

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        """Do one thing after the other; closing the workspace ends what is being done."""
        task = asyncio.create_task(self._turn(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise WorkspaceError(f"the workspace of {self._spec.name} is closed") from None
            raise
        finally:
            work.close()  # it may not have started

    async def _turn(self, work: Awaitable[T]) -> T:
        async with self._lock:
            if self._is_closed:
                raise WorkspaceError(f"the workspace of {self._spec.name} is closed")
            return await work

    async def _run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdin: bytes,
        network: Network,
        read_only: Mapping[str, Path],
        writable: Mapping[str, Path],
        limits: SandboxLimits,
        record: OutputRecord,
    ) -> CommandResult:
        self._revision += 1
        self._layer.clear_network()
        async with NetworkGate(network, folder=self._layer.network_folder) as gate:
            variables = {**self._env, **gate.env, **env}
            _check_command(command, variables)
            for inside, folder in writable.items():
                await self._put(await asyncio.to_thread(_archive_of, folder, inside))
            sockets = dict.fromkeys(gate.mounts, Path(NETWORK))
            mounts = await self._bind({**read_only, **sockets})
            box = self._box(mounts, variables, cwd, limits)
            words = gate.words(command)
            try:
                run = await self._owner.boxes.run_in(
                    box, words, stdin=stdin, limits=limits, on_output=record.add
                )
                ended_by, exit_code = ending_of(
                    run.finished,
                    exit_code=run.exit_code,
                    ran_out_of_memory=run.ran_out_of_memory,
                    around="bubblewrap",
                )
            except SandboxError as error:
                raise WorkspaceError(f"{command[0]} could not be started: {error}") from error
        for inside, folder in writable.items():
            archive = await self._collect([inside], limits.disk_bytes)
            await asyncio.to_thread(extract, archive, inside, folder)
        return CommandResult(exit_code, ended_by, record.output(), run.finished.duration_s)

    def _box(
        self, binds: Sequence[str], env: Mapping[str, str], cwd: str, limits: SandboxLimits
    ) -> Box:
        words = ["--bind", MERGED, "/", "--ro-bind", "/usr", "/usr", *KERNEL_FOLDERS]
        words += ["--size", str(limits.disk_bytes), "--tmpfs", "/dev/shm", *binds]
        return Box(
            mounts=words,
            cwd=cwd,
            env=env,
            enter=self._layer.enter,
            user=self._layer.user,
            shown_user=AGENT,
            hostname="workspace",
            mark=self._owner.mounts.mark,
            written=("", "dev/shm"),
            of_process=OF_PROCESS,
        )

    async def _bind(self, read_only: Mapping[str, Path]) -> list[str]:
        """Mount files and folders in the layer; return the arguments that show them in a box."""
        if not read_only:
            return []
        inside = [posixpath.normpath(path) for path in read_only]
        for path in inside:
            if not path.startswith("/") or path == "/":
                raise WorkspaceError(f"expected an absolute path for a mount, got {path!r}")
        sources = [str(self._readable(source)) for source in read_only.values()]
        places = await self._owner.mounts.attach(
            self._layer, list(zip(sources, inside, strict=True))
        )
        self._hidden.update(inside)
        pairs = zip(places, inside, strict=True)
        return [word for place, path in pairs for word in ("--ro-bind", place, path)]

    def _readable(self, source: Path) -> Path:
        """Return the real path of a mount, which root's programs must be able to read."""
        if source == Path(NETWORK):
            return source
        try:
            real = source.resolve(strict=True)
            mode = real.stat().st_mode
        except OSError as error:
            raise WorkspaceError(f"cannot mount {source}: {error}") from error
        needed = 0o005 if stat.S_ISDIR(mode) else 0o004
        if self._layer.user is not None and mode & needed != needed:
            raise WorkspaceError(
                f"cannot mount {source}: programs in workspaces of root run as another user, who "
                f"cannot read it; run `chmod -R o+rX {source}`"
            )
        return real

    async def _collect(self, paths: Sequence[str], max_bytes: int) -> bytes:
        request = {"paths": list(paths), "max_bytes": max_bytes}
        bound = max_bytes + MAX_FILES * MEMBER_BYTES
        return await self._tool("collect", json.dumps(request).encode(), max_bytes=bound)

    async def _put(self, archive: bytes, *, has_links: bool = False) -> None:
        self._revision += 1
        await self._tool("put-links" if has_links else "put", archive, max_bytes=65_536)

    async def _tool(self, action: str, stdin: bytes, *, max_bytes: int) -> bytes:
        """Run a program of `box_tools` in a box, and return its output."""
        words = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        words += ["--bind", MERGED, "/merged", "--ro-bind", BASE, "/base"]
        words += ["--ro-bind", MERGED if self._layer.kind == "copy" else UPPER, "/upper"]
        words += [*KERNEL_FOLDERS, "--remount-ro", "/"]
        box = Box(
            mounts=words,
            cwd="/",
            env={"LANG": "C.UTF-8"},
            enter=self._layer.enter,
            user=self._layer.user,
            mark=self._owner.mounts.mark,
            written=("merged",),
        )
        disk = self._spec.limits.disk_bytes
        limits = replace(TOOL_LIMITS, output_bytes=max_bytes, disk_bytes=disk)
        command = [*PYTHON, "-S", "-c", TOOLS, action]
        try:
            run = await self._owner.boxes.run_in(box, command, stdin=stdin, limits=limits)
            ended_by, exit_code = ending_of(
                run.finished,
                exit_code=run.exit_code,
                ran_out_of_memory=run.ran_out_of_memory,
                around="bubblewrap",
            )
        except SandboxError as error:
            raise WorkspaceError(f"the files of a workspace are not accessible: {error}") from error
        if (ended_by, exit_code) == ("exit", 0):
            return run.finished.stdout
        reason = run.finished.stderr[-MAX_MESSAGE_CHARACTERS:].decode("utf-8", "replace").strip()
        raise WorkspaceContentError(
            f"the files of a workspace of {self._spec.name} cannot be "
            f"{'written' if action in WRITING_TOOLS else 'read'}: {reason or ended_by}"
        )


class MachineMemory(NamedTuple):
    """Memory in bytes."""

    total: int
    available: int


def memory_of_machine(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> MachineMemory:
    """Return the memory of this machine, or of the container that this process is in."""
    rows = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    for limit_name, use_name in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            limit = int((groups / limit_name).read_text())
            used = int((groups / use_name).read_text())
            if limit < total:
                statistics = (groups / use_name).with_name("memory.stat").read_text()
                cached = max(map(int, re.findall(r"inactive_file (\d+)", statistics)), default=0)
                left = limit - used + cached
                total, available = limit, min(available, left)
    return MachineMemory(total, available)


def _check_command(command: Sequence[str], env: Mapping[str, str]) -> None:
    if not command or any("\0" in word for word in command):
        raise WorkspaceError(f"expected a program and its arguments, got {list(command)!r}")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise WorkspaceError(f"expected a name and a value of a variable, got {name!r}")


def _change(line: bytes) -> FileChange:
    path, kind, size, diff = json.loads(line)
    return FileChange(path, kind, size, diff)


def _archive_of(folder: Path, inside: str) -> bytes:
    """Return the regular files and folders of a folder of this machine."""
    files: dict[str, Path | bytes | None] = {inside: None}
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            files[posixpath.join(inside, path.relative_to(folder).as_posix())] = path
    return CopyStep(inside, files).archive()


def _key(plan: BuildPlan, spec: WorkspaceSpec, is_root: bool) -> str:
    """Return the name of a base in the cache: a digest of all that determines its content."""
    parts = [FORMAT, is_root, os.geteuid(), FILES, ENV, plan.fingerprint, dict(spec.env)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _write_empty_root(root: Path, user: int | None, workdir: str) -> None:
    """Write a root folder with the settings that programs below /usr need."""
    root.mkdir(mode=0o755)
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in FROM_MACHINE:
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if Path("/", name).is_dir():
                shutil.copytree(Path("/", name), place, symlinks=True)
            else:
                shutil.copyfile(Path("/", name), place)
    for name, text in FILES.items():
        (root / name).write_text(text)
    if not Path("/usr/bin/python").exists():  # as on Debian; images for Python have it
        own_programs = root / HOME.lstrip("/") / ".local/bin"
        own_programs.mkdir(parents=True)
        (own_programs / "python").symlink_to(PYTHON[0])
    if user is not None:
        for folder, folders, files in os.walk(root):
            for name in (".", *folders, *files):
                os.chown(Path(folder, name), user, user, follow_symlinks=False)

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
import io
import json
import logging
import os
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.sandbox.bubblewrap import KERNEL_FOLDERS, Box, BoxRun, Bubblewrap
from atroposlib.sandbox.interface import (
    PYTHON,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
)
from atroposlib.sandbox.limits import ProcessBounds, user_of
from atroposlib.sandbox.streams import ending_of
from atroposlib.workspaces.cache import BaseCache, CachedBase
from atroposlib.workspaces.interface import (
    NO_NETWORK,
    Base,
    CommandResult,
    FileChange,
    Network,
    Output,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    WorkspaceSpec,
    Workspaces,
)
from atroposlib.workspaces.overlay import BASE, MERGED, UPPER, Kind, Layer, Mounts
from atroposlib.workspaces.recipe import Recipe, read_recipe

__all__ = ["LocalWorkspaces"]

logger = logging.getLogger(__name__)

FORMAT = 1
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
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
    f"agent:x:{AGENT}:{AGENT}::{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nagent:x:{AGENT}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost workspace\n",
    "etc/hostname": "workspace\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/resolv.conf": "",
}
OF_PROCESS = ProcessBounds(memory="data", max_files=4096)
TOOL_LIMITS = SandboxLimits(wall_s=300.0, cpu_s=300, memory_bytes=2**30, max_processes=4)
TOOLS = str(Path(__file__).with_name("box_tools.py"))
TOOLS_INSIDE = "/box_tools.py"
REFUSED = 3
MAX_FILES = 100_000
MEMBER_BYTES = 16_384
"""Bound of the headers of one file in an archive."""
MERGE_S = 0.05
"""Pieces of output of one stream within this time become one."""
CHECK_EVERY = 32
MAX_MESSAGE_CHARACTERS = 2000


class LocalWorkspaces(Workspaces):
    """Workspaces of the kind `bubblewrap`.

    Args:
        cache: folder of prepared bases.
        cache_bytes: size above which bases that are not in use are removed.
        warm: number of workspaces per base that are made in advance.
        max_warm: number of these in total.
        max_parallel: number of concurrent commands.
        kind: whether the files of a base are copied or overlaid; "any" copies only where overlays
            are refused.

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
        kind: Kind = "any",
    ) -> None:
        try:
            self.boxes = Bubblewrap(max_parallel=max_parallel)
            self.mounts = Mounts(kind=kind)
        except SandboxUnavailableError as error:
            raise WorkspaceError(str(error)) from error
        if not Path(PYTHON[0]).exists():
            raise WorkspaceError(f"{PYTHON[0]} is missing; on Debian: apt-get install python3")
        self.cache = BaseCache(cache, max_bytes=cache_bytes)
        self._warm = warm
        self._max_warm = max_warm
        self._bases: set[LocalBase] = set()

    async def prepare(self, spec: WorkspaceSpec) -> Base:
        if spec.image is not None:
            raise ConfigError(
                f"{spec.name}: workspaces of the kind bubblewrap have no images, but the image "
                f"{spec.image!r} is set; expected a Dockerfile or a folder, or the kind podman"
            )
        recipe = await asyncio.to_thread(read_recipe, spec)
        base = LocalBase(self, spec, recipe)
        await base.open()
        self._bases.add(base)
        return base

    async def close(self) -> None:
        for base in list(self._bases):
            await base.close()
        self.mounts.close()

    def forget(self, base: LocalBase) -> None:
        self._bases.discard(base)

    def num_warm_for(self, base: LocalBase) -> int:
        """Return the number of workspaces that a base may make in advance now."""
        others = sum(other.num_warm for other in self._bases if other is not base)
        return min(self._warm, self._max_warm - others)


class LocalBase(Base):
    """A base in the cache, and workspaces of it that were made in advance."""

    def __init__(self, owner: LocalWorkspaces, spec: WorkspaceSpec, recipe: Recipe) -> None:
        self.spec = spec
        self._owner = owner
        self._recipe = recipe
        is_root = os.geteuid() == 0
        self._key = recipe.key(FORMAT, is_root, FILES, ENV)
        self.user = user_of(int(self._key[:15], 16)) if is_root else None
        self._cached: CachedBase | None = None
        self._warm: list[LocalWorkspace] = []
        self._open: set[LocalWorkspace] = set()
        self._refill: asyncio.Task[None] | None = None
        self._until_check = 0
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    async def open(self) -> CachedBase:
        """Take the base from the cache, or build it."""
        if self._cached is None:
            self._cached = await self._owner.cache.get(self._key, self._build)
            self._until_check = CHECK_EVERY
        return self._cached

    async def fork(self) -> Workspace:
        if self._is_closed:
            raise WorkspaceError(f"the base of {self.spec.name} is closed")
        async with self._lock:
            await self.open()
            self._until_check -= 1
            if self._until_check < 0:
                await self._check()
            workspace = self._warm.pop() if self._warm else await self._new()
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
                if self._cached is not None:
                    self._cached.release()
                    self._cached = None

    def forget(self, workspace: LocalWorkspace) -> None:
        self._open.discard(workspace)

    async def _check(self) -> None:
        """Compare the files of the base with those that were built."""
        assert self._cached is not None
        changed = await asyncio.to_thread(self._cached.changed_file)
        self._until_check = CHECK_EVERY
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
            cached.root, user=self.user, disk_bytes=self.spec.limits.disk_bytes
        )
        env, workdir = cached.settings["env"], cached.settings["workdir"]
        return LocalWorkspace(self._owner, layer, self.spec, env, workdir, on_close=self.forget)

    def _start_refill(self) -> None:
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        """Make workspaces in advance; a failure is reported by the next fork."""
        try:
            while len(self._warm) < self._owner.num_warm_for(self):
                async with self._lock:
                    if self._cached is None:
                        return
                    self._warm.append(await self._new())
        except WorkspaceError as error:
            logger.warning("no workspace of %s in advance: %s", self.spec.name, error)

    async def _build(self, root: Path) -> dict[str, Any]:
        """Write the files of the base to a folder: an empty root folder, then the recipe."""
        empty = root.with_name("empty")
        await asyncio.to_thread(_write_empty_root, empty, self.user, self._recipe.workdir)
        layer = await self._owner.mounts.fork(
            empty, user=self.user, disk_bytes=self.spec.limits.disk_bytes
        )
        env = {**ENV, **self._recipe.env, **self.spec.env}
        spec = replace(self.spec, env={})
        workspace = LocalWorkspace(self._owner, layer, spec, ENV, self._recipe.workdir)
        try:
            await self._recipe.apply(workspace)
            await self._owner.mounts.export(layer, root)
        finally:
            await workspace.close()
        await asyncio.to_thread(_remove_empty_root, empty)
        return {"name": self.spec.name, "env": env, "workdir": self._recipe.workdir}


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
        on_close: Callable[[LocalWorkspace], None] | None = None,
    ) -> None:
        self.workdir = workdir
        self._owner = owner
        self._layer = layer
        self._spec = spec
        self._env = env
        self._on_close = on_close
        self._hidden: set[str] = set()
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

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
        async with self._turn(), open_network(network, self._layer.user) as (words, mounts, added):
            variables = {**self._env, **added, **(env or {})}
            _check_command(command, variables)
            for inside, folder in (writable or {}).items():
                await self._put(_archive_of(folder, inside))
            binds = await self._bind({**(read_only or {}), **mounts})
            box = self._box(binds, variables, cwd or self.workdir, limits)
            record = _Record(on_output)
            try:
                run = await self._owner.boxes.run_in(
                    box, words(command), stdin=stdin, limits=limits, on_output=record.add
                )
                result = _result_of(run, record)
            except SandboxError as error:
                raise WorkspaceError(f"{command[0]} could not be started: {error}") from error
            for inside, folder in (writable or {}).items():
                archive = await self._collect([inside], limits.disk_bytes)
                await asyncio.to_thread(_extract, archive, inside, folder)
            return result

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        async with self._turn():
            return await self._collect(paths, max_bytes)

    async def put(self, archive: bytes) -> None:
        async with self._turn():
            await self._put(archive)

    async def changes(self, *, max_diff_bytes: int = 100_000) -> list[FileChange]:
        async with self._turn():
            request = {"max_diff_bytes": max_diff_bytes, "hidden": sorted(self._hidden)}
            lines = await self._tool("changes", json.dumps(request).encode(), 64 * 2**20)
        return [_change(json.loads(line)) for line in lines.splitlines()]

    async def close(self) -> None:
        for task in self._running - {asyncio.current_task()}:
            task.cancel()
        async with self._lock:
            self._layer.close()
        if self._on_close is not None:
            self._on_close(self)

    @contextlib.asynccontextmanager
    async def _turn(self):  # type: ignore[no-untyped-def]
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with self._lock:
                if not self._layer.is_open:
                    raise WorkspaceError(f"the workspace of {self._spec.name} is closed")
                yield
        finally:
            self._running.discard(task)

"""Copies of a base in milliseconds: overlays in mount namespaces, made by `mount_server`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.sandbox.limits import find_program
from atroposlib.workspaces.interface import WorkspaceError

__all__ = ["BASE", "BINDS", "MERGED", "NETWORK", "UPPER", "Layer", "Mounts"]

BASE, UPPER, MERGED, BINDS, NETWORK = (
    f"/sys/{name}" for name in ("base", "upper", "merged", "binds", "network")
)
"""Folders within the namespace of a layer; see `mount_server`."""
MAX_REPLY_BYTES = 65_536
FILE_BYTES = 4096
"""Bytes of a layer per file that it may contain."""
MIN_FILES = 4096
REPLY_S = 600.0

Kind = Literal["overlay", "copy", "any"]


class Layer:
    """A namespace with a base and the changes on top of it; its files are in memory.

    They exist while this process has the namespace open, or a program runs in it.
    """

    def __init__(self, fds: list[int], *, user: int | None, kind: Kind, nsenter: str) -> None:
        self._network, *self.fds = fds
        self.user = user
        self.kind = kind
        self._nsenter = nsenter

    @property
    def enter(self) -> list[str]:
        """Command prefix that enters the layer.

        The programs inherit no descriptor of it: they would find it open.
        """
        words = [self._nsenter]
        for name, fd in zip(("mount", "user"), self.fds, strict=False):
            words.append(f"--{name}=/proc/{os.getpid()}/fd/{fd}")
        return [*words, *(["--preserve-credentials"] if len(self.fds) > 1 else []), "--"]

    @property
    def is_open(self) -> bool:
        return bool(self.fds)

    @property
    def network_folder(self) -> Path:
        """Folder that programs in the layer see as `NETWORK`, as this process can open it."""
        return Path(f"/proc/self/fd/{self._network}")

    def clear_network(self) -> None:
        for name in os.listdir(self._network):  # noqa: PTH208 - of a descriptor
            os.unlink(name, dir_fd=self._network)

    def close(self) -> None:
        if self.fds:
            os.close(self._network)
        while self.fds:
            os.close(self.fds.pop())


class Server(NamedTuple):
    """The running program, and the socket on which it receives requests."""

    process: subprocess.Popen[bytes]
    control: socket.socket


class Mounts:
    """Client of a `mount_server`, which is started by the first request and restarted if it ended.

    Args:
        kind: how layers are made; "any" copies the base if overlays are refused.
    """

    def __init__(self, *, kind: Kind = "any") -> None:
        self._kind = kind
        self.mark = f"ATROPOS_OWNER_{secrets.token_hex(8)}"
        """Word in the command line of every box; the server ends them if this process is killed."""
        self._nsenter = find_program("nsenter", package="util-linux")
        self._server: Server | None = None

    async def fork(
        self, base: Path, *, user: int | None, disk_bytes: int, base_size: tuple[int, int]
    ) -> Layer:
        """Return a new layer on top of a folder.

        Args:
            base: root folder of the base.
            user: user of its files; None if this process is not root.
            disk_bytes: limit of the changes.
            base_size: bytes and number of files of the base; for a copy.

        Raises:
            WorkspaceError: the kernel refuses it.
        """
        request = {
            "do": "fork",
            "base": str(base),
            "size": disk_bytes,
            "inodes": max(disk_bytes // FILE_BYTES, MIN_FILES),
            "base_size": base_size,
            "user": user,
            "kind": self._kind,
        }
        reply, fds = await self._ask(request)
        return Layer(fds, user=user, kind=reply["kind"], nsenter=self._nsenter)

    async def attach(self, layer: Layer, binds: Sequence[tuple[str, str]]) -> list[str]:
        """Mount files and folders of the machine; those of the earlier call are unmounted.

        Args:
            layer: a layer in which no program runs.
            binds: path on the machine and in the workspace, where its place is created.

        Returns:
            Their places within the namespace.
        """
        await self._ask({"do": "attach", "user": layer.user, "binds": binds}, layer.fds)
        return [f"{BINDS}/{number}" for number in range(len(binds))]

    async def export(self, layer: Layer, target: Path) -> None:
        """Copy the files of a layer, those of its base included, into an empty folder."""
        await self._ask({"do": "export", "target": str(target)}, layer.fds)

    def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            with contextlib.suppress(OSError):
                server.control.send(b"end")
            server.control.close()
            server.process.wait()

    async def _ask(
        self, request: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setblocking(False)
            with theirs:
                self._send(json.dumps(request).encode(), [theirs.fileno(), *fds])
            try:
                await asyncio.wait_for(_readable(ours), REPLY_S)
            except asyncio.TimeoutError as error:
                raise WorkspaceError(
                    f"mounts of a workspace took more than {REPLY_S:g} s"
                ) from error
            text, received, _, _ = socket.recv_fds(ours, MAX_REPLY_BYTES, 3)
        if not text:
            raise WorkspaceError("the program that makes the mounts of workspaces has ended")
        reply = json.loads(text)
        if "error" in reply:
            raise WorkspaceError(f"a workspace could not be set up: {reply['error']}")
        return reply, list(received)

    def _send(self, text: bytes, fds: Sequence[int]) -> None:
        for is_last in (False, True):
            server = self._server = self._server or _start(self.mark)
            try:
                socket.send_fds(server.control, [text], fds)
            except OSError as error:  # it ended, for example for lack of memory
                self.close()
                if is_last:
                    raise WorkspaceError(
                        f"the program that makes the mounts of workspaces has ended: {error}"
                    ) from error
            else:
                return


def _start(mark: str) -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = str(Path(__file__).with_name("mount_server.py"))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, mark, str(os.getpid())],
            stdin=theirs.fileno(),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )
    return Server(process, ours)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)

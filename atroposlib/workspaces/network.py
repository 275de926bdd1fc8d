"""The network of one command in a workspace: sockets that lead to chosen addresses only.

    program ─► 127.0.0.1:port ─► relay ─► Unix socket ─► NetworkGate ─► host:port of a forward
    (no route out of the box)              (mounted)          └──► forward proxy ─► allowed hosts

The box has a network namespace with a loopback device only. A folder with one Unix socket per port
is mounted read-only, and the relay (`relay.py`) opens the ports in the box. Connections, idle time
and bytes are bounded here, since a program may also use the sockets directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from atroposlib.errors import ConfigError
from atroposlib.workspaces import relay
from atroposlib.workspaces.forward_proxy import (
    HostRules,
    Refusal,
    Resolve,
    Target,
    dial,
    parse_request,
    parse_target,
    resolve,
)
from atroposlib.workspaces.interface import Network, WorkspaceError

__all__ = [
    "MOUNTED",
    "PYTHON_PROGRAM",
    "NetworkGate",
    "is_running",
    "new_folder",
    "process_name",
    "remove_abandoned",
]

logger = logging.getLogger(__name__)

MOUNTED = "/run/atropos/network"
"""Folder with the sockets, as the box sees it."""
PYTHON_PROGRAM = "/usr/bin/python3"
PROXY_PORT = 3128
LOWEST_PORT = 1024
MAX_FORWARDS = 32
MAX_CONNECTIONS = 256
MAX_BYTES = 64 * 2**30
PIECE_BYTES = 65_536
HEAD_BYTES = 32_768
HEAD_S = 30.0
IDLE_S = 1800.0
"""Time without a byte after which a connection ends; a model may take long to answer."""
REASONS = {400: "Bad Request", 403: "Forbidden", 431: "Request Header Fields Too Large"}
REASONS |= {502: "Bad Gateway", 504: "Gateway Timeout"}
PREFIX = "atropos-network-"

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Handler = Callable[[Reader, Writer], Coroutine[Any, Any, None]]


class NetworkGate:
    """Serves the network of one command, as an asynchronous context.

    The command is run as `gate.words(command)`, with the folders `gate.mounts` mounted read-only
    and the variables `gate.env`. Without forwards and with the mode `none`, all three add nothing.

    Args:
        network: what the command reaches.
        user: id of the user that mounts the folder, if it is not the user of this process.
        folder: empty folder for the sockets, which the caller mounts and removes; None creates one.
        mounted: path of the folder in the box.
        resolve: returns the addresses of a name.

    Raises:
        ConfigError: a forward or an allowed host is malformed.
    """

    def __init__(
        self,
        network: Network,
        *,
        user: int | None = None,
        folder: Path | None = None,
        mounted: str = MOUNTED,
        resolve: Resolve = resolve,
    ) -> None:
        self._forwards = _checked_forwards(network.forwards)
        self._rules: HostRules | None = None
        if network.mode == "allowlist":
            self._rules = HostRules.allowlist(network.allowed_hosts)
        elif network.mode == "public":
            self._rules = HostRules.public()
        self._proxy_port = next(
            port for port in range(PROXY_PORT, 65_536) if port not in self._forwards
        )
        self._user = user
        self._folder = folder
        self._mounted = mounted
        self._resolve = resolve
        self._held = contextlib.AsyncExitStack()
        self._connections: dict[asyncio.Task[None], float] = {}  # with the time of the last byte
        self._num_bytes = 0
        self._num_refused = 0

    @property
    def is_open(self) -> bool:
        """Whether the command reaches anything at all."""
        return bool(self._forwards) or self._rules is not None

    @property
    def ports(self) -> list[int]:
        """Ports in the box; the sockets in the folder have these names."""
        return [*self._forwards, *([self._proxy_port] if self._rules is not None else [])]

    @property
    def mounts(self) -> dict[str, Path]:
        """Folders to mount read-only, by path in the box."""
        return {self._mounted: self._folder} if self.is_open and self._folder is not None else {}

    @property
    def env(self) -> dict[str, str]:
        """Variables by which programs find the forward proxy."""
        if self._rules is None:
            return {}
        url = f"http://127.0.0.1:{self._proxy_port}"
        named = {"http_proxy": url, "https_proxy": url, "no_proxy": "127.0.0.1,localhost"}
        return {
            **named,
            **{name.upper(): value for name, value in named.items()},
            "NODE_USE_ENV_PROXY": "1",
        }

    def words(self, command: Sequence[str], *, python: str = PYTHON_PROGRAM) -> list[str]:
        """Return the command with the relay before it.

        Args:
            command: program and arguments.
            python: path of a Python interpreter, 3.8 or later, in the box.
        """
        if not self.is_open:
            return list(command)
        return [python, "-I", "-S", "-B", f"{self._mounted}/relay.py", self._mounted, *command]

    async def __aenter__(self) -> NetworkGate:
        if self.is_open:
            try:
                await self._start()
            except OSError as error:
                await self._held.aclose()
                raise WorkspaceError(f"the network cannot be set up: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()
        if self._num_refused:
            logger.info("%d connections of a workspace were refused", self._num_refused)
        logger.debug("the connections of a workspace carried %d bytes", self._num_bytes)

    async def _start(self) -> None:
        if self._folder is None:
            remove_abandoned()
            outer = new_folder(self._user)
            self._held.callback(shutil.rmtree, outer, ignore_errors=True)
            self._folder = outer / "sockets"
            self._folder.mkdir()
            self._folder.chmod(0o755)
        shutil.copyfile(relay.__file__, self._folder / "relay.py")
        (self._folder / "relay.py").chmod(0o644)
        self._held.push_async_callback(self._end_connections)
        for port, target in self._forwards.items():
            await self._listen(port, functools.partial(self._forward, target))
        if self._rules is not None:
            await self._listen(self._proxy_port, functools.partial(self._proxy, self._rules))
        watch = asyncio.create_task(self._end_idle())
        self._held.callback(watch.cancel)

    async def _listen(self, port: int, handler: Handler) -> None:
        assert self._folder is not None

        def connected(reader: Reader, writer: Writer) -> None:
            if len(self._connections) >= MAX_CONNECTIONS or self._num_bytes >= MAX_BYTES:
                self._num_refused += 1
                writer.transport.abort()
                return
            task = asyncio.create_task(self._serve(handler, reader, writer))
            self._connections[task] = time.monotonic()
            task.add_done_callback(self._connections.pop)

        # The path of a socket has up to 107 bytes, that of a folder may be longer.
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        self._held.callback(os.close, folder)
        path = f"/proc/self/fd/{folder}/{port}"
        server = await asyncio.start_unix_server(connected, path, limit=HEAD_BYTES)
        self._held.callback(server.close)
        os.chmod(path, 0o666)  # noqa: PTH101 - its user in the box is another one

    async def _serve(self, handler: Handler, reader: Reader, writer: Writer) -> None:
        try:
            await handler(reader, writer)
        except Refusal as refusal:
            self._num_refused += 1
            with contextlib.suppress(OSError):
                await _respond(writer, refusal.status, str(refusal))
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            logger.debug("a connection of a workspace ended: %r", error)
        except Exception:
            logger.exception("a connection of a workspace failed")
        finally:
            writer.transport.abort()

    async def _forward(self, target: Target, reader: Reader, writer: Writer) -> None:
        try:
            far = await asyncio.open_connection(target.host, target.port)
        except OSError as error:
            logger.warning("no connection to %s:%d for a workspace: %s", *target, error)
            return
        await self._copy_both(reader, writer, *far)

    async def _proxy(self, rules: HostRules, reader: Reader, writer: Writer) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
        except asyncio.LimitOverrunError as error:
            raise Refusal(431, f"the head of a request exceeds {HEAD_BYTES} bytes") from error
        request = parse_request(head)
        far_reader, far_writer = await dial(request.target, rules, self._resolve)
        if request.head is None:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far_writer.write(request.head)
        await self._copy_both(reader, writer, far_reader, far_writer)

    async def _copy_both(
        self, reader: Reader, writer: Writer, far_reader: Reader, far_writer: Writer
    ) -> None:
        """Copy until both directions have ended, or one of them fails."""
        task = asyncio.current_task()
        assert task is not None
        copies = [
            asyncio.create_task(self._copy(reader, far_writer, task)),
            asyncio.create_task(self._copy(far_reader, writer, task)),
        ]
        try:
            await asyncio.gather(*copies)
            writer.close()
            await writer.wait_closed()  # until the last bytes are written
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            far_writer.transport.abort()

    async def _copy(self, reader: Reader, writer: Writer, task: asyncio.Task[None]) -> None:
        while piece := await reader.read(PIECE_BYTES):
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_BYTES:
                raise ConnectionAbortedError(f"more than {MAX_BYTES} bytes of one command")
            self._connections[task] = time.monotonic()
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            await writer.drain()

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 60)
            for task, last in list(self._connections.items()):
                if time.monotonic() - last > IDLE_S:
                    task.cancel()

    async def _end_connections(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _respond(writer: Writer, status: int, reason: str) -> None:
    body = f"{reason}\n".encode("ascii", "backslashreplace")
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", "Content-Type: text/plain"]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    writer.write("\r\n".join(lines).encode("ascii") + body)
    writer.close()
    await writer.wait_closed()


def _checked_forwards(forwards: Mapping[int, str]) -> dict[int, Target]:
    if len(forwards) > MAX_FORWARDS:
        raise ConfigError(f"forwards: {len(forwards)} ports, expected up to {MAX_FORWARDS}")
    targets = {}
    for port, address in forwards.items():
        if not LOWEST_PORT <= port <= 65_535:
            raise ConfigError(
                f"forwards: expected a port from {LOWEST_PORT} to 65535, got {port}; lower ports "
                "need root in the workspace"
            )
        target = parse_target(address, default_port=None)
        if target is None:
            raise ConfigError(f"forwards: expected host:port for port {port}, got {address!r}")
        targets[port] = target
    return targets


def new_folder(user: int | None = None) -> Path:
    """Create a folder for sockets that only this process and, for root, a user can enter.

    `remove_abandoned` removes it after this process was killed.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{process_name(os.getpid())}-"))
    if user is not None and os.geteuid() == 0:
        os.chown(folder, user, user)  # else that user could not mount what is in it
    return folder


def process_name(pid: int) -> str:
    """Return the id and the start time of a process, which no other process of this boot has."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def is_running(name: str) -> bool:
    """Whether the process with a name of `process_name` exists."""
    try:
        return process_name(int(name.partition("-")[0])) == name
    except OSError:
        return False


@functools.cache
def remove_abandoned() -> None:
    """Remove the folders of sockets of processes that were killed; once per process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        found = re.fullmatch(rf"{PREFIX}([0-9]+-[0-9]+)-.*", folder.name)
        if found is not None and not folder.is_symlink() and not is_running(found[1]):
            shutil.rmtree(folder, ignore_errors=True)

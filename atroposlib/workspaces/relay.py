"""The program before a command in a workspace: ports of 127.0.0.1 that lead to Unix sockets.

    command ─► 127.0.0.1:PORT ─► FOLDER/PORT, a Unix socket ─► the process of the environment

It is run as `python3 -I -S -B relay.py FOLDER COMMAND ...` with the interpreter of the workspace,
therefore it imports only the standard library and supports Python 3.8. The ports are open before
the command starts. The process becomes the command, so that signals and the exit code are those of
the command; a second process, which ends with it, copies the bytes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

PIECE_BYTES = 65_536
MAX_CONNECTIONS = 256
RESERVED_FILES = 24
"""File descriptors in addition to the two of each connection."""
PAUSE_S = 0.5
PR_SET_NAME = 15
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes of a shell


def main(arguments: list[str]) -> int:
    """Open the ports and become the command; return an exit code only if that fails."""
    folder, command = arguments[0], arguments[1:]
    listening = {}
    for name in sorted(os.listdir(folder)):  # noqa: PTH208 - a Path costs start-up time
        if name.isdigit():
            path = os.path.join(folder, name)  # noqa: PTH118
            try:
                listening[path] = socket.create_server(("127.0.0.1", int(name)), backlog=128)
            except OSError as error:
                print(f"the port {name} of the workspace is not free: {error}", file=sys.stderr)  # noqa: T201
                return NOT_EXECUTABLE
    owner = os.getpid()
    if os.fork() == 0:
        try:
            if os.fork() == 0:  # the first process of the workspace becomes its parent
                _relay(listening, owner)
        finally:
            os._exit(0)
    os.wait()
    # Python ignores them, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _relay(listening: dict[str, socket.socket], owner: int) -> None:
    """Copy bytes until the process `owner`, which becomes the command, has ended."""
    import asyncio  # after the command has started

    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the output of the command ends with the command
        os.dup2(null, fd)
    _rename()
    asyncio.run(_serve(listening, owner))


def _rename() -> None:
    """Change the name of this process, since programs may end others that are called python3."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_NAME, b"atropos-relay", 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without this module


async def _serve(listening: dict[str, socket.socket], owner: int) -> None:
    import asyncio

    free = asyncio.Semaphore(_max_connections())
    tasks = [asyncio.ensure_future(_accept(each, path, free)) for path, each in listening.items()]
    while _exists(owner):  # noqa: ASYNC110 - the end of another process
        await asyncio.sleep(PAUSE_S)
    for task in tasks:
        task.cancel()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _max_connections() -> int:
    files = os.sysconf("SC_OPEN_MAX")
    return max(1, min(MAX_CONNECTIONS, (files - RESERVED_FILES) // 2))


async def _accept(listening: socket.socket, path: str, free: asyncio.Semaphore) -> None:
    """Accept connections while fewer than the maximum are open; others wait in the kernel."""
    import asyncio

    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    running = set()
    while True:
        await free.acquire()
        try:
            near, _ = await loop.sock_accept(listening)
        except OSError:  # the connection is already closed, or the machine lacks resources
            free.release()
            await asyncio.sleep(0.05)
            continue
        task = asyncio.ensure_future(_connect(near, path))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda _: free.release())


async def _connect(near: socket.socket, path: str) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    far = socket.socket(socket.AF_UNIX)
    copies: list[asyncio.Future[None]] = []
    try:
        far.setblocking(False)
        await loop.sock_connect(far, path)
        near.setblocking(False)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        copies = [asyncio.ensure_future(_copy(a, b)) for a, b in ((near, far), (far, near))]
        await asyncio.gather(*copies)
    except OSError:  # one end is gone; closing the other one reports it
        pass
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        near.close()
        far.close()


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copy until the end of the source, which the sink is then given too."""
    import asyncio

    loop = asyncio.get_running_loop()
    while True:
        piece = await loop.sock_recv(source, PIECE_BYTES)
        if not piece:
            break
        await loop.sock_sendall(sink, piece)
    sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

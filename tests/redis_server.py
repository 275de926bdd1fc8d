"""A real Redis server for tests, on a Unix socket, that can be killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

READY_S = 10.0
_CHUNK_BYTES = 2**20


class RedisServer:
    """One `redis-server` process with its data folder; `url` stays the same over restarts."""

    def __init__(self, *options: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        pytest.importorskip("redis", reason="pip install '.[redis]'")
        # The path of a socket may have at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket = self.folder / "s"
        self.url = f"unix://{self.socket}"
        self._command = [binary, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._command += [
            "--dir",
            str(self.folder),
            "--logfile",
            str(self.folder / "log"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it has loaded its data."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """End the server at once, without a shutdown."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Suspend the server: connections stay open, requests are not answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """Run one command on a new connection and return the raw reply."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(READY_S)
            connection.connect(str(self.socket))
            parts = [f"*{len(words)}\r\n"]
            parts += [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall("".join(parts).encode())
            return connection.recv(2**16)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class FaultyWire:
    """A proxy of a `RedisServer` that can lose a reply to a command that was executed.

    Use it as an asynchronous context manager; clients connect to `url`.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._path = server.folder / "wire"
        self._drops_reply = False
        self._wanted = b""
        self.num_dropped = 0
        self.url = f"unix://{self._path}"

    def drop_reply_to(self, part: bytes) -> None:
        """Close the connection instead of forwarding the reply to the next request with `part`."""
        self._wanted = part

    async def __aenter__(self) -> FaultyWire:
        self._listener = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)  # Python 3.13 and later remove it themselves

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            upstream = await asyncio.open_unix_connection(self._server.socket)
            try:
                await asyncio.gather(
                    self._pass_requests(reader, upstream[1]),
                    self._pass_replies(upstream[0], writer),
                )
            finally:
                upstream[1].close()
                writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self._wanted and self._wanted in data:
                self._wanted, self._drops_reply = b"", True
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self._drops_reply:
                self._drops_reply = False
                self.num_dropped += 1
                writer.transport.abort()
                return
            writer.write(data)
            await writer.drain()
        writer.close()

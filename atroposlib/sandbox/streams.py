"""A child process with bounded output and a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atroposlib.sandbox.interface import Ending, SandboxLimits

__all__ = ["Finished", "run_bounded"]

READ_BYTES = 65_536


@dataclass(frozen=True)
class Finished:
    """A child that has ended."""

    returncode: int
    stdout: bytes
    stderr: bytes
    stopped_for: Ending | None
    """The limit it was killed for here, None when it ended otherwise."""
    duration_s: float


async def run_bounded(
    command: Sequence[str],
    *,
    stdin: bytes,
    limits: SandboxLimits,
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Run a command until it ends, writes too much or takes too long; cancelling kills it.

    Raises:
        OSError: the command cannot be started.
    """
    started_at = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=pass_fds,
        env={},
        start_new_session=True,
    )
    outputs = (bytearray(), bytearray())
    talk = asyncio.create_task(_talk(process, stdin, outputs, limits.output_bytes))
    try:
        await asyncio.wait({talk}, timeout=limits.wall_s)
        stopped_for = _why_stopped(talk)
    finally:
        await asyncio.shield(_end(process, talk))
    return Finished(
        returncode=process.returncode if process.returncode is not None else -1,
        stdout=bytes(outputs[0]),
        stderr=bytes(outputs[1]),
        stopped_for=stopped_for,
        duration_s=time.monotonic() - started_at,
    )


class _TooMuchOutputError(Exception):
    pass


async def _talk(
    process: asyncio.subprocess.Process,
    stdin: bytes,
    outputs: tuple[bytearray, bytearray],
    max_bytes: int,
) -> None:
    assert process.stdin is not None  # all three are pipes
    assert process.stdout is not None
    assert process.stderr is not None
    parts = [
        asyncio.create_task(part)
        for part in (
            _write(process.stdin, stdin),
            _read(process.stdout, outputs[0], max_bytes),
            _read(process.stderr, outputs[1], max_bytes),
        )
    ]
    try:
        await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
    await process.wait()


def _why_stopped(talk: asyncio.Task[None]) -> Ending | None:
    if not talk.done():
        return "wall_time"
    error = talk.exception()
    if error is None:
        return None
    if isinstance(error, _TooMuchOutputError):
        return "output"
    raise error


async def _end(process: asyncio.subprocess.Process, talk: asyncio.Task[None]) -> None:
    talk.cancel()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await asyncio.gather(talk, return_exceptions=True)
    for stream in (process.stdout, process.stderr):  # a pipe that is left full is never over
        while stream is not None and await stream.read(READ_BYTES):
            pass
    await process.wait()


async def _write(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read all
        stream.write(content)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, into: bytearray, max_bytes: int) -> None:
    while piece := await stream.read(READ_BYTES):
        into += piece[: max_bytes - len(into)]
        if len(into) >= max_bytes:
            raise _TooMuchOutputError

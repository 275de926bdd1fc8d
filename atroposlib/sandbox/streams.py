"""A child process with bounded output and a time limit, and the result of its program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

from atroposlib.sandbox.interface import (
    Ending,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    content_fd,
)

__all__ = ["Finished", "OutputCallback", "ending_of", "result_of", "run_bounded"]

logger = logging.getLogger(__name__)

STDOUT, STDERR = 1, 2
LONGEST_END_S = 60.0
"""Time for a killed child and its output to end; then it is left."""
OutputCallback = Callable[[int, bytes, float], None]
"""Receives 1 or 2 for the stream, a piece of output, and seconds since the start."""


@dataclass(frozen=True)
class Finished:
    """A child that has ended."""

    returncode: int
    stdout: bytes
    stderr: bytes
    stopped_for: Ending | None
    """The limit for which it was killed here; None if it ended otherwise."""
    duration_s: float


async def run_bounded(
    command: Sequence[str],
    *,
    stdin: bytes | int,
    limits: SandboxLimits,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    turn: AbstractAsyncContextManager[None] | None = None,
    kill: Callable[[], Awaitable[None]] | None = None,
    on_output: OutputCallback | None = None,
) -> Finished:
    """Run a command until it ends, writes too much or takes too long; cancelling kills it.

    Args:
        command: program and arguments.
        stdin: standard input, or the descriptor of a file.
        limits: limits of output and time.
        env: its variables; None for none.
        pass_fds: further file descriptors that it inherits.
        turn: context entered after the start and exited at the end; the time limit starts in it.
        kill: awaited after the command was killed, to kill processes it started elsewhere.
        on_output: called with each piece of output within its limit; must not raise.

    Raises:
        OSError: the command cannot be started.
    """
    loop = asyncio.get_running_loop()
    record = _ChildOutput(
        limits.output_bytes,
        ended=loop.create_future(),
        full=loop.create_future(),
        on_output=on_output,
    )
    # Not asyncio's pipe: it is a socket, over which a program could send file descriptors.
    with _source(stdin) as source:
        starting = asyncio.create_task(
            loop.subprocess_exec(
                lambda: record,
                *command,
                stdin=source,
                pass_fds=pass_fds,
                env=env or {},
                start_new_session=True,
            )
        )
        try:
            # Not cancelled with this task: asyncio would kill the command alone, and then wait for
            # the end of its output, which a child of the command may hold.
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            await asyncio.shield(_end_started(starting, record.ended, kill))
            raise
        transport, _ = starting.result()
    try:
        async with turn or contextlib.nullcontext():
            started_at = record.started_at = time.monotonic()
            done, _ = await asyncio.wait(
                {record.ended, record.full},
                timeout=limits.wall_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            duration_s = time.monotonic() - started_at
    finally:
        await asyncio.shield(_end(transport, record.ended, kill))
    stopped_for: Ending | None = None if done else "wall_time"
    returncode = transport.get_returncode()
    return Finished(
        returncode=returncode if returncode is not None else -1,
        stdout=bytes(record.outputs[STDOUT]),
        stderr=bytes(record.outputs[STDERR]),
        stopped_for="output" if record.full in done else stopped_for,
        duration_s=duration_s,
    )


def _source(stdin: bytes | int) -> AbstractContextManager[int]:
    if isinstance(stdin, int):
        return contextlib.nullcontext(stdin)
    return content_fd(stdin) if stdin else contextlib.nullcontext(subprocess.DEVNULL)


class _ChildOutput(asyncio.SubprocessProtocol):
    """Output of a child, up to `max_bytes` per stream."""

    def __init__(
        self,
        max_bytes: int,
        *,
        ended: asyncio.Future[None],
        full: asyncio.Future[None],
        on_output: OutputCallback | None,
    ) -> None:
        self.outputs = {STDOUT: bytearray(), STDERR: bytearray()}
        self.ended = ended
        self.full = full
        self.started_at = time.monotonic()
        self._max_bytes = max_bytes
        self._on_output = on_output

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        into = self.outputs[fd]
        piece = data[: self._max_bytes - len(into)]
        into += piece
        if self._on_output is not None and piece:
            self._on_output(fd, piece, time.monotonic() - self.started_at)
        if len(piece) < len(data) and not self.full.done():
            self.full.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _end_started(
    starting: asyncio.Task[tuple[asyncio.SubprocessTransport, _ChildOutput]],
    ended: asyncio.Future[None],
    kill: Callable[[], Awaitable[None]] | None,
) -> None:
    with contextlib.suppress(OSError):  # it cannot be started
        transport, _ = await starting
        await _end(transport, ended, kill)


async def _end(
    transport: asyncio.SubprocessTransport,
    ended: asyncio.Future[None],
    kill: Callable[[], Awaitable[None]] | None,
) -> None:
    if transport.get_returncode() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)  # it has its own session
        if kill is not None:
            await kill()
    # Its output ends once all processes that share it have ended.
    await asyncio.wait({ended}, timeout=LONGEST_END_S)
    if not ended.done():
        logger.warning("the output of process %d does not end; it is left", transport.get_pid())
    transport.close()


SIGXCPU_EXIT = 128 + 24
SIGNAL_EXITS = range(128 + 1, 128 + signal.NSIG)
MAX_MESSAGE_CHARACTERS = 300


def ending_of(
    finished: Finished, *, exit_code: int | None, ran_out_of_memory: bool, around: str
) -> tuple[Ending, int | None]:
    """Return the ending of a program, and its exit code unless it was stopped.

    Args:
        finished: the process that ran the program, such as bubblewrap.
        exit_code: exit code of the program; None if it was stopped or never ran.
        ran_out_of_memory: whether the kernel killed one of its processes for memory.
        around: name of the process, for messages.

    Raises:
        SandboxError: the program never ran.
    """
    if finished.stopped_for is not None:
        return finished.stopped_for, None
    if ran_out_of_memory:
        return "memory", exit_code
    if exit_code is None:
        stderr = finished.stderr.decode("utf-8", "replace")
        raise SandboxError(
            f"{around} ended with {finished.returncode} before the program did: "
            f"{stderr[:MAX_MESSAGE_CHARACTERS].strip() or 'no message'}"
        )
    if exit_code == SIGXCPU_EXIT:
        return "cpu_time", exit_code
    return ("signal" if exit_code in SIGNAL_EXITS else "exit"), exit_code


def result_of(
    finished: Finished, *, exit_code: int | None, ran_out_of_memory: bool, around: str
) -> SandboxResult:
    """Return the result of a program; see `ending_of`."""
    ended_by, exit_code = ending_of(
        finished, exit_code=exit_code, ran_out_of_memory=ran_out_of_memory, around=around
    )
    return SandboxResult(
        exit_code=exit_code,
        stdout=finished.stdout.decode("utf-8", "replace"),
        stderr=finished.stderr.decode("utf-8", "replace"),
        ended_by=ended_by,
        duration_s=finished.duration_s,
    )

"""The gate of a box that bubblewrap sets up: the program waits behind it until it is opened.

    bwrap sets the box up ──► reports its process ──► waits for a byte ──► runs the program

So the process can be bounded from outside while nothing of the program runs yet. bwrap itself
keeps the writing end open as long as the box is there: no byte, no program, whoever ends first.
A box that still waits when this process is killed stays until the next such process ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from atroposlib.sandbox.interface import SandboxError

__all__ = ["Gate", "end_abandoned", "new_gate"]

SET_UP_S = 60.0
READ_BYTES = 65_536
WORDS = (b"--block-fd", b"--sync-fd", b"--disable-userns")
"""Of the boxes made here, among those of other programs that use bubblewrap."""


class Gate:
    """What bubblewrap reports, and the byte it waits for; made by `new_gate`."""

    def __init__(
        self,
        report_fd: int,
        *,
        held: contextlib.ExitStack,
        until_started: contextlib.ExitStack,
        fds: tuple[int, int, int],
    ) -> None:
        self._report_fd = report_fd
        self._held = held
        self._until_started = until_started
        self._reported = b""
        self._box: int | None = None
        self.fds = fds
        """For bubblewrap to inherit: where it reports, the byte's reading and its writing end."""

    @property
    def words(self) -> list[str]:
        """The options of bubblewrap that put the gate there."""
        report, reading, writing = map(str, self.fds)
        return ["--json-status-fd", report, "--block-fd", reading, "--sync-fd", writing]

    async def wait_for_box(self) -> int | None:
        """Wait until bubblewrap, started by now, has a process in the box; return its id.

        Returns:
            None when bubblewrap ended instead.

        Raises:
            SandboxError: it takes longer than a minute.
        """
        self._until_started.close()  # or the report would never end
        loop = asyncio.get_running_loop()
        reported: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._report_fd, self._read, reported)
        try:
            await asyncio.wait_for(reported, SET_UP_S)
        except asyncio.TimeoutError as error:
            raise SandboxError(f"bubblewrap set up no sandbox within {SET_UP_S:g} s") from error
        finally:
            loop.remove_reader(self._report_fd)
        pid = self._find("child-pid")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._box = os.pidfd_open(pid)
                self._held.callback(os.close, self._box)
        return pid if self._box is not None else None

    def open(self) -> None:
        """Let the program run."""
        os.write(self.fds[2], b"!")

    def kill_box(self) -> None:
        """End whatever is in the box; behind the gate it would outlive bubblewrap."""
        if self._box is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._box, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """The program's, once bubblewrap has ended; None when it ended before the program did."""
        while piece := os.read(self._report_fd, READ_BYTES):
            self._reported += piece
        return self._find("exit-code")

    def _read(self, reported: asyncio.Future[None]) -> None:
        piece = os.read(self._report_fd, READ_BYTES)
        self._reported += piece
        if (b"\n" in piece or not piece) and not reported.done():
            reported.set_result(None)

    def _find(self, key: str) -> int | None:
        for line in self._reported.splitlines():
            fields = json.loads(line)
            if key in fields:
                return int(fields[key])
        return None


@contextlib.contextmanager
def new_gate() -> Iterator[Gate]:
    """Make a gate; leave the context only when bubblewrap has ended."""
    with contextlib.ExitStack() as held:
        report, report_end = os.pipe()
        held.callback(os.close, report)
        until_started = held.enter_context(contextlib.ExitStack())
        until_started.callback(os.close, report_end)
        reading, writing = os.pipe()
        held.callback(os.close, reading)
        held.callback(os.close, writing)
        fds = (report_end, reading, writing)
        yield Gate(report, held=held, until_started=until_started, fds=fds)


def end_abandoned() -> None:
    """End the boxes that wait behind a gate which nothing opens any more."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError):
            if (folder / "comm").read_text() == "bwrap\n" and _is_abandoned(folder):
                os.kill(int(folder.name), signal.SIGKILL)


def _is_abandoned(folder: Path) -> bool:
    """Whether a process is the first of a box and the bubblewrap outside, its parent, has ended."""
    rows = dict(row.split(":\t", 1) for row in (folder / "status").read_text().splitlines())
    is_first = rows["NSpid"].split()[-1] == "1"
    words = (folder / "cmdline").read_bytes().split(b"\0")
    if not is_first or not all(word in words for word in WORDS):
        return False
    return Path("/proc", rows["PPid"], "comm").read_text() != "bwrap\n"

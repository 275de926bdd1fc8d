"""Ends the sessions of a process on remote servers after that process was killed.

    adapter ─ opened, ended ─► pipe ─► guard, a child process ─ end of the pipe ─► end requests

Some servers keep a session until it is ended by a request, or until a time limit. A process that
gets SIGKILL cannot send that request, so the guard does: it knows the open sessions and waits for
the end of its stdin. Requests hold keys and reach the guard through the pipe only. The guard runs
this file alone, which uses nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["EndRequest", "SessionGuard"]

logger = logging.getLogger(__name__)

REQUEST_S = 5.0
TOTAL_S = 20.0
"""Time limit of all end requests; then the guard ends."""
REPEAT_EVERY_S = PARENT_CHECK_S = 1.0
MAX_SESSIONS = 8192
"""Sessions that the guard keeps; the oldest is forgotten first."""
MAX_THREADS = 64
READ_BYTES = 65536
MAX_UNSENT_BYTES = 16 * 2**20
"""Messages that do not fit into the pipe of a guard; one that leaves more unread is ended."""
FLUSH_S = 5.0
FLUSH_EVERY_S = 0.05


class EndRequest(NamedTuple):
    """A request without a body that ends a session."""

    method: str
    url: str
    headers: Mapping[str, str]


class SessionGuard:
    """Starts the guard with the first session, and keeps it informed.

    Its methods never wait for the guard and never raise: without it, rollouts go on.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_broken = False
        self._unsent = bytearray()

    def opened(self, key: str, requests: Sequence[EndRequest], *, repeat_s: float = 0.0) -> None:
        """Note a session, or replace what is known of it.

        Args:
            key: name of the session, for `ended`.
            requests: end it, one after another.
            repeat_s: time for which the requests are repeated, for a session that the server is
                still creating and that it cannot end before.
        """
        listed = [request._asdict() for request in requests]
        self._send({"open": key, "requests": listed, "repeat_s": repeat_s})

    def ended(self, key: str) -> None:
        if self._process is not None:  # else no session is known
            self._send({"close": key})

    async def close(self) -> None:
        """End the guard, which first ends the sessions that are still open."""
        import asyncio

        if self._process is not None:
            deadline = time.monotonic() + FLUSH_S
            while self._unsent and time.monotonic() < deadline:
                await asyncio.sleep(FLUSH_EVERY_S)
                self._flush()
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, TOTAL_S + REQUEST_S)

    def _send(self, message: dict[str, Any]) -> None:
        if not self._is_broken:
            self._unsent += json.dumps(message).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        """Write what fits into the pipe.

        The rest, such as sessions that begin while the guard starts, is sent with later messages.
        """
        try:
            # A full pipe takes nothing, or a part.
            del self._unsent[: self._pipe().write(self._unsent) or 0]
        except OSError as error:
            self._give_up(f"{type(error).__name__}: {error.strerror}")
        else:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self._give_up("it does not read its pipe")

    def _pipe(self) -> Any:
        if self._process is None:
            # Its own session: a signal from the terminal must not end it before this process.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process.stdin

    def _give_up(self, reason: str) -> None:
        self._is_broken = True
        self._unsent.clear()
        if self._process is not None:
            self._process.kill()  # it would take the end of the pipe for the end of this process
        logger.warning(
            "the guard of sessions does not work: %s; if this process is killed, servers keep its "
            "sessions until their own time limit",
            reason,
        )


def main(parent_pid: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends soon after its parent, and not before
    end_sessions(list(open_sessions(parent_pid).values()))
    os._exit(0)  # threads may still wait for a server


def open_sessions(parent_pid: int) -> dict[str, dict[str, Any]]:
    """Read stdin until the parent has ended, and return the sessions that are open then.

    The end of the pipe alone does not suffice: a child that the parent forked may hold it open.
    """
    sessions: dict[str, dict[str, Any]] = {}
    rest = b""
    while True:
        is_orphan = os.getppid() != parent_pid
        readable, _, _ = select.select([0], [], [], 0 if is_orphan else PARENT_CHECK_S)
        if not readable and is_orphan:
            return sessions
        if readable:
            read = os.read(0, READ_BYTES)
            if not read:
                return sessions
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                _note(sessions, json.loads(line))


def _note(sessions: dict[str, dict[str, Any]], message: dict[str, Any]) -> None:
    if "close" in message:
        sessions.pop(message["close"], None)
        return
    sessions[message["open"]] = message
    if len(sessions) > MAX_SESSIONS:
        del sessions[next(iter(sessions))]


def end_sessions(sessions: list[dict[str, Any]]) -> None:
    """Send the requests of all sessions, and repeat those of sessions that are being created."""
    started = time.monotonic()
    while sessions and time.monotonic() < started + TOTAL_S:
        waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threads = []
        for session in sessions:
            waiting.put(session)
        for _ in sessions[:MAX_THREADS]:
            threads.append(threading.Thread(target=_work, args=(waiting,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(max(0.0, started + TOTAL_S - time.monotonic()))
        passed_s = time.monotonic() - started
        sessions = [session for session in sessions if session["repeat_s"] > passed_s]
        if sessions:
            time.sleep(REPEAT_EVERY_S)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which could take keys to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _work(waiting: queue.SimpleQueue[dict[str, Any]]) -> None:
    opener = urllib.request.build_opener(_NoRedirect)
    while True:
        try:
            session = waiting.get_nowait()
        except queue.Empty:
            return
        for each in session["requests"]:
            with contextlib.suppress(Exception):  # a server that is gone has no session left
                url, method, headers = each["url"], each["method"], each["headers"]
                request = urllib.request.Request(url, method=method, headers=headers)
                opener.open(request, timeout=REQUEST_S).close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Finding calls that hold the event loop, with the line that made them.

    loop:    callback │ callback ──────────────────── │ callback
    thread:                      stack · stack · stack            -> one Stall

Each callback is timed on its own: many short ones in a row are what a loop is for.

What still runs after an environment was closed: tasks, threads and processes.

Keeping the network out of reach while a check runs, and telling who reached for it.

Holding back what an environment logs and prints, to read it and to keep the report clean.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import ipaddress
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.envs.checks.report import awaiting_site, code_site, stack_site
from atroposlib.errors import AtroposError

__all__ = [
    "CapturedOutput",
    "Leftover",
    "NetworkAttempt",
    "NetworkBlockedError",
    "Running",
    "Stall",
    "block_network",
    "capture_output",
    "end_leftover_tasks",
    "wait_for_end",
    "watch_loop",
]

LIMIT_S = 0.1
LOOK_INTERVAL_S = 0.01
MIN_OWN_SHARE = 0.5
"""Share of the looks at the stack that must show the author's code; imports do not count, since
they happen once."""
MIN_LOOKS_SHARE = 0.4
"""Share of the looks that must have been possible. Under a call that waits, as `time.sleep`, all
are; on a busy machine the loop and the watch are held up together."""


class Stall(NamedTuple):
    """One time in which the loop did nothing else."""

    duration_s: float
    where: str | None
    """The author's line that held it; None if it was not observed, as under a busy interpreter."""


class _Watch(threading.Thread):
    """Looks at the stack of the loop's thread while a callback takes long."""

    def __init__(self, loop_thread: int) -> None:
        super().__init__(name="check-loop-watch", daemon=True)
        self.stalls: list[Stall] = []
        self._loop_thread = loop_thread
        self._started_at: float | None = None
        self._seen: list[str | None] = []
        self._collected_s = 0.0
        self._collecting_since = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        """Look every few milliseconds until `end`."""
        while not self._ended.wait(LOOK_INTERVAL_S):
            started_at = self._started_at
            if started_at is not None and time.monotonic() - started_at > 2 * LOOK_INTERVAL_S:
                self._seen.append(_site_of(sys._current_frames().get(self._loop_thread)))

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()

    def time_callback(self, run: Any, handle: Any) -> None:
        """Run one callback of the loop and judge how long it took."""
        cpu_before = time.thread_time()
        self._seen, self._collected_s = [], 0.0
        self._started_at = started_at = time.monotonic()
        try:
            run(handle)
        finally:
            self._started_at = None
            duration_s = time.monotonic() - started_at - self._collected_s
            if duration_s > LIMIT_S:
                computed_s = time.thread_time() - cpu_before - self._collected_s
                self._judge(duration_s, self._seen, computed_s=computed_s)

    def note_collection(self, phase: str, _: Any) -> None:
        """Take the time of Python's garbage collector out of what a callback took."""
        if threading.get_ident() == self._loop_thread:
            if phase == "start":
                self._collecting_since = time.monotonic()
            else:
                self._collected_s += time.monotonic() - self._collecting_since

    def _judge(self, duration_s: float, seen: list[str | None], *, computed_s: float) -> None:
        own = [site for site in seen if site is not None]
        was_waiting = len(seen) >= MIN_LOOKS_SHARE * duration_s / LOOK_INTERVAL_S
        if computed_s <= LIMIT_S and not was_waiting:
            return
        if not seen:
            self.stalls.append(Stall(duration_s, None))
        elif own and len(own) >= MIN_OWN_SHARE * len(seen):
            self.stalls.append(Stall(duration_s, Counter(own).most_common(1)[0][0]))


def _site_of(frame: Any) -> str | None:
    inner = frame
    while inner is not None:
        if "importlib._bootstrap" in inner.f_code.co_filename:
            return None
        inner = inner.f_back
    return stack_site(frame)


@contextmanager
def watch_loop() -> Iterator[list[Stall]]:
    """Watch the event loop of this thread; yields the list that stalls are added to."""
    loop_thread = threading.get_ident()
    watch = _Watch(loop_thread)
    run = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        if threading.get_ident() == loop_thread:
            watch.time_callback(run, handle)
        else:
            run(handle)

    watch.start()
    gc.callbacks.append(watch.note_collection)
    asyncio.Handle._run = timed_run  # type: ignore[method-assign, assignment]
    try:
        yield watch.stalls
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.callbacks.remove(watch.note_collection)
        watch.end()


GRACE_S = 1.0
POLL_S = 0.02
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
"""Processes that Python keeps for itself, once per run."""
HELPER_THREADS = ("asyncio_", "asyncio-waitpid-", "waitpid-", "check-")
"""Threads of the event loop and of the check itself."""


class Leftover(NamedTuple):
    """One thing that did not end."""

    what: str
    where: str | None


class Running(NamedTuple):
    """What runs at one moment."""

    tasks: frozenset[asyncio.Task[Any]]
    threads: frozenset[threading.Thread]
    processes: frozenset[int]

    @classmethod
    def now(cls) -> Running:
        """Look at this process; outside of an event loop there are no tasks."""
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:
            tasks = set()
        return cls(frozenset(tasks), frozenset(threading.enumerate()), _child_processes())


async def wait_for_end(before: Running) -> list[Leftover]:
    """Wait a moment for what was started since `before`, and return what goes on running."""
    deadline = asyncio.get_running_loop().time() + GRACE_S
    while True:
        left = _started_since(before)
        if not left or asyncio.get_running_loop().time() > deadline:
            return left
        await asyncio.sleep(POLL_S)


async def end_leftover_tasks(before: Running) -> None:
    """Cancel the tasks started since `before`, so that the loop can be closed."""
    tasks = asyncio.all_tasks() - before.tasks - {asyncio.current_task()}  # type: ignore[arg-type]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_S)


def _started_since(before: Running) -> list[Leftover]:
    now = Running.now()
    tasks = [
        Leftover(f"task {_coroutine_name(task)}", code_site(_code_of(task)))
        for task in now.tasks - before.tasks
        if task is not asyncio.current_task()
    ]
    threads = [
        Leftover(f"thread {thread.name}", code_site(_target_code(thread)))
        for thread in now.threads - before.threads
        if not thread.name.startswith(HELPER_THREADS) and type(thread).__name__ != "TMonitor"
    ]
    processes = [
        Leftover(f"process {pid} ({_command_line(pid)[:80]})", None)
        for pid in now.processes - before.processes
    ]
    return tasks + threads + processes


def _coroutine_name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _code_of(task: asyncio.Task[Any]) -> Any:
    return getattr(task.get_coro(), "cr_code", None)


def _target_code(thread: threading.Thread) -> Any:
    target = getattr(thread, "_target", None)  # None for threads of a class of their own
    target = getattr(target, "__func__", target) or type(thread).run
    return getattr(target, "__code__", None)


def _child_processes() -> frozenset[int]:
    children = {child.pid for child in multiprocessing.active_children() if child.pid}
    for listing in Path(f"/proc/{os.getpid()}/task").glob("*/children"):  # Linux only
        try:
            children |= {int(pid) for pid in listing.read_text().split()}
        except OSError:  # the thread has ended meanwhile
            continue
    return frozenset(pid for pid in children if _command_line(pid) and not _is_helper(pid))


def _is_helper(pid: int) -> bool:
    return any(name in _command_line(pid) for name in HELPERS)


def _command_line(pid: int) -> str:
    """Return how a process was started; empty for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "" if Path("/proc").exists() else f"pid {pid}"
    return b" ".join(words).decode(errors="replace").strip()


class NetworkBlockedError(AtroposError, RuntimeError):
    """Something reached for the network during a check.

    No `OSError`: the clients of hubs would take it for a moment's trouble and retry for a minute.
    """


class NetworkAttempt(NamedTuple):
    """One attempt to reach another process over the network."""

    host: str
    is_blocked: bool
    """False on this machine, where connections are let through."""
    where: str | None
    """The author's line that led to it."""


@contextmanager
def block_network() -> Iterator[list[NetworkAttempt]]:
    """Refuse connections and look-ups of names other than this machine's; yield the attempts.

    Connections to this machine are let through; those of the author's code are noted too.
    """
    attempts: list[NetworkAttempt] = []

    def refuse(host: Any) -> None:
        if not _is_local(host):
            where = stack_site(sys._getframe(2)) or awaiting_site()
            attempts.append(NetworkAttempt(str(host), True, where))
            raise NetworkBlockedError(f"the check keeps the network out of reach, {host} included")

    def note_local(address: Any) -> None:
        where = stack_site(sys._getframe(2)) or awaiting_site()
        if where is not None:
            attempts.append(NetworkAttempt(f"{address[0]}:{address[1]}", False, where))

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return originals["look_up"](host, *args, **kwargs)

    async def look_up_on_loop(loop: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return await originals["look_up_on_loop"](loop, host, *args, **kwargs)

    def connect(connection: Any, address: Any) -> Any:
        if connection.family != getattr(socket, "AF_UNIX", None):
            refuse(address[0])
            note_local(address)
        return originals["connect"](connection, address)

    loop_class = asyncio.BaseEventLoop
    originals: dict[str, Any] = {
        "look_up": socket.getaddrinfo,
        "look_up_on_loop": loop_class.getaddrinfo,
        "connect": socket.socket.connect,
    }
    _put(look_up, look_up_on_loop, connect)
    try:
        yield attempts
    finally:
        _put(originals["look_up"], originals["look_up_on_loop"], originals["connect"])


def _put(look_up: Any, look_up_on_loop: Any, connect: Any) -> None:
    socket.getaddrinfo = look_up
    asyncio.BaseEventLoop.getaddrinfo = look_up_on_loop  # type: ignore[method-assign]
    socket.socket.connect = connect  # type: ignore[method-assign]


def _is_local(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


LIBRARY = "atroposlib."


class CapturedOutput(logging.Handler):
    """What was logged and printed.

    Attributes:
        records: log records of level INFO and above.
        printed: what went to the standard streams.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self.printed = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    def position(self) -> tuple[int, int]:
        """Return a mark for `tells_of`."""
        return len(self.records), self.printed.tell()

    def tells_of(self, error: BaseException, *, since: tuple[int, int]) -> bool:
        """Whether an error left a trace: its traceback, its text, or a warning of the author's."""
        num_records, offset = since
        text = str(error)
        for record in self.records[num_records:]:
            is_warning = record.levelno >= logging.WARNING and not record.name.startswith(LIBRARY)
            has_traceback = bool(record.exc_info and record.exc_info[1] is not None)
            if is_warning or has_traceback or text in record.getMessage():
                return True
        return text in self.printed.getvalue()[offset:]


@contextlib.contextmanager
def capture_output() -> Iterator[CapturedOutput]:
    """Send log records and standard streams to the yielded object."""
    captured = CapturedOutput()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [captured]
    root.setLevel(logging.INFO)
    try:
        with (
            contextlib.redirect_stdout(captured.printed),
            contextlib.redirect_stderr(captured.printed),
        ):
            yield captured
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

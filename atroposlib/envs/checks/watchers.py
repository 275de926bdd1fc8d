"""Watchers of a check: calls that block the event loop, network access, leftovers, output.

A thread samples the stack of the event loop while a callback takes long:

    loop:    callback │ callback ──────────────────── │ callback
    thread:                      stack · stack · stack            -> one Stall

Each callback is timed separately, since many short ones in a row do not block the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.envs.checks.report import awaiting_site, code_site, stack_site
from atroposlib.errors import AtroposError

__all__ = [
    "CapturedOutput",
    "Leftover",
    "LoopStall",
    "NetworkAttempt",
    "NetworkBlockedError",
    "Running",
    "block_network",
    "capture_output",
    "end_default_executor",
    "end_leftover_tasks",
    "wait_for_end",
    "watch_loop",
]

LIMIT_S = 0.1
BLOCKED_S = 60.0
"""Seconds after which a call that blocks the loop is interrupted: the check would never end."""
SAMPLE_INTERVAL_S = 0.01
MIN_OWN_SHARE = 0.5
"""Fraction of stack samples that must show the author's code; imports do not count, since they
happen once."""
MIN_SAMPLES_SHARE = 0.4
"""Fraction of the expected stack samples that must exist. A blocking call such as `time.sleep`
allows all of them; a busy machine delays the loop and the sampling thread alike."""


class LoopStall(NamedTuple):
    """A callback that blocked the event loop."""

    duration_s: float
    where: str
    """The author's line."""


class LoopBlockedError(AtroposError, TimeoutError):
    """A call blocked the event loop for so long that it may never end."""

    def __init__(self) -> None:  # raised from its class, in the thread of the loop
        super().__init__(f"it blocks the event loop, and did not end within {BLOCKED_S:g} s")


def _raise_in(thread: int) -> None:
    """Raise `LoopBlockedError` in a thread, as soon as it executes Python code."""
    error = ctypes.py_object(LoopBlockedError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


class _RunQueueTime:
    """Seconds that this thread was ready to run and waited for a processor; 0 where unknown."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:  # another system than Linux, or a kernel without these figures
            self._file = None
        else:
            weakref.finalize(self, os.close, self._file)

    def now_s(self) -> float:
        if self._file is None:
            return 0.0
        _, waited_ns, _ = os.pread(self._file, 100, 0).split()
        return int(waited_ns) * 1e-9


class _Watch(threading.Thread):
    """Samples the stack of the loop's thread while a callback takes long."""

    def __init__(self, loop_thread: int) -> None:
        super().__init__(name="check-loop-watch", daemon=True)
        self.stalls: list[LoopStall] = []
        self._loop_thread = loop_thread
        self._run_queue = _RunQueueTime()
        self._started_at: float | None = None
        self._interrupted_at: float | None = None
        self._samples: list[str | None] = []
        self._collected_s = 0.0
        self._collecting_since = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            started_at = self._started_at
            if started_at is None:
                continue
            blocked_s = time.monotonic() - started_at
            if blocked_s > BLOCKED_S and self._interrupted_at != started_at:
                self._interrupted_at = started_at
                _raise_in(self._loop_thread)
            if blocked_s > 2 * SAMPLE_INTERVAL_S:
                self._samples.append(_site_of(sys._current_frames().get(self._loop_thread)))

    def end(self) -> None:
        self._ended.set()
        self.join()

    def time_callback(self, run: Any, handle: Any) -> None:
        """Run one callback of the loop, and record a stall if it blocks the loop."""
        cpu_before, queued_before = time.thread_time(), self._run_queue.now_s()
        self._samples, self._collected_s = [], 0.0
        self._started_at = started_at = time.monotonic()
        try:
            run(handle)
        finally:
            self._started_at = None
            duration_s = time.monotonic() - started_at - self._collected_s
            if duration_s > LIMIT_S:
                # What other processes of a busy machine took is not the call's.
                duration_s -= self._run_queue.now_s() - queued_before
            if duration_s > LIMIT_S:
                computed_s = time.thread_time() - cpu_before - self._collected_s
                self._add_stall(duration_s, self._samples, computed_s=computed_s)

    def note_collection(self, phase: str, _: Any) -> None:
        """Measure garbage collections, which do not count as part of a callback."""
        if threading.get_ident() == self._loop_thread:
            if phase == "start":
                self._collecting_since = time.monotonic()
            else:
                self._collected_s += time.monotonic() - self._collecting_since

    def _add_stall(
        self, duration_s: float, samples: list[str | None], *, computed_s: float
    ) -> None:
        # After a call that holds the interpreter, one sample is taken. There is none only where
        # this thread had no processor, so that nothing is known of the call.
        own = [site for site in samples if site is not None]
        was_waiting = len(samples) >= MIN_SAMPLES_SHARE * duration_s / SAMPLE_INTERVAL_S
        if computed_s <= LIMIT_S and not was_waiting:
            return
        if own and len(own) >= MIN_OWN_SHARE * len(samples):
            self.stalls.append(LoopStall(duration_s, Counter(own).most_common(1)[0][0]))


def _site_of(frame: Any) -> str | None:
    inner = frame
    while inner is not None:
        if "importlib._bootstrap" in inner.f_code.co_filename:
            return None
        inner = inner.f_back
    return stack_site(frame)


@contextmanager
def watch_loop() -> Iterator[list[LoopStall]]:
    """Watch the event loop of this thread; yields the list that stalls are appended to."""
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


GRACE_S = 5.0
"""Time that tasks, threads and processes have to end after `close`, on a busy machine too."""
MIN_LOOKS = 50
"""Looks at them at least: the whole process may stand still for longer than `GRACE_S`."""
THREADS_S = 10.0
"""Time that calls of `asyncio.to_thread` have to return after `close`."""
POLL_S = 0.02
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
"""Processes of Python itself."""
HELPER_THREADS = ("asyncio-waitpid-", "waitpid-", "check-")
"""Threads of the event loop and of the check itself."""


class Leftover(NamedTuple):
    """A task, thread or process that still runs after `close`."""

    what: str
    where: str | None


class Running(NamedTuple):
    """The tasks, threads and child processes at one moment."""

    tasks: frozenset[asyncio.Task[Any]]
    threads: frozenset[threading.Thread]
    processes: frozenset[int]

    @classmethod
    def now(cls) -> Running:
        """Return those of this process; without tasks outside an event loop."""
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:
            tasks = set()
        return cls(frozenset(tasks), frozenset(threading.enumerate()), _child_processes())


async def end_default_executor() -> None:
    """End the threads of `asyncio.to_thread`; a call that does not return keeps its thread.

    Up to Python 3.11, `shutdown_default_executor` waits for such a call without limit, and so does
    `asyncio.run`, which therefore gets another executor.
    """
    loop: Any = asyncio.get_running_loop()
    executor = getattr(loop, "_default_executor", None)  # asyncio has no public access to it
    if executor is None:
        return
    executor.shutdown(wait=False)
    loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
    deadline = loop.time() + THREADS_S
    while loop.time() < deadline and _are_alive(executor._threads):  # noqa: ASYNC110 - no event
        await asyncio.sleep(POLL_S)


def _are_alive(threads: Iterable[threading.Thread]) -> bool:
    return any(thread.is_alive() for thread in threads)


async def wait_for_end(before: Running) -> list[Leftover]:
    """Wait some seconds for what was started since `before`, and return what still runs."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GRACE_S
    num_looks = 0
    while left := _started_since(before):
        num_looks += 1
        if num_looks >= MIN_LOOKS and loop.time() > deadline:
            break
        await asyncio.sleep(POLL_S)
    return left


async def end_leftover_tasks(before: Running) -> None:
    """Cancel the tasks started since `before`, so that the loop can be closed.

    `asyncio.run` would wait forever for those that swallow their cancellation. They are kept, since
    they would swallow the end of their coroutine, too.
    """
    tasks = asyncio.all_tasks() - before.tasks - {asyncio.current_task()}  # type: ignore[arg-type]
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in left:
            asyncio._unregister_task(task)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _started_since(before: Running) -> list[Leftover]:
    now = Running.now()
    tasks = []
    for task in now.tasks - before.tasks - {asyncio.current_task()}:
        coroutine = task.get_coro()
        name = getattr(coroutine, "__qualname__", task.get_name())
        tasks.append(Leftover(f"task {name}", code_site(getattr(coroutine, "cr_code", None))))
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


def _target_code(thread: threading.Thread) -> Any:
    target = getattr(thread, "_target", None)  # None for a subclass of Thread
    target = getattr(target, "__func__", target) or type(thread).run
    return getattr(target, "__code__", None)


def _child_processes() -> frozenset[int]:
    children = {child.pid for child in multiprocessing.active_children() if child.pid}
    for listing in Path(f"/proc/{os.getpid()}/task").glob("*/children"):  # Linux only
        try:
            children |= {int(pid) for pid in listing.read_text().split()}
        except OSError:  # the thread has ended meanwhile
            continue
    lines = {pid: _command_line(pid) for pid in children}
    return frozenset(
        pid for pid, line in lines.items() if line and not any(name in line for name in HELPERS)
    )


def _command_line(pid: int) -> str:
    """Return the command line of a process; empty for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "" if Path("/proc").exists() else f"pid {pid}"
    return b" ".join(words).decode(errors="replace").strip()


class NetworkBlockedError(AtroposError, RuntimeError):
    """A network connection was attempted during a check.

    Not an `OSError`, which the clients of hubs would retry for a minute.
    """


class NetworkAttempt(NamedTuple):
    """A network connection or name resolution."""

    host: str
    is_blocked: bool
    """False for connections to this machine, which are allowed."""
    where: str | None
    """The author's line that caused it."""


@contextmanager
def block_network() -> Iterator[list[NetworkAttempt]]:
    """Block connections and name resolution except for this machine; yields the attempts.

    The attempts include connections of the author's code to this machine, which are allowed. Those
    to servers of this process are left out, such as the proxy through which an agent reaches
    `self.server`.
    """
    attempts: list[NetworkAttempt] = []
    own_ports: set[int] = set()

    def refuse(host: Any) -> None:
        if not _is_local(host):
            where = stack_site(sys._getframe(2)) or awaiting_site()
            attempts.append(NetworkAttempt(str(host), True, where))
            raise NetworkBlockedError(f"a check blocks the network; {host} cannot be reached")

    def note_local(address: Any) -> None:
        if address[1] in own_ports:
            return
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

    def listen(server: Any, *args: Any) -> None:
        originals["listen"](server, *args)
        if server.family != getattr(socket, "AF_UNIX", None):
            own_ports.add(server.getsockname()[1])

    loop_class = asyncio.BaseEventLoop
    originals: dict[str, Any] = {
        "look_up": socket.getaddrinfo,
        "look_up_on_loop": loop_class.getaddrinfo,
        "connect": socket.socket.connect,
        "listen": socket.socket.listen,
    }
    _put(look_up, look_up_on_loop, connect, listen)
    try:
        yield attempts
    finally:
        _put(*originals.values())


def _put(look_up: Any, look_up_on_loop: Any, connect: Any, listen: Any) -> None:
    socket.getaddrinfo = look_up
    asyncio.BaseEventLoop.getaddrinfo = look_up_on_loop  # type: ignore[method-assign]
    socket.socket.connect = connect  # type: ignore[method-assign]
    socket.socket.listen = listen  # type: ignore[method-assign]


def _is_local(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    name = str(host or "localhost").lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified  # connecting to 0.0.0.0 stays here


LIBRARY = "atroposlib."


class _Memory(io.BytesIO):
    """Bytes that stay open when a stream that an environment puts around them ends."""

    def close(self) -> None:
        pass


class _CapturedStream(io.TextIOWrapper):
    """A standard stream in memory, with the buffer, encoding and descriptor of a real one.

    What a child process writes to the descriptor is dropped.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__(memory, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._null = os.open(os.devnull, os.O_WRONLY)
        weakref.finalize(self, os.close, self._null)

    def fileno(self) -> int:
        return self._null


class CapturedOutput(logging.Handler):
    """Log records and output of an environment.

    Attributes:
        records: Log records of level INFO and above.
        stream: Takes the place of the standard streams.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self._printed = _Memory()
        self.stream = _CapturedStream(self._printed)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def last_warning(self) -> str | None:
        """Return the text of the latest warning, None without one."""
        warnings = [record for record in self.records if record.levelno >= logging.WARNING]
        return warnings[-1].getMessage() if warnings else None

    def position(self) -> tuple[int, int]:
        """Return the current end of records and output, for `mentions`."""
        self.stream.flush()
        return len(self.records), self._printed.tell()

    def mentions(self, error: BaseException, *, since: tuple[int, int]) -> bool:
        """Whether there is a traceback, the text of the error, or a warning of the author's."""
        num_records, offset = since
        text = str(error)
        for record in self.records[num_records:]:
            is_warning = record.levelno >= logging.WARNING and not record.name.startswith(LIBRARY)
            has_traceback = bool(record.exc_info and record.exc_info[1] is not None)
            if is_warning or has_traceback or text in record.getMessage():
                return True
        self.stream.flush()
        return text.encode() in self._printed.getvalue()[offset:]


@contextlib.contextmanager
def capture_output() -> Iterator[CapturedOutput]:
    """Redirect log records and standard streams to the yielded object."""
    captured = CapturedOutput()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [captured]
    root.setLevel(logging.INFO)
    try:
        with (
            contextlib.redirect_stdout(captured.stream),
            contextlib.redirect_stderr(captured.stream),
        ):
            yield captured
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

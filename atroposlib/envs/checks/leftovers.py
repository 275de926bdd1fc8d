"""What still runs after an environment was closed: tasks, threads and processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.envs.checks.call_site import code_site

__all__ = ["Leftover", "Running", "end_leftover_tasks", "wait_for_end"]

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

"""Where in the author's own files something happened, as `file:line`."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

__all__ = [
    "awaiting_site",
    "class_site",
    "code_site",
    "hook_site",
    "is_named_method",
    "mentioned_site",
    "method_name",
    "pending_method",
    "stack_site",
    "traceback_site",
]

LIBRARY = str(Path(__file__).resolve().parents[2])
PREFIXES = {sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}
INSTALLED = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in {*PREFIXES, sysconfig.get_paths()["stdlib"], LIBRARY}
)
LOOP_BOUNDARY = str(Path("asyncio", "events.py"))
"""Frames outside of it belong to whoever runs the loop, not to what runs in it."""

METHOD = re.compile(r"(\w+)\.(\w+)")
"""How messages name a method: `MyEnv.score returned None`, `MyEnv.score() takes 2 …`."""


def is_own_file(file_name: str) -> bool:
    """Whether a file is the author's: neither Python's, nor installed, nor of this library."""
    if file_name.startswith("<") or "site-packages" in file_name:
        return False
    return not str(Path(file_name).resolve()).startswith(INSTALLED)


def shown(file_name: str, line: int) -> str:
    """Return `file:line`, relative to the working directory where that is shorter."""
    path = Path(file_name).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def stack_site(frame: FrameType | None) -> str | None:
    """Return the innermost line of the author on a stack, as far as the event loop."""
    while frame is not None and not frame.f_code.co_filename.endswith(LOOP_BOUNDARY):
        if is_own_file(frame.f_code.co_filename):
            return shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def awaiting_site() -> str | None:
    """Return a line of the author that waits for an installed package, None outside of a loop.

    Clients look up names and connect in tasks of their own, on whose stack the author is not.
    """
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return None
    sites = (_site_before_package(task.get_coro()) for task in tasks)
    return next((site for site in sites if site is not None), None)


def pending_method(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the method of the author a task waits in, and the line, if it has one of these names.

    The outermost one is named, as `MyEnv.score`.
    """
    for task in asyncio.all_tasks():
        step: Any = task.get_coro()
        while step is not None:
            frame = getattr(step, "cr_frame", None)
            if frame is not None and is_named_method(frame, names):
                return method_name(frame), shown(frame.f_code.co_filename, frame.f_lineno)
            step = getattr(step, "cr_await", None)
    return None


def is_named_method(frame: FrameType, names: Iterable[str]) -> bool:
    """Whether a frame runs a function of the author with one of these names."""
    return frame.f_code.co_name in names and is_own_file(frame.f_code.co_filename)


def method_name(frame: FrameType) -> str:
    """Return what a frame runs as `MyEnv.score`, or the bare name of a function."""
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return name if owner is None else f"{type(owner).__name__}.{name}"


def _site_before_package(step: Any) -> str | None:
    """Return the innermost line of the author in what a coroutine awaits, if a package follows."""
    site, is_in_package = None, False
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if frame is not None and is_own_file(frame.f_code.co_filename):
            site, is_in_package = shown(frame.f_code.co_filename, frame.f_lineno), False
        elif frame is None:  # an object's own __await__, behind which Python lets nobody look
            is_in_package |= type(step).__name__ == "coroutine_wrapper"
        else:
            is_in_package |= "site-packages" in frame.f_code.co_filename
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return site if is_in_package else None


def traceback_site(
    trace: TracebackType | None, *, outermost: bool = False, anywhere: bool = False
) -> str | None:
    """Return the line of the author where an exception was raised.

    Args:
        trace: of the exception.
        outermost: where it was caught instead.
        anywhere: a line of this library or of another will do.
    """
    lines = [
        shown(frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(trace)
        if anywhere or is_own_file(frame.filename)
    ]
    if not lines:
        return None
    return lines[0] if outermost else lines[-1]


def code_site(code: CodeType | None) -> str | None:
    """Return where a piece of code begins."""
    return None if code is None else shown(code.co_filename, code.co_firstlineno)


def hook_site(env_cls: type[Any], names: Iterable[str]) -> str | None:
    """Return where a class defines the first of these methods that is the author's own."""
    for name in names:
        method: Callable[..., Any] | None = inspect.getattr_static(env_cls, name, None)
        function = inspect.unwrap(getattr(method, "__func__", method)) if method else None
        if inspect.isfunction(function) and is_own_file(function.__code__.co_filename):
            return code_site(function.__code__)
    return None


def class_site(cls: type[Any]) -> str | None:
    """Return where a class is defined; None for one made without a class statement."""
    try:
        return shown(inspect.getfile(cls), inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return None


def mentioned_site(error: BaseException, others: Iterable[str] = ()) -> str | None:
    """Return where the author defines the method that the message of an exception names.

    The class is looked for among the objects this library worked with when it raised: it may be
    that of the environment or of one of its conversations.

    Args:
        error: with its traceback.
        others: methods to point at when that class does not define the named one itself.
    """
    named = METHOD.findall(str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for cls in [type(value) for value in frame.f_locals.values()]:
            bases = {base.__name__ for base in cls.__mro__}
            methods = [method for class_name, method in named if class_name in bases]
            site = hook_site(cls, [*methods, *others]) if methods else None
            if site is not None:
                return site
    return None

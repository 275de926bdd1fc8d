"""Running code that a model wrote, kept away from everything else on the machine."""

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
    """Return a sandbox of a kind; nothing ever falls back to a weaker one.

    Args:
        kind: one of `KINDS`; None for what the environment variable `ATROPOS_SANDBOX` names, and
            bubblewrap when it is not set.
        limits: used when `run` is given none.
        allow_unbounded_memory: run programs where nothing bounds their memory, too; None for
            whether the environment variable `ATROPOS_SANDBOX_UNBOUNDED_MEMORY` is 1.

    Raises:
        SandboxUnavailableError: it cannot be used here; the message says what to install.
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

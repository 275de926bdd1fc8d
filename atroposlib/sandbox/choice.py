"""Which sandbox is used."""

from __future__ import annotations

import os

from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.containers import CONTAINER, GVISOR, Containers
from atroposlib.sandbox.interface import Sandbox, SandboxLimits, SandboxUnavailableError

__all__ = ["KINDS", "open_sandbox"]

VARIABLE = "ATROPOS_SANDBOX"
KINDS = ("bubblewrap", "container", "gvisor")


def open_sandbox(kind: str | None = None, *, limits: SandboxLimits | None = None) -> Sandbox:
    """Return a sandbox of a kind; nothing ever falls back to a weaker one.

    Args:
        kind: one of `KINDS`; None for what the environment variable `ATROPOS_SANDBOX` names, and
            bubblewrap when it is not set.
        limits: used when `run` is given none.

    Raises:
        SandboxUnavailableError: it cannot be used here; the message says what to install.
    """
    kind = kind or os.environ.get(VARIABLE) or "bubblewrap"
    if kind == "bubblewrap":
        return Bubblewrap(limits=limits)
    for runtime in (CONTAINER, GVISOR):
        if kind == runtime.name:
            return Containers(runtime, limits=limits)
    raise SandboxUnavailableError(f"no sandbox is called {kind!r}; known: {', '.join(KINDS)}")

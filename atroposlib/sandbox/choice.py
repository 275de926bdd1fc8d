"""Which sandbox a machine has."""

from __future__ import annotations

from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.sandbox.interface import Sandbox, SandboxLimits, SandboxUnavailableError

__all__ = ["open_sandbox"]


def open_sandbox(kind: str = "bubblewrap", *, limits: SandboxLimits | None = None) -> Sandbox:
    """Return a sandbox of a kind.

    Raises:
        SandboxUnavailableError: it cannot be used here; the message says what to install.
    """
    if kind == "bubblewrap":
        return Bubblewrap(limits=limits)
    raise SandboxUnavailableError(f"no sandbox is called {kind!r}; known: bubblewrap")

"""Running code that a model wrote, kept away from everything else on the machine."""

from atroposlib.sandbox.choice import open_sandbox
from atroposlib.sandbox.interface import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
    run_python,
)

__all__ = [
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailableError",
    "open_sandbox",
    "run_python",
]

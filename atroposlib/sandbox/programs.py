"""Running a Python program in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping

from atroposlib.sandbox.interface import Sandbox, SandboxLimits, SandboxResult

__all__ = ["PYTHON", "run_python"]

PYTHON = ("/usr/bin/python3", "-I", "-B")
"""The interpreter a sandbox sees: the system's, without the user's packages and settings."""


async def run_python(
    sandbox: Sandbox,
    source: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run a Python program, given as its text.

    Args:
        sandbox: where.
        source: the program; it becomes `main.py` in the sandbox's folder.
        stdin: its standard input.
        files: further files beside it, relative path -> content.
        limits: None for the sandbox's own.

    Raises:
        SandboxError: the sandbox could not be set up.
    """
    return await sandbox.run(
        [*PYTHON, "main.py"],
        files={**(files or {}), "main.py": source},
        stdin=stdin,
        limits=limits,
    )

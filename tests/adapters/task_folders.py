"""Small task folders for tests of agents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atroposlib.workspaces import WorkspaceError, open_workspaces

__all__ = ["NEEDS_WORKSPACES", "write_task"]

TASK_TOML = """version = "1.0"
{artifacts}
[agent]
timeout_sec = {timeout_s}

[verifier]
timeout_sec = 30
"""
READY = 'if [ "$(cat status.txt)" = ready ]; then echo 1; else echo 0; fi'


def _reason() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        open_workspaces()
    except WorkspaceError as error:
        return str(error)
    return None


NEEDS_WORKSPACES = pytest.mark.skipif(_reason() is not None, reason=_reason() or "")


def write_task(
    folder: Path,
    name: str,
    *,
    instruction: str = "Write the word ready to status.txt.",
    check: str = READY,
    solve: str = "echo ready > status.txt",
    files: dict[str, str] | None = None,
    timeout_s: float = 60,
    artifacts: str = "",
) -> Path:
    """Write a task whose verifier prints the reward.

    Args:
        folder: folder of the tasks.
        name: name of the task.
        instruction: what the agent reads.
        check: shell command that prints the reward, in /app of the verifier's box.
        solve: shell command of the solution.
        files: files of /app.
        timeout_s: time limit of the agent.
        artifacts: line of `task.toml` that lists the artifacts.
    """
    copies = "".join(f"COPY {path} .\n" for path in files or {})
    content = {
        "task.toml": TASK_TOML.format(timeout_s=timeout_s, artifacts=artifacts),
        "instruction.md": f"{instruction}\n",
        "environment/Dockerfile": f"FROM debian:bookworm-slim\nWORKDIR /app\n{copies}",
        "tests/test.sh": f"({check}) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": f"{solve}\n",
        **{f"environment/{path}": text for path, text in (files or {}).items()},
    }
    for path, text in content.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder / name

"""Task folders that tests write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["ADDITION", "write_task"]

ADDITION: dict[str, str] = {
    "task.toml": '[environment]\nnetwork_mode = "no-network"\n[agent]\ntimeout_sec = 20\n',
    "instruction.md": "Write the sum of a.txt and b.txt to sum.txt.\n",
    "environment/a.txt": "40\n",
    "environment/b.txt": "2\n",
    "solution/solve.sh": "echo $(($(cat a.txt) + $(cat b.txt))) > sum.txt # the solution\n",
    "tests/test.sh": (
        '[ "$(cat sum.txt)" = 42 ] && [ -e a.txt ] && reward=1\n'
        'echo "${reward:-0}" > /logs/verifier/reward.txt\n'
    ),
}
"""Files of a task, by path."""


def write_task(folder: Path, files: Mapping[str, str | None] = ADDITION) -> Path:
    """Write a task; None leaves out a file of `ADDITION`."""
    for name, text in {**ADDITION, **files}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return folder

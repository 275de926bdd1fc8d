"""Fenced code blocks of the project's Markdown pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "blocks_of", "blocks_of_pages"]

FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block."""

    page: str
    """Path of the page, relative to the repository."""
    line: int
    """Line of the opening fence, from 1."""
    language: str
    text: str

    @property
    def first_line(self) -> str:
        """The first line that is not empty, which names the block in the plan."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


TASK_FOLDERS = "environments/agent_tasks/tasks/"


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of one page, in their order."""
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[2].strip(), match[3])
        for match in FENCE.finditer(text)
    ]


def blocks_of_pages(repository: Path) -> list[Block]:
    """Return the blocks of every tracked Markdown page."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Markdown within a task folder is material of the task.
    pages = sorted(n for n in listed.split("\0") if n and not n.startswith(TASK_FOLDERS))
    return [
        block
        for page in pages
        for block in blocks_of(page, (repository / page).read_text(encoding="utf-8"))
    ]

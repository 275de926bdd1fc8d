"""The processes of a test."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["children"]


def children() -> set[str]:
    """Return the ids of the processes that this thread started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

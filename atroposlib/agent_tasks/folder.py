"""A task in a folder, in the format of Harbor: `task.toml`, `instruction.md`, `environment/`, ...

Source: Harbor, "Task configuration", version 0.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.workspaces.interface import Network

__all__ = ["Artifact", "Task", "load_task", "load_tasks"]


@dataclass(frozen=True)
class Artifact:
    """A file or folder that the verifier sees."""

    source: str
    """Absolute path in the agent's workspace."""
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task; everything that `task.toml` says, with defaults filled in."""

    name: str
    folder: Path
    instruction: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`[metadata]`: difficulty, category, tags, ..."""
    image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    build_timeout_s: float = 600.0
    agent_timeout_s: float = 600.0
    agent_network: Network = Network()
    verifier_timeout_s: float = 600.0
    verifier_network: Network = Network()
    verifier_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_verifier_separate: bool = True
    artifacts: tuple[Artifact, ...] = ()
    """Empty: the whole working directory."""
    solution_env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def environment_folder(self) -> Path:
        return self.folder / "environment"

    @property
    def tests_folder(self) -> Path:
        return self.folder / "tests"

    @property
    def solution_folder(self) -> Path:
        return self.folder / "solution"


def load_task(folder: Path) -> Task:
    """Read one task folder.

    Raises:
        ConfigError: the message has the file, the line and what was expected.
    """
    raise NotImplementedError


def load_tasks(path: Path) -> list[Task]:
    """Read a folder of task folders, by name; or one task folder."""
    raise NotImplementedError

"""Prepared states of a machine, forked for each rollout of an agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import cache_folder
from atroposlib.workspaces.container_engine import ContainerEngine, EngineOptions, as_options
from atroposlib.workspaces.containers import ContainerWorkspaces
from atroposlib.workspaces.interface import (
    NO_NETWORK,
    Base,
    CommandResult,
    FileChange,
    LazyWorkspace,
    Network,
    Output,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    Workspaces,
    WorkspaceSpec,
)
from atroposlib.workspaces.jobs import KUBERNETES, JobEngine, JobOptions, as_job_options
from atroposlib.workspaces.local import LocalWorkspaces

__all__ = [
    "NO_NETWORK",
    "Base",
    "CommandResult",
    "EngineOptions",
    "FileChange",
    "JobOptions",
    "LazyWorkspace",
    "Network",
    "Output",
    "Workspace",
    "WorkspaceContentError",
    "WorkspaceError",
    "WorkspaceSpec",
    "Workspaces",
    "open_workspaces",
]

FOLDER_VARIABLE = "ATROPOS_WORKSPACES_DIR"
KINDS = (
    *("bubblewrap", "podman", "docker", "podman+ssh://USER@HOST", "docker+ssh://USER@HOST"),
    KUBERNETES,
)


def open_workspaces(
    kind: str = "bubblewrap",
    *,
    cache: Path | None = None,
    engine_options: EngineOptions | JobOptions | Mapping[str, Sequence[str]] | None = None,
    warm: int | None = None,
) -> Workspaces:
    """Return workspaces of a kind.

    Args:
        kind: one of `KINDS`.
        cache: folder of prepared bases; None takes the environment variable
            `ATROPOS_WORKSPACES_DIR`, or a folder of the user's cache if it is not set. Container
            engines keep theirs themselves.
        engine_options: further options for the program of a container engine; a mapping has the
            fields of `EngineOptions`, or of `JobOptions` for `kubernetes`.
        warm: number of workspaces per base that are made in advance; None: that of the kind.

    Raises:
        ConfigError: the kind is unknown.
        WorkspaceError: it cannot be used on this machine.
    """
    chosen: dict[str, Any] = {} if warm is None else {"warm": warm}
    if kind == KUBERNETES:
        if isinstance(engine_options, EngineOptions):
            raise ConfigError("workspaces of the kind kubernetes take JobOptions")
        return ContainerWorkspaces(JobEngine(as_job_options(engine_options)), **chosen)
    if isinstance(engine_options, JobOptions):
        raise ConfigError(f"JobOptions are of the kind {KUBERNETES}, not {kind}")
    if kind.startswith(("podman", "docker")):
        return ContainerWorkspaces(ContainerEngine(kind, as_options(engine_options)), **chosen)
    if kind != "bubblewrap":
        raise ConfigError(f"no kind of workspace is called {kind!r}; known: {', '.join(KINDS)}")
    return LocalWorkspaces(cache=cache or _cache_folder(), **chosen)


def _cache_folder() -> Path:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute()
    return cache_folder("workspaces").absolute()

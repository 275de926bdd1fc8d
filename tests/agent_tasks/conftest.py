"""Workspaces of this machine, and a runner on them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.agent_tasks.runner import TaskRunner
from atroposlib.workspaces import WorkspaceError, open_workspaces


@pytest.fixture(scope="session")
def workspaces_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspaces")


@pytest.fixture
async def runner(workspaces_cache: Path) -> AsyncIterator[TaskRunner]:
    try:
        workspaces = open_workspaces(cache=workspaces_cache)
    except WorkspaceError as error:
        pytest.skip(f"workspaces cannot be used on this machine: {error}")
    tasks = TaskRunner(workspaces, variables={"RELEASED": "of this machine"})
    yield tasks
    await tasks.close()
    await workspaces.close()

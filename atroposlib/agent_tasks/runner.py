"""One run of an agent on a task: fork, agent, artifacts, verifier, reward.

    Base ─► fork ─► agent's command ─► artifacts ─► second fork ─► tests/test.sh ─► reward
                          │
                          └ requests ─► proxy ─► engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atroposlib.agent_tasks.folder import Task
from atroposlib.agent_tasks.trace import TraceEvent
from atroposlib.workspaces.interface import Base, FileChange, Network, Workspaces

__all__ = ["AgentCommand", "TaskRun", "TaskRunner"]

Outcome = Literal["done", "agent_timeout", "agent_failed", "verifier_timeout", "verifier_failed"]


@dataclass(frozen=True)
class AgentCommand:
    """What is executed in the workspace for one rollout, placeholders already filled in."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are put into the workspace first, by absolute path."""
    read_only: Mapping[str, Path] = field(default_factory=dict)
    """Folders of this machine with the agent's software, by the path at which they appear."""
    stdin: bytes = b""
    version: str = ""
    forwards: Mapping[int, str] = field(default_factory=dict)
    """See `Network.forwards`."""


@dataclass
class TaskRun:
    """The result of one run."""

    outcome: Outcome
    reward: float
    """0 unless the verifier wrote one."""
    reward_parts: dict[str, float]
    agent_exit_code: int | None
    verifier_exit_code: int | None
    verifier_output: str
    changes: list[FileChange]
    events: list[TraceEvent]
    duration_s: float
    metrics: dict[str, float]
    """`fork_ms`, `agent_s`, `verifier_s`."""


class TaskRunner:
    """Runs agents on tasks; bases are prepared once per task and kept.

    Args:
        workspaces: the kind of workspace.
        max_output_bytes: output of an agent that is kept.
    """

    def __init__(self, workspaces: Workspaces, *, max_output_bytes: int = 1_000_000) -> None: ...

    async def base(self, task: Task) -> Base: ...

    async def run(self, task: Task, agent: AgentCommand | Literal["oracle", "nothing"]) -> TaskRun:
        """Run an agent, the solution of the task, or nothing, and verify the result.

        Raises:
            WorkspaceError: the workspace failed; agent and verifier are not to blame.
            TaskError: the verifier wrote a reward that is not a finite number, or none.
        """

    async def close(self) -> None: ...

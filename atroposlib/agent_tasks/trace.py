"""The record of one agent's rollout: phases, output, turns, changes of files, the verifier.

A trace is JSON, so that it travels with its group: `group["traces"]` has one per sequence of the
group, or None. Sequences of one rollout share its trace, which only the first of them has.
"""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

__all__ = ["TRACES_KEY", "AgentTrace", "TraceEvent"]

TRACES_KEY = "traces"


class TraceEvent(TypedDict, total=False):
    """One event; `at` and `kind` are always present, the others by kind."""

    at: float
    """Seconds since the start of the rollout."""
    kind: Literal["phase", "output", "turn", "tool_call", "tool_result", "error"]
    text: str
    """phase: its name (`fork`, `agent`, `verifier`); output, turn, tool_result, error: the text."""
    stream: str
    """output: `agent/stdout`, `agent/stderr`, `verifier/stdout` or `verifier/stderr`."""
    branch: int
    """turn, tool_call, tool_result: number of the branch, 0 for the first."""
    row: int
    """turn: index of the sequence in the group, relative to the first of the rollout."""
    num_tokens: int
    """turn: number of sampled tokens."""
    call_id: str
    name: str
    """tool_call: name of the tool."""
    arguments: Any
    """tool_call: its arguments as JSON, or the text that is not JSON."""
    exit_code: int | None
    """tool_result: exit code of a command, if the result names one; phase: that of its program."""


class AgentTrace(TypedDict, total=False):
    """The record of one rollout."""

    version: Literal[1]
    task: str
    agent: str
    agent_version: str
    model: str
    instruction: str
    started_at: float
    """Seconds since the epoch."""
    duration_s: float
    events: list[TraceEvent]
    """In the order of time; output beyond a limit is cut, and says so."""
    changes: list[dict[str, Any]]
    """Each `path`, `kind`, `size`, `diff`, as in `FileChange`."""
    verifier: dict[str, Any]
    """`exit_code`, `ended_by`, `duration_s`, `output`."""
    reward: float
    reward_parts: dict[str, float]
    outcome: str
    """`done`, `agent_timeout`, `agent_failed`, `verifier_failed`, ..."""
    metrics: dict[str, float]

"""Groups with traces of agents, of one sequence and of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.viewer.groups import make_group

SAMPLE = Path(__file__).parents[2] / "environments/data/agent_traces_sample/groups.jsonl"
"""A group of the agent `shell`, whose model was scripted."""
TURN_TOKENS = ((34, 120, 12), (18,))
"""Sampled tokens of each turn, for the main agent and its sub-agent."""


def shipped_group() -> dict[str, Any]:
    group: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return group


def make_trace(*, is_solved: bool = True) -> dict[str, Any]:
    """The trace of an agent with a sub-agent, whose four turns are in two sequences."""
    events: list[dict[str, Any]] = [
        {"at": 0.0, "kind": "phase", "text": "fork"},
        {"at": 0.02, "kind": "phase", "text": "agent", "exit_code": 0},
        {"at": 0.3, "kind": "output", "stream": "agent/stdout", "text": "\x1b[1mstarts\x1b[0m\n"},
        turn(1.9, "I look at the files.", 34),
        call(1.9, "c1", "shell", {"command": "ls -la"}),
        {**result(2.2, "c1", "total 0"), "exit_code": 0},
        turn(4.1, "A sub-agent writes the test.", 120),
        call(4.1, "c2", "task", "write a test"),
        {**turn(5.0, "Writing it.", 18), "branch": 1, "row": 1},
        {**call(5.0, "c1", "shell", {"command": "pytest -q"}), "branch": 1},
        {**result(6.4, "c1", "\x1b[31m1 failed\x1b[0m"), "branch": 1, "exit_code": 1},
        result(6.9, "c2", "the test is written"),
        {"at": 7.0, "kind": "error", "text": "an empty answer; asked again"},
        turn(8.0, "Done.", 12),
        {"at": 8.1, "kind": "output", "stream": "agent/stderr", "text": "\nall done\n"},
        {"at": 8.4, "kind": "phase", "text": "verifier", "exit_code": int(not is_solved)},
    ]
    return {
        "version": 1,
        "task": "greet-by-name",
        "agent": "mini-swe-agent",
        "agent_version": "1.2",
        "model": "policy",
        "instruction": "Greet by name.",
        "started_at": 1764000000.25,
        "duration_s": 9.6,
        "events": events,
        "changes": [
            {
                "path": "/app/greeting.py",
                "kind": "modified",
                "size": 40,
                "diff": "--- /app/greeting.py\n+++ /app/greeting.py\n@@ -1 +1 @@\n-hello\n+hi\n",
            },
            {"path": "/app/old.bin", "kind": "removed", "size": 0, "diff": None},
        ],
        "verifier": {
            "exit_code": int(not is_solved),
            "ended_by": "exit",
            "duration_s": 1.1,
            "output": "\x1b[32m2 passed\x1b[0m\n",
        },
        "reward": float(is_solved),
        "reward_parts": {"tests": float(is_solved)},
        "outcome": "done",
        "metrics": {"fork_ms": 21.4},
    }


def turn(at: float, text: str, num_tokens: int) -> dict[str, Any]:
    fields = {"branch": 0, "row": 0, "num_tokens": num_tokens}
    return {"at": at, "kind": "turn", "text": text, **fields}


def call(at: float, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    known = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"at": at, "kind": "tool_call", "branch": 0, **known}


def result(at: float, call_id: str, text: str) -> dict[str, Any]:
    return {"at": at, "kind": "tool_result", "branch": 0, "call_id": call_id, "text": text}


def traced_group() -> dict[str, Any]:
    """Two rollouts of that agent, each of two sequences with other ids."""
    rows = [row for start in (1, 300) for row in rollout_rows(start)]
    return {
        "tokens": [tokens for tokens, _, _ in rows],
        "masks": [masks for _, masks, _ in rows],
        "scores": [1.0, 1.0, 0.0, 0.0],
        "inference_logprobs": [logprobs for _, _, logprobs in rows],
        "advantages": [[0.5] * len(tokens) for tokens, _, _ in rows],
        "ref_logprobs": None,
        "reward_parts": [{"tests": 1.0}, {"tests": 1.0}, {"tests": 0.0}, {"tests": 0.0}],
        "finish_reasons": ["stop", "stop", "stop", "length"],
        "traces": [make_trace(), None, make_trace(is_solved=False), None],
        "group_overrides": {"group_size": 4},
        "generation_params": {"temperature": 0.7},
        "env_name": "agent_tasks",
        "policy_version": 3,
    }


def rollout_rows(start: int) -> list[tuple[list[int], list[int], list[float]]]:
    rows = []
    for number, counts in enumerate(TURN_TOKENS):
        tokens: list[int] = []
        masks: list[int] = []
        logprobs: list[float] = []
        for k, count in enumerate(counts):
            prompt = [start + 20 * number + k] * (5 + k)
            sampled = [start + 50 + (i * 7 + k) % 100 for i in range(count)]
            tokens += prompt + sampled
            masks += [-100] * len(prompt) + sampled
            logprobs += [1.0] * len(prompt) + [-0.01 * (i % 30) - 0.1 for i in range(count)]
        rows.append(([*tokens, 9, 9], [*masks, -100, -100], [*logprobs, 1.0, 1.0]))
    return rows


def chat_group() -> dict[str, Any]:
    """A group without traces, whose rollouts are chats with tools."""
    group = make_group("three plus four", ["7", "it is 8"], [1.0, -0.5], env_name="sums")
    tool_call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'},
    }
    group["messages"][1][1]["tool_calls"] = [tool_call]
    group["messages"][1].append({"role": "tool", "tool_call_id": "t1", "content": "7"})
    return group

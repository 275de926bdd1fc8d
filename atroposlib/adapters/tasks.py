"""Tasks in folders, worked on by agents left as they are.

    item: a task ─► fork of its base ─► the agent's command ─► verifier ─► reward
                                              └─► requests to 127.0.0.1 of the box ─► agent proxy

The agents run in the boxes of their workspaces. Every sequence of the proxy's session is a row of
the group, so sub-agents and rewritten histories are trained with the reward of their rollout.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import random
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

from pydantic import Field, model_validator

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    AgentEndpoint,
    AgentEpisode,
    EpisodeEnd,
    Item,
)
from atroposlib.agent_tasks.agents import (
    STATE_FOLDER,
    Agent,
    AgentSettings,
    ModelAddress,
    agent_of_item,
    find_agent,
)
from atroposlib.agent_tasks.folder import Task, load_tasks
from atroposlib.agent_tasks.runner import Outcome, TaskRun, TaskRunner
from atroposlib.agent_tasks.trace import AgentTrace, TraceEvent, sendable
from atroposlib.envs.conversation import ChatMessage
from atroposlib.envs.server_handling.proxy import AgentTurn
from atroposlib.errors import ConfigError, EpisodeFailedError, TaskError
from atroposlib.workspaces import open_workspaces
from atroposlib.workspaces.interface import Network, WorkspaceError, Workspaces

__all__ = ["TaskEpisode", "TasksAdapter", "TasksArgs"]

MODEL_PORT = 47100
"""Port of every box on which the model answers."""
MAX_EVENT_CHARACTERS = 20_000
"""Text of one event of a trace; longer ones are cut."""
UNSHOWN = (f"{STATE_FOLDER}/", "/logs/")
"""Paths whose changes are no work of the agent."""
EXIT_CODE = re.compile(
    r"(?:exit[ _]code|returncode|exited with code)\"?[:= ]+(-?\d{1,3})\b", re.IGNORECASE
)


class TasksArgs(AdapterArgs):
    """Which agents work on which tasks, and in which workspaces."""

    agent: str | list[str] = Field(
        "shell",
        description="Name of a preset, or a command with placeholders such as {instruction}.",
    )
    agent_prefix: str | None = Field(
        None,
        description="Folder of the agent's software: a virtual environment, or the parent of "
        "node_modules; None: what PATH and this interpreter have.",
    )
    agent_env: dict[str, str] = Field(
        default_factory=dict, description="Variables of the agent's process, with placeholders."
    )
    max_agent_turns: int = Field(
        30, ge=1, le=10_000, description="Limit of the agent's turns, if the agent has one."
    )
    agents: list[AgentSettings] = Field(
        default_factory=list,
        description="Several agents with weights in place of `agent`; each item has one of them.",
    )
    workspaces: str = Field(
        "bubblewrap",
        description="Kind of the workspaces: bubblewrap, podman, docker, kubernetes, or an engine "
        "of another machine as in podman+ssh://USER@HOST.",
    )
    engine_options: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Further options for the program of a container engine, by command; for "
        "kubernetes, the fields of JobOptions.",
    )
    warm: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Number of workspaces per task that are made in advance; None: that of the "
        "kind.",
    )
    tasks: list[str] = Field(
        default_factory=lambda: ["*"], description="Names or patterns of the tasks to train on."
    )
    eval_tasks: list[str] = Field(
        default_factory=list,
        description="Names or patterns of tasks that are kept for evaluations; none: evaluations "
        "use the tasks of the training.",
    )
    timeout_scale: float = Field(
        1.0, gt=0, le=100, description="Factor of the time limits of agents and verifiers."
    )
    network: Literal["none", "allowlist", "public"] | None = Field(
        None, description="Network of the agents; None: that of each task."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list, description="Hosts that agents reach with network=allowlist."
    )
    max_concurrent: int = Field(
        16, ge=1, le=4096, description="Number of rollouts that run at the same time."
    )
    shuffle: bool = Field(True, description="Whether the order of tasks is shuffled by the seed.")
    traces: bool = Field(
        True, description="Whether groups carry the records of their rollouts, for the pages."
    )
    tool_parser: str = Field("hermes", description="Format of the model's tool calls.")

    @model_validator(mode="after")
    def _check_agents(self) -> TasksArgs:
        own = {"agent", "agent_prefix", "agent_env", "max_agent_turns"} & self.model_fields_set
        if self.agents and own:
            raise ValueError(f"{', '.join(sorted(own))} and agents exclude each other")
        if self.allowed_hosts and self.network != "allowlist":
            raise ValueError("allowed_hosts needs network=allowlist")
        return self

    @property
    def agent_settings(self) -> list[AgentSettings]:
        one = AgentSettings(
            agent=self.agent,
            prefix=self.agent_prefix,
            env=self.agent_env,
            max_turns=self.max_agent_turns,
        )
        return self.agents or [one]


class TaskEpisode(AgentEpisode):
    """One rollout of an agent on a task."""

    records_turns = True
    fixes_sampling = True

    def __init__(self, adapter: TasksAdapter, item: Item) -> None:
        self._adapter = adapter
        self._item = item
        self.tool_parser = adapter.args.tool_parser

    async def run(self, endpoint: AgentEndpoint) -> EpisodeEnd:
        adapter = self._adapter
        task = adapter.task(self._item["task"])
        agent = adapter.agent(self._item["agent"])
        address = ModelAddress(
            port=MODEL_PORT,
            target=urllib.parse.urlsplit(endpoint.base_url).netloc,
            api_key=endpoint.api_key,
            model=endpoint.model,
            max_tokens=endpoint.max_tokens,
            temperature=endpoint.temperature,
        )
        try:
            base = await adapter.runner.base(task)
            command = agent.command_for(task, address, workdir=base.spec.workdir)
            started_at = time.time()
            run = await adapter.runner.run(task, command)
        except (WorkspaceError, TaskError) as error:
            raise EpisodeFailedError(f"{adapter.where}: {task.name}: {error}") from error
        turns = endpoint.turns()
        if not turns:
            raise EpisodeFailedError(
                f"{adapter.where}: {task.name}: agent {agent.name} did not ask the model: "
                f"{run.error or 'it ended'}; expected requests to OPENAI_BASE_URL, "
                f"ANTHROPIC_BASE_URL or {{base_url}}; its output ends with {last_output(run)!r}"
            )
        trace = None
        if adapter.args.traces:
            trace = trace_of(task, agent, endpoint, run, turns, started_at)
        return EpisodeEnd(
            reward=parts_of_reward(run),
            metrics=metrics_of(run, turns, agent if len(adapter.agents) > 1 else None),
            is_truncated=run.outcome == "agent_timeout",
            trace=trace,
        )


class TasksAdapter(Adapter):
    """The tasks of a folder, with the agents that work on them."""

    args_cls = TasksArgs
    default_settings: ClassVar[Mapping[str, Any]] = {
        "max_token_length": 8192,
        "conversation_timeout_s": 7200.0,
        "max_turn_tokens": 1024,
    }
    args: TasksArgs

    def __init__(self, name: str, args: TasksArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.where = f"tasks:{name}"
        self.max_concurrent = args.max_concurrent
        self.agents: list[Agent] = []
        self._tasks: dict[str, Task] = {}
        self._train: list[str] = []
        self._eval: list[str] = []
        self._workspaces: Workspaces | None = None
        self._runner: TaskRunner | None = None

    @property
    def runner(self) -> TaskRunner:
        if self._runner is None:
            raise RuntimeError(f"{self.where} is not open; call `open` first")
        return self._runner

    async def open(self) -> None:
        settings = self.args.agent_settings
        self.agents = [
            find_agent(each, "agent" if len(settings) == 1 else f"agents[{i}]")
            for i, each in enumerate(settings)
        ]
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ConfigError(f"{self.where}: agents: {names}: give each a `name` of its own")
        tasks = [self._adapted(task) for task in load_tasks(self.name)]
        self._tasks = {task.name: task for task in tasks}
        self._eval = self._selected(self.args.eval_tasks, "eval_tasks")
        chosen = self._selected(self.args.tasks, "tasks")
        self._train = [name for name in chosen if name not in set(self._eval)]
        if not self._train:
            raise ConfigError(f"{self.where}: no task is left to train on; see tasks, eval_tasks")
        self._workspaces = open_workspaces(
            self.args.workspaces,
            engine_options=self.args.engine_options or None,
            warm=self.args.warm,
        )
        self._runner = TaskRunner(self._workspaces)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()
        if self._workspaces is not None:
            await self._workspaces.close()

    async def item(self, index: int) -> Item:
        epoch, position = divmod(index, len(self._train))
        order = self._order(epoch)
        agent = agent_of_item(self.agents, seed=self.seed, index=index)
        return {"task": order[position], "agent": agent.name}

    async def eval_items(self, limit: int) -> Sequence[Item]:
        pairs = [
            {"task": name, "agent": agent.name}
            for name in self._eval or self._train
            for agent in self.agents
        ]
        return pairs[:limit]

    def start(self, item: Item) -> TaskEpisode:
        return TaskEpisode(self, item)

    def gold_answer(self, item: Item) -> Sequence[str] | None:
        """Return the solution as one command of the agent `shell`, if it is a single file."""
        solution = self.task(item["task"]).solution_folder
        files = [path.name for path in solution.rglob("*")] if solution.is_dir() else []
        if item["agent"] != "shell" or files != ["solve.sh"]:
            return None
        script = (solution / "solve.sh").read_text("utf-8")
        return None if "```" in script else [f"```sh\n{script}\n```", "Done."]

    def agent(self, name: str) -> Agent:
        """Return an agent, which a stored item may name although it was removed.

        Raises:
            EpisodeFailedError: it is not among the agents.
        """
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise EpisodeFailedError(f"{self.where} has no agent {name!r}")

    def task(self, name: str) -> Task:
        """Return a task, which a stored item may name although it was removed.

        Raises:
            EpisodeFailedError: it is not in the folder.
        """
        if name not in self._tasks:
            raise EpisodeFailedError(f"{self.where} has no task {name!r}")
        return self._tasks[name]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an adapter lives as long as its process
    def _order(self, epoch: int) -> list[str]:
        order = list(self._train)
        if self.args.shuffle:
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return order

    def _selected(self, patterns: Sequence[str], argument: str) -> list[str]:
        for pattern in patterns:
            if not fnmatch.filter(self._tasks, pattern):
                raise ConfigError(
                    f"{self.where}: {argument}: {pattern!r} matches none of its "
                    f"{len(self._tasks)} tasks: {', '.join(list(self._tasks)[:20])}"
                )
        return [
            name
            for name in self._tasks
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]

    def _adapted(self, task: Task) -> Task:
        changes: dict[str, Any] = {}
        scale = self.args.timeout_scale
        if scale != 1:
            changes["agent_timeout_s"] = task.agent_timeout_s * scale
            changes["verifier_timeout_s"] = task.verifier_timeout_s * scale
        if self.args.network is not None:
            changes["agent_network"] = Network(
                self.args.network, allowed_hosts=tuple(self.args.allowed_hosts)
            )
        return dataclasses.replace(task, **changes)


def parts_of_reward(run: TaskRun) -> float | dict[str, float]:
    """Return the reward; as its parts if their mean or their sum is the reward."""
    parts = run.reward_parts
    if not parts:
        return run.reward
    for scale in (1.0, 1.0 / len(parts)):
        if abs(sum(parts.values()) * scale - run.reward) < 1e-9 * max(1.0, abs(run.reward)):
            return {name: value * scale for name, value in parts.items()}
    return run.reward


def metrics_of(run: TaskRun, turns: Sequence[AgentTurn], agent: Agent | None) -> dict[str, float]:
    """Return the measurements of a rollout; with `agent`, its reward under the agent's name."""
    metrics = {
        **run.metrics,
        "num_turns": float(len(turns)),
        "num_rows": float(len({turn.row for turn in turns if turn.row is not None})),
        **{f"outcome/{name}": float(name == run.outcome) for name in get_args(Outcome)},
    }
    if agent is not None:
        metrics[f"reward/{agent.name}"] = run.reward
    return metrics


def last_output(run: TaskRun) -> str:
    texts = [event["text"] for event in run.events if event["kind"] == "output"]
    return "".join(texts).strip()[-500:]


def trace_of(
    task: Task,
    agent: Agent,
    endpoint: AgentEndpoint,
    run: TaskRun,
    turns: Sequence[AgentTurn],
    started_at: float,
) -> AgentTrace:
    """Return the record of a rollout: what its workspace and its model saw, by time."""
    events = [*run.events, *events_of(turns, started_at)]
    verifier = next(
        (e for e in reversed(run.events) if e["kind"] == "phase" and e["text"] == "verifier"), None
    )
    trace: AgentTrace = {
        "version": 1,
        "task": task.name,
        "agent": agent.name,
        "agent_version": agent.software.version,
        "model": endpoint.model,
        "instruction": task.instruction,
        "started_at": started_at,
        "duration_s": run.duration_s,
        "events": sorted(events, key=lambda event: event["at"]),
        "changes": [
            change._asdict() for change in run.changes if not change.path.startswith(UNSHOWN)
        ],
        "verifier": {
            "exit_code": run.verifier_exit_code,
            "ended_by": "wall_time" if run.outcome == "verifier_timeout" else "exit",
            "duration_s": run.metrics.get("verifier_s", 0.0),
            "output": run.verifier_output,
        }
        if verifier is not None
        else {},
        "reward": run.reward,
        "reward_parts": run.reward_parts,
        "outcome": run.outcome,
        "metrics": run.metrics,
    }
    return cast(AgentTrace, sendable(trace))


def events_of(turns: Sequence[AgentTurn], started_at: float) -> Iterator[TraceEvent]:
    """Yield what each request added to its chat, and the turn that answered it."""
    for turn in turns:
        branch = turn.row or 0
        asked, answered = turn.asked_at - started_at, turn.answered_at - started_at
        if turn.is_continuation:
            for message in turn.added:
                yield result_event(message, at=asked, branch=branch)
        yield {
            "at": answered,
            "kind": "turn",
            "text": cut(text_of(turn.reply)),
            "branch": branch,
            "row": branch,
            "num_tokens": turn.num_tokens,
        }
        for call in turn.reply.get("tool_calls") or ():
            function = call.get("function") or {}
            yield {
                "at": answered,
                "kind": "tool_call",
                "branch": branch,
                "call_id": str(call.get("id", "")),
                "name": str(function.get("name", "")),
                "arguments": arguments_of(function.get("arguments")),
            }


def result_event(message: ChatMessage, *, at: float, branch: int) -> TraceEvent:
    text = text_of(message)
    event: TraceEvent = {"at": at, "kind": "tool_result", "text": cut(text), "branch": branch}
    if message.get("tool_call_id"):
        event["call_id"] = str(message["tool_call_id"])
    if found := EXIT_CODE.search(text[:500]):
        event["exit_code"] = int(found.group(1))
    return event


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as JSON; text that is not JSON remains text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return cut(arguments)


def cut(text: str) -> str:
    if len(text) <= MAX_EVENT_CHARACTERS:
        return text
    return (
        f"{text[:MAX_EVENT_CHARACTERS]}\n[{len(text) - MAX_EVENT_CHARACTERS} characters left out]"
    )

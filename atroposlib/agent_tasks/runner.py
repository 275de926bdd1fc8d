"""One run of an agent on a task: fork, agent, artifacts, verifier, reward.

    Base ─► fork ─► agent's command ─► artifacts ─► second fork ─► tests/test.sh ─► reward
                          │
                          └ requests ─► proxy ─► engine

The agent never sees `tests/` and `solution/`: they appear in the second fork only, for the command
that verifies. No program of the agent runs in the second fork before the verifier starts.
"""

from __future__ import annotations

import asyncio
import codecs
import fnmatch
import io
import json
import logging
import math
import os
import re
import shlex
import tarfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from atroposlib.agent_tasks.folder import Artifact, Task, resolve_variables
from atroposlib.agent_tasks.trace import TraceEvent
from atroposlib.errors import ConfigError, TaskError
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces.interface import (
    Base,
    CommandResult,
    FileChange,
    Network,
    Output,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
    Workspaces,
    WorkspaceSpec,
)

__all__ = [
    "AgentCommand",
    "TaskRun",
    "TaskRunner",
    "changed_sources",
    "released_variables",
    "task_reward",
]

logger = logging.getLogger(__name__)

Outcome = Literal["done", "agent_timeout", "agent_failed", "verifier_timeout", "verifier_failed"]

VARIABLES = "ATROPOS_TASK_VARIABLES"
MEBIBYTE = 2**20
MEMORY_BYTES = 2048 * MEBIBYTE
DISK_BYTES = 1024 * MEBIBYTE
MAX_PROCESSES = 512
MAX_ARTIFACT_BYTES = 256 * MEBIBYTE
"""Size of the artifacts, which are in memory between the two workspaces."""
_CPUS = 4
_MAX_PRINTED_BYTES = 16 * MEBIBYTE
"""Output after which a program is ended; less is kept."""
_MAX_REWARD_BYTES = 64 * 1024
_MAX_REWARD = 1e6
_MAX_PARTS = 100
_MAX_EVENTS = 10_000
"""Pieces of output of one program."""
_MERGE_S = 0.05
"""Pieces of output within this time become one event."""
_CLEANUP_S = 30.0
_MOST_CHANGES = 1000
"""Changes that a workspace lists."""
LOG_FOLDERS = ("logs/agent", "logs/artifacts", "logs/verifier")
SYSTEM_FOLDERS = (
    *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/opt"),
    *("/proc", "/root", "/run", "/sbin", "/sys", "/usr"),
)
"""Folders with programs and settings that a verifier executes or reads."""
HIDDEN_FOLDERS = ("/tests", "/solution", "/logs/verifier")
"""Folders of the verifier, never taken from the agent."""
BASH = "/bin/bash"
"""Not looked up on PATH, on which an agent may have put one of its own."""
_USER_PROGRAMS = re.compile(r"/(?:root|home/[^/]+)/\.local(?=/|$)")
"""Folder of programs and Python packages of a user, which come first on PATH."""
_HOMES = re.compile(r"/root|/home(?:/[^/]+)?")
_REMOVE = """
rm -rf -- "$@" 2>/dev/null && exit
for path do
  path=${path%/}
  rm -rf -- "$path" 2>/dev/null && continue
  folder=${path%/*}/
  mode=$(stat -c %a -- "$folder") && chmod u+rwx -- "$folder" || exit
  [ -L "$path" ] || chmod -R u+rwX -- "$path"
  rm -rf -- "$path" && chmod "$mode" -- "$folder" || exit
done
"""
"""Removes files, also those of folders that their owner cannot write to."""
_KEEP_USER_PROGRAMS = """
mkdir /.kept || exit
number=0
for folder in /root/.local /home/*/.local; do
  number=$((number + 1))
  [ ! -d "$folder" ] || mv "$folder" "/.kept/$number" || exit
  set -- "$@" "$folder"
done
xargs -0 sh -c REMOVE sh || exit
number=0
for folder in "$@"; do
  number=$((number + 1))
  [ ! -d "/.kept/$number" ] || { mkdir -p "${folder%/*}" && mv "/.kept/$number" "$folder"; } || exit
done
rm -r /.kept
""".replace("REMOVE", shlex.quote(_REMOVE))
_MAX_DEPTH = 128
"""Names in the path of an artifact; longer paths are left out."""


@dataclass(frozen=True)
class AgentCommand:
    """A program that is executed in the workspace for one rollout; no placeholders are left."""

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
    """The numbers of `reward.json` other than `reward`."""
    agent_exit_code: int | None
    verifier_exit_code: int | None
    verifier_output: str
    changes: list[FileChange]
    events: list[TraceEvent]
    duration_s: float
    metrics: dict[str, float]
    """`fork_ms`, `agent_s`, `verifier_s`, `artifact_bytes`."""
    error: str = ""
    """Why the outcome is not `done`; empty if it is."""


class TaskRunner:
    """Runs agents on tasks; bases are prepared once per task and kept.

    Args:
        workspaces: the kind of workspace.
        max_output_bytes: output of an agent, and of a verifier, that is kept.
        variables: variables of the machine that tasks may name as `${NAME}`; None takes those
            that `ATROPOS_TASK_VARIABLES` lists.
    """

    def __init__(
        self,
        workspaces: Workspaces,
        *,
        max_output_bytes: int = 1_000_000,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._workspaces = workspaces
        self._max_output_bytes = max_output_bytes
        self._variables = released_variables(os.environ) if variables is None else variables
        self._bases: dict[Path, Base] = {}
        self._locks: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def base(self, task: Task) -> Base:
        """Return the prepared state of a task; waits while it is built, once per task.

        Raises:
            WorkspaceError: the build failed.
            ConfigError: this kind of workspace cannot build it.
        """
        key = task.folder.resolve()
        async with self._locks[key]:
            if key not in self._bases:
                await asyncio.to_thread(_check_readable, task)
                self._bases[key] = await self._workspaces.prepare(_spec(task))
            return self._bases[key]

    async def run(self, task: Task, agent: AgentCommand | Literal["oracle", "nothing"]) -> TaskRun:
        """Run an agent, the solution of the task, or nothing, and verify the result.

        A result that cannot be verified has the outcome `verifier_failed`, or `verifier_timeout`,
        and no reward. Cancelling ends all processes and removes the workspaces.

        Raises:
            WorkspaceError: the workspace failed; agent and verifier are not to blame.
            TaskError: the oracle was asked for and the task has no solution.
            ConfigError: a variable of the task is missing on this machine.
        """
        return (await self.run_repeatedly(task, agent, repeats=1))[0]

    async def run_repeatedly(
        self, task: Task, agent: AgentCommand | Literal["oracle", "nothing"], *, repeats: int
    ) -> list[TaskRun]:
        """Run an agent once and verify its result several times, each in a workspace of its own.

        Raises: as `run`.
        """
        log = _EventLog(self._max_output_bytes)
        self._variables_of(task, task.verifier_env)  # a missing one ends the run before it starts
        work = await self._work(task, agent, log)
        return [await self._verified(task, work, log.copy()) for _ in range(repeats)]

    async def close(self) -> None:
        """Close the bases; the workspaces stay open for other users."""
        bases, self._bases = list(self._bases.values()), {}
        for base in bases:
            await base.close()

    async def _work(
        self, task: Task, agent: AgentCommand | Literal["oracle", "nothing"], log: _EventLog
    ) -> _Work:
        command = self._command(task, agent)
        base = await self.base(task)
        log.start_phase("fork")
        async with _forked(base) as workspace:
            work = _Work(fork_ms=1000 * log.phase_s())
            await workspace.put(_archive({}, _folders(task)))
            if command is not None:
                log.start_phase("agent")
                await self._run_agent(task, command, workspace, work, log)
                work.agent_s = log.phase_s()
            log.start_phase("artifacts")
            await _collect(task, workspace, work)
        return work

    def _command(
        self, task: Task, agent: AgentCommand | Literal["oracle", "nothing"]
    ) -> AgentCommand | None:
        if agent == "nothing":
            return None
        if isinstance(agent, AgentCommand):
            _check_mounts(task, agent.read_only.values())
            return agent
        if not (task.solution_folder / "solve.sh").is_file():
            raise TaskError(f"{task.name} has no {task.solution_folder / 'solve.sh'} to run")
        env = self._variables_of(task, task.solution_env)
        return AgentCommand(
            name="oracle",
            command=("bash", "/solution/solve.sh"),
            env={"DEBIAN_FRONTEND": "noninteractive", **env},
            read_only={"/solution": task.solution_folder},
        )

    async def _run_agent(
        self, task: Task, agent: AgentCommand, workspace: Workspace, work: _Work, log: _EventLog
    ) -> None:
        if agent.files:
            files = {path.lstrip("/"): text.encode() for path, text in agent.files.items()}
            await workspace.put(_archive(files))
        result = await workspace.run(
            agent.command,
            env={**self._variables_of(task, task.env), **agent.env},
            cwd=task.workdir,
            stdin=agent.stdin,
            network=replace(task.agent_network, forwards=agent.forwards),
            read_only=agent.read_only,
            limits=_limits(task, task.agent_timeout_s),
            on_output=log.output("agent"),
        )
        log.end_phase(result)
        work.agent_exit_code = result.exit_code
        if result.ended_by == "wall_time":
            work.outcome = "agent_timeout"
            work.error = f"the agent was ended after {task.agent_timeout_s:g} s"
        elif not result.is_success:
            work.outcome, work.error = "agent_failed", f"the agent {_ending(result)}"
        if work.error:
            log.error(work.error)
            work.reported = work.error

    async def _verified(self, task: Task, work: _Work, log: _EventLog) -> TaskRun:
        """Verify the artifacts in a workspace of its own."""
        run = TaskRun(
            outcome=work.outcome,
            reward=0.0,
            reward_parts={},
            agent_exit_code=work.agent_exit_code,
            verifier_exit_code=None,
            verifier_output="",
            changes=work.changes,
            events=log.events,
            duration_s=0.0,
            metrics={
                "fork_ms": work.fork_ms,
                "agent_s": work.agent_s,
                "artifact_bytes": float(len(work.archive or b"")),
            },
            error=work.error,
        )
        if work.archive is not None:
            log.start_phase("verifier")
            await self._verify(task, work, log, run)
            run.metrics["verifier_s"] = log.phase_s()
        if run.error and run.error != work.reported:
            log.error(run.error)
        run.duration_s = log.now()
        return run

    async def _verify(self, task: Task, work: _Work, log: _EventLog, run: TaskRun) -> None:
        env = self._variables_of(task, {**task.env, **task.verifier_env})
        async with _forked(await self.base(task)) as workspace:
            try:
                await _restore(task, workspace, work)
            except WorkspaceContentError as error:
                run.outcome = "agent_failed"
                run.error = f"the artifacts do not fit into a workspace: {error}"
                return
            result = await workspace.run(
                (BASH, "/tests/test.sh"),
                # The user's site-packages may be the agent's.
                env={**({"PYTHONNOUSERSITE": "1"} if _has_user_programs(task) else {}), **env},
                cwd=task.workdir,
                network=task.verifier_network,
                read_only={"/tests": task.tests_folder},
                limits=_limits(task, task.verifier_timeout_s),
                on_output=log.output("verifier"),
            )
            log.end_phase(result)
            run.verifier_exit_code = result.exit_code
            run.verifier_output = log.text("verifier")
            if result.ended_by == "wall_time":
                run.outcome = "verifier_timeout"
                run.error = f"tests/test.sh was ended after {task.verifier_timeout_s:g} s"
                return
            try:
                run.reward, run.reward_parts = await _read_reward(workspace)
            except (ValueError, WorkspaceContentError) as error:
                run.outcome = "verifier_failed"
                run.error = f"{error}; tests/test.sh {_ending(result)}"

    def _variables_of(self, task: Task, env: Mapping[str, str]) -> dict[str, str]:
        return resolve_variables(env, self._variables, str(task.folder / "task.toml"))


def released_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `ATROPOS_TASK_VARIABLES` lists, of those that are set."""
    names = (name.strip() for name in environ.get(VARIABLES, "").split(","))
    return {name: environ[name] for name in names if name in environ}


def task_reward(text: str, *, is_json: bool) -> tuple[float, dict[str, float]]:
    """Return the reward and its other parts, from the text of `reward.json` or `reward.txt`.

    The reward is the number `reward`, or without it the mean of all numbers.

    Raises:
        ValueError: a number is missing, not finite, or larger than 1,000,000.
    """
    name = "reward.json" if is_json else "reward.txt"
    try:
        value = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}: expected a number, got {text.strip()[:80]!r}") from None
    numbers = value if isinstance(value, dict) else {"reward": value}
    if not 0 < len(numbers) <= _MAX_PARTS:
        raise ValueError(f"{name}: expected 1 to {_MAX_PARTS} numbers, got {len(numbers)}")
    for key, number in numbers.items():
        is_number = isinstance(number, (int, float)) and abs(number) <= _MAX_REWARD
        if not is_number or len(key) > 100:
            raise ValueError(
                f"{name}: expected finite numbers up to {_MAX_REWARD:,.0f}, got {key[:80]!r}: "
                f"{str(number)[:80]}"
            )
    parts = {key: float(number) for key, number in numbers.items()}
    reward = parts.pop("reward", None)
    return (sum(parts.values()) / len(parts) if reward is None else reward), parts


def changed_sources(
    changes: Sequence[FileChange], workdir: str, *, is_verifier_separate: bool
) -> list[FileChange]:
    """Return the changes that the verifier sees if the task names no artifacts."""
    return [
        change
        for change in changes
        if not _is_below(change.path, HIDDEN_FOLDERS)
        and (
            not is_verifier_separate
            or (
                workdir != "/"
                and _is_below(change.path, (workdir,))
                and not _is_user_program(change.path, workdir)
            )
            or not _is_below(change.path, SYSTEM_FOLDERS)
        )
    ]


@dataclass
class _Work:
    """The files that an agent left, and how it ended."""

    fork_ms: float
    outcome: Outcome = "done"
    error: str = ""
    reported: str = ""
    """The error that is among the events already."""
    agent_s: float = 0.0
    agent_exit_code: int | None = None
    changes: list[FileChange] = field(default_factory=list)
    archive: bytes | None = None
    """The artifacts; None if they are too large."""
    removed: list[str] = field(default_factory=list)
    """Paths of the base that the agent removed, or that the artifacts replace."""


class _LastOutput(NamedTuple):
    stream: str
    until: float


class _EventLog:
    """Events of one run; output beyond a number of bytes is counted, not kept."""

    def __init__(self, max_output_bytes: int) -> None:
        self.events: list[TraceEvent] = []
        self._started = time.monotonic()
        self._phase_started = 0.0
        self._max_output_bytes = max_output_bytes
        self._num_bytes: dict[str, int] = {}
        self._num_events: dict[str, int] = {}
        self._last: _LastOutput | None = None

    def copy(self) -> _EventLog:
        copied = _EventLog(self._max_output_bytes)
        copied.events = [event.copy() for event in self.events]
        copied._started = self._started
        return copied

    def now(self) -> float:
        return time.monotonic() - self._started

    def phase_s(self) -> float:
        return self.now() - self._phase_started

    def start_phase(self, name: str) -> None:
        self._phase_started = self.now()
        self._last = None
        self.events.append({"at": self._phase_started, "kind": "phase", "text": name})

    def end_phase(self, result: CommandResult) -> None:
        phase = next(event for event in reversed(self.events) if event["kind"] == "phase")
        phase["exit_code"] = result.exit_code

    def error(self, text: str) -> None:
        self.events.append({"at": self.now(), "kind": "error", "text": text})

    def output(self, program: str) -> Callable[[Output], None]:
        """Return a receiver for the output of a program that starts now."""
        start = self.now()
        decode = {
            stream: codecs.getincrementaldecoder("utf-8")("replace").decode
            for stream in ("stdout", "stderr")
        }

        offset = math.inf

        def receive(piece: Output) -> None:
            # A piece has the time since its program started, which is later than `start`.
            nonlocal offset
            offset = max(start, min(offset, self.now() - piece.time_s))
            self._receive(
                program, f"{program}/{piece.stream}", offset + piece.time_s,
                decode[piece.stream](piece.data), len(piece.data),
            )  # fmt: skip

        return receive

    def text(self, program: str) -> str:
        """Return the output of a program that was kept."""
        return "".join(
            event["text"]
            for event in self.events
            if event["kind"] == "output" and event["stream"].startswith(f"{program}/")
        )

    def _receive(self, program: str, stream: str, at: float, text: str, size: int) -> None:
        before = self._num_bytes.get(program, 0)
        self._num_bytes[program] = before + size
        number = self._num_events.get(program, 0)
        if before >= self._max_output_bytes or number >= _MAX_EVENTS:
            return
        if self._num_bytes[program] >= self._max_output_bytes:
            text = text[: self._max_output_bytes - before]
            text += f"\n[output beyond {self._max_output_bytes} bytes is left out]\n"
        if self._last is not None and self._last.stream == stream and at <= self._last.until:
            self.events[-1]["text"] += text
        elif text:
            self._num_events[program] = number + 1
            if number + 1 == _MAX_EVENTS:
                text += f"\n[output after {_MAX_EVENTS} pieces is left out]\n"
            self.events.append({"at": at, "kind": "output", "stream": stream, "text": text})
            self._last = _LastOutput(stream, at + _MERGE_S)


@asynccontextmanager
async def _forked(base: Base) -> AsyncIterator[Workspace]:
    workspace = await base.fork()
    try:
        yield workspace
    finally:
        # Cancelling a second time must not leave its processes.
        await asyncio.shield(workspace.close())


def _spec(task: Task) -> WorkspaceSpec:
    has_files = task.environment_folder.is_dir()
    spec = WorkspaceSpec(
        name=task.name,
        source=task.environment_folder if has_files else None,
        image=task.image,
        limits=_limits(task, task.agent_timeout_s),
        build_network=Network("public"),
        build_timeout_s=task.build_timeout_s,
    )
    return spec if task.workdir is None else replace(spec, workdir=task.workdir)


def _check_readable(task: Task) -> None:
    """Refuse files that root can read and the user of the workspaces cannot."""
    if os.geteuid() != 0:
        return
    for top in (task.tests_folder, task.solution_folder):
        for path in (top, *top.rglob("*")):
            needed = 0o005 if path.is_dir() else 0o004
            if path.exists() and path.stat().st_mode & needed != needed:
                raise ConfigError(
                    f"{path} is not readable for other users, one of which runs the tests; run: "
                    f"chmod -R o+rX {shlex.quote(str(task.folder))}"
                )


def _limits(task: Task, timeout_s: float) -> SandboxLimits:
    return SandboxLimits(
        wall_s=timeout_s,
        cpu_s=math.ceil(timeout_s * max(task.cpus or _CPUS, 1)),
        memory_bytes=task.memory_bytes or MEMORY_BYTES,
        max_processes=MAX_PROCESSES,
        disk_bytes=task.disk_bytes or DISK_BYTES,
        output_bytes=_MAX_PRINTED_BYTES,
    )


def _ending(result: CommandResult) -> str:
    if result.ended_by == "exit":
        return f"ended with exit code {result.exit_code}"
    if result.ended_by == "signal":
        return f"was ended by a signal (exit code {result.exit_code})"
    return f"was ended by its limit of {result.ended_by.replace('_', ' ')}"


def _check_mounts(task: Task, folders: Collection[Path]) -> None:
    """Refuse software of an agent whose folder contains the tests or the solution."""
    for folder in folders:
        path = folder.resolve()
        for hidden in (task.tests_folder.resolve(), task.solution_folder.resolve()):
            if hidden.is_relative_to(path) or path.is_relative_to(hidden):
                raise ConfigError(
                    f"{folder} would show {hidden.name}/ of {task.name} to the agent; keep tasks "
                    "out of the folders of the agent's software"
                )


def _is_user_program(path: str, *sources: str) -> bool:
    """Whether a path is in a user's folder of programs, unless a source is in it too."""
    found = _USER_PROGRAMS.match(path)
    return found is not None and not _is_below_any(sources, found[0])


def _is_below_any(paths: Iterable[str], folder: str) -> bool:
    return any(_is_below(path, (folder,)) for path in paths)


def _has_user_programs(task: Task) -> bool:
    """Whether the verifier sees programs and Python packages that the agent installed."""
    sources = [artifact.source for artifact in task.artifacts]
    if sources:
        return any(_USER_PROGRAMS.match(source) for source in sources)
    return not task.is_verifier_separate or bool(_USER_PROGRAMS.match(task.workdir or ""))


def _is_below(path: str, folders: Sequence[str]) -> bool:
    pure = PurePosixPath(path)
    return any(pure.is_relative_to(folder) for folder in folders)


async def _collect(task: Task, workspace: Workspace, work: _Work) -> None:
    """Read the artifacts from the agent's workspace."""
    made = {f"/{folder}/" for folder in _folders(task)}
    max_bytes = min(task.disk_bytes or DISK_BYTES, MAX_ARTIFACT_BYTES)
    try:
        changes = await workspace.changes()
        work.changes = [change for change in changes if change.path not in made]
        taken = _taken(task, task.workdir or workspace.workdir, changes)
        if taken is None:
            raise WorkspaceContentError(
                f"{_MOST_CHANGES} files or more were changed; list those to verify in `artifacts` "
                "of task.toml"
            )
        sources, work.removed = taken
        archive = await workspace.collect(sources, max_bytes=max_bytes)
    except WorkspaceContentError as error:
        work.outcome = "agent_failed"
        work.error = f"the artifacts cannot be read: {error}"
        return
    work.archive = await asyncio.to_thread(_without_hidden, archive, task, workspace.workdir)


def _taken(
    task: Task, workdir: str, changes: Sequence[FileChange]
) -> tuple[list[str], list[str]] | None:
    """Return the paths to take from an agent's workspace, and those to remove from a fresh one.

    A list of changes that is not complete is of no use: folders then replace those of the base.
    None means that this is not possible.
    """
    is_complete = len(changes) < _MOST_CHANGES
    if task.artifacts:
        sources = [artifact.source for artifact in task.artifacts]
        removed = _replaced(
            [
                change
                for change in changes
                if _is_below(change.path, sources) and not _is_user_program(change.path, *sources)
            ]
        )
        if not is_complete:
            removed = [artifact.source for artifact in task.artifacts if not artifact.exclude]
    else:
        seen = changed_sources(changes, workdir, is_verifier_separate=task.is_verifier_separate)
        sources = [change.path for change in seen if change.kind != "removed"]
        removed = _replaced(seen)
        if not is_complete:
            if workdir == "/" or not task.is_verifier_separate:
                return None
            sources, removed = [workdir, *sources], [workdir, *removed]
    return list(dict.fromkeys([*sources, "/logs/artifacts"])), removed


def _replaced(changes: Sequence[FileChange]) -> list[str]:
    """Return the paths of the base that are gone: a file may have become a link, or a folder."""
    gone = [change.path.rstrip("/") for change in changes if change.kind != "added"]
    parents = {str(parent) for path in gone for parent in PurePosixPath(path).parents}
    return [*gone, *(c.path for c in changes if c.kind == "added" and c.path in parents)]


async def _restore(task: Task, workspace: Workspace, work: _Work) -> None:
    """Bring the artifacts into a fresh workspace.

    Raises:
        WorkspaceContentError: they do not fit.
    """
    if work.removed:
        paths = b"".join(os.fsencode(path) + b"\0" for path in work.removed)
        command: Sequence[str] = ("xargs", "-0", "sh", "-c", _REMOVE, "sh")
        if not _has_user_programs(task) and any(map(_HOMES.fullmatch, work.removed)):
            command = ("sh", "-c", _KEEP_USER_PROGRAMS)
        limits = SandboxLimits(wall_s=_CLEANUP_S)
        result = await workspace.run(command, stdin=paths, cwd="/", limits=limits)
        if not result.is_success:
            raise WorkspaceError(f"files could not be removed: {result.text.strip()[-300:]}")
    await workspace.put(_archive({}, _folders(task)))
    if work.archive:
        await workspace.put(work.archive)
    # The agent may have left a file or a link in its place.
    await workspace.put(_archive({}, [(task.workdir or workspace.workdir).strip("/") or "."]))


async def _read_reward(workspace: Workspace) -> tuple[float, dict[str, float]]:
    paths = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
    archive = await workspace.collect(paths, max_bytes=_MAX_REWARD_BYTES)
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for path in paths:
            if path.lstrip("/") not in tar.getnames():
                continue
            file = tar.extractfile(path.lstrip("/"))
            if file is not None:
                text = file.read(_MAX_REWARD_BYTES).decode("utf-8", "replace")
                found.append(task_reward(text, is_json=path.endswith(".json")))
    if not found:
        raise ValueError("there is no /logs/verifier/reward.txt or reward.json")
    if found[0][0] != found[-1][0]:
        # Programs of the agent that the tests execute can write one of the two.
        raise ValueError(f"reward.json says {found[0][0]:g}, reward.txt {found[-1][0]:g}")
    return found[0]


def _folders(task: Task) -> list[str]:
    """Return the folders that a workspace has in any case."""
    return [*LOG_FOLDERS, *([task.workdir.lstrip("/")] if task.workdir else [])]


def _archive(files: Mapping[str, bytes], folders: Sequence[str] = ()) -> bytes:
    """Return a tar archive of files and folders, by path relative to `/`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in folders:
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _without_hidden(archive: bytes, task: Task, workdir: str) -> bytes:
    """Return an archive without the folders of the verifier, and without what artifacts exclude.

    Programs of the user are left out as in `changed_sources`.
    """
    sources = [each.source for each in task.artifacts] or [task.workdir or workdir]
    takes_programs = not task.artifacts and not task.is_verifier_separate
    excluded = _Excluded(task.artifacts)

    def is_kept(entry: tarfile.TarInfo) -> bool:
        path = f"/{entry.name}"
        return (
            path.count("/") <= _MAX_DEPTH
            and not _is_below(path, HIDDEN_FOLDERS)
            and (takes_programs or not _is_user_program(path, *sources))
            and path not in excluded
        )

    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as old:
        entries = old.getmembers()
        kept = [entry for entry in entries if is_kept(entry)]
        if len(kept) == len(entries):
            return archive
        with tarfile.open(fileobj=buffer, mode="w") as new:
            for entry in kept:
                new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    return buffer.getvalue()


class _Excluded:
    """The paths that artifacts exclude: a pattern matches from any folder below the source on."""

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self._patterns = [
            (PurePosixPath(each.source), re.compile("|".join(map(fnmatch.translate, each.exclude))))
            for each in artifacts
            if each.exclude
        ]
        self._folders: dict[str, bool] = {}

    def __contains__(self, path: str) -> bool:
        if not self._patterns or not path:
            return False
        if path not in self._folders:
            self._folders[path] = path.rpartition("/")[0] in self or self._is_matched(path)
        return self._folders[path]

    def _is_matched(self, path: str) -> bool:
        """Whether a pattern matches a path up to its end."""
        for source, pattern in self._patterns:
            pure = PurePosixPath(path)
            if pure.is_relative_to(source):
                parts = pure.relative_to(source).parts
                if any(pattern.match("/".join(parts[n:])) for n in range(len(parts))):
                    return True
        return False

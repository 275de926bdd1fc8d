"""Program repair: a small program has a bug, and the policy finds and repairs it in a shell.

    median.py, check.py -> turns that call shell -> a turn without -> hidden cases -> 1 or 0

The commands run in a workspace of their own. The repaired file is judged in another workspace, with
arguments that the policy does not see. With `--env.turn_journal FILE`, rollouts and the files of
their workspaces survive a kill -9. Needs bubblewrap and no data:

    python environments/program_repair.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import inspect
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, Turn
from atroposlib.envs.tools import ToolConversation, ToolResult
from atroposlib.sandbox import SandboxLimits
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.workspaces import (
    LazyWorkspace,
    Workspace,
    WorkspaceContentError,
    WorkspaceSpec,
    open_workspaces,
)

__all__ = ["BrokenProgram", "ProgramRepairEnv", "ProgramRepairEnvConfig", "RepairConversation"]

CARD = EnvironmentCard(
    task="find and repair the bug of a small program, in a shell",
    turns="up to 8",
    reward="0 or 1, by hidden cases in a workspace that the policy never touched",
    data="made on the spot",
    needs="bubblewrap",
    command="process --env.total_steps 4",
)

PROMPT = (
    "/app/{name}.py should do this: {task} It has a bug. `python3 check.py` in /app runs some "
    "examples. Repair {name}.py with the shell. When it is correct, write one sentence about the "
    "bug, without a call."
)
CHECK = """import json
from {name} import {name}

for arguments, expected in json.loads({examples!r}):
    found = {name}(*arguments)
    print("ok" if found == expected else "WRONG", "{name}", arguments, "gave", repr(found))
"""
JUDGE = """import json, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # prints of the program are not results
sys.path.insert(0, "/app")
name, cases = json.load(sys.stdin)
function = getattr(__import__(name), name)
print(json.dumps([function(*arguments) for arguments in cases]), file=results, flush=True)
"""
LIMITS = SandboxLimits(
    wall_s=20.0, cpu_s=10, memory_bytes=2**28, max_processes=32, disk_bytes=2**24
)
MAX_SHOWN = 2000
"""Characters of output that the policy sees."""
MAX_FILE_BYTES = 100_000
NUM_EXAMPLES = 3


def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def run_lengths(text: str) -> str:
    parts = []
    start = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or text[end] != text[start]:
            parts.append(f"{text[start]}{end - start}")
            start = end
    return "".join(parts)


def merged(intervals: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1][1] = max(found[-1][1], high)
        else:
            found.append([low, high])
    return found


def days_in(year: int, month: int) -> int:
    if month == 2:
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return 29 if is_leap else 28
    return 30 if month in (4, 6, 9, 11) else 31


@dataclass(frozen=True)
class RepairTask:
    """A correct program, what to break in it, and its cases."""

    function: Callable[..., Any]
    description: str
    bugs: Sequence[tuple[str, str]]
    """Parts of the source, each with what replaces it."""
    cases: Sequence[list[Any]]
    """Arguments; the first `NUM_EXAMPLES` are shown."""


TASKS = (
    RepairTask(
        median,
        "return the median of a list of numbers, for an even number the mean of the middle two.",
        [
            ("sorted(numbers)", "list(numbers)"),
            ("ordered[middle - 1] + ordered[middle]", "ordered[middle] + ordered[middle + 1]"),
            ("% 2 == 1", "% 2 == 0"),
        ],
        [[[3, 1, 2]], [[4, 1, 3, 2, 9, 7]], [[5]], [[9, 1, 5, 7, 3]], [[2, 8, 4, 6]], [[-1, -9]]],
    ),
    RepairTask(
        run_lengths,
        "return the characters of a text with the lengths of their runs: 'aab' gives 'a2b1'.",
        [
            ("len(text) + 1", "len(text)"),
            ("{end - start}", "{end - start + 1}"),
            ("text[end] != text[start]", "text[end] == text[start]"),
        ],
        [["aab"], ["xyz"], ["zzzz"], [""], ["aabbaa"], ["  a"], ["mississippi"]],
    ),
    RepairTask(
        merged,
        "return the union of closed intervals of whole numbers, in order, without overlaps.",
        [
            ("sorted(intervals)", "intervals"),
            ("low <= found", "low < found"),
            ("max(found[-1][1], high)", "high"),
        ],
        [
            [[[5, 6], [1, 2]]],
            [[[1, 2], [2, 3]]],
            [[[1, 9], [3, 4]]],
            [[[4, 8], [1, 5], [10, 12]]],
            [[[0, 3], [3, 3], [1, 2], [7, 9]]],
            [[]],
        ],
    ),
    RepairTask(
        days_in,
        "return the number of days of a month, 1 to 12, in a year of the Gregorian calendar.",
        [
            ("year % 400 == 0", "year % 400 != 0"),
            ("(4, 6, 9, 11)", "(4, 6, 8, 11)"),
            ("year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)", "year % 4 == 0"),
        ],
        [[2000, 2], [1900, 2], [2023, 9], [2024, 2], [2100, 2], [2023, 8], [2400, 2], [2023, 2]],
    ),
)


class ProgramRepairEnvConfig(MultiTurnEnvConfig):
    """Settings of the programs."""

    seed: int = Field(0, description="Seed of the order of programs and bugs.")


class BrokenProgram(NamedTuple):
    """One program with one bug; numbers in `TASKS` and in its bugs."""

    task_number: int
    bug_number: int

    @property
    def task(self) -> RepairTask:
        return TASKS[self.task_number]

    @property
    def name(self) -> str:
        return self.task.function.__name__

    @property
    def correct_source(self) -> str:
        return inspect.getsource(self.task.function)

    @property
    def source(self) -> str:
        return self.correct_source.replace(*self.task.bugs[self.bug_number])

    def expected(self) -> list[Any]:
        """Return the results of the correct program, as JSON gives them back."""
        copied = json.loads(json.dumps(self.task.cases))
        return [self.task.function(*arguments) for arguments in copied]

    def archive(self) -> bytes:
        """Return the files of the workspace, as a tar archive."""
        cases = list(zip(self.task.cases, self.expected(), strict=True))[:NUM_EXAMPLES]
        check = CHECK.format(name=self.name, examples=json.dumps(cases))
        files = {f"app/{self.name}.py": self.source, "app/check.py": check}
        output = io.BytesIO()
        with tarfile.open(fileobj=output, mode="w") as archive:
            for path, text in files.items():
                member = tarfile.TarInfo(path)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        return output.getvalue()


class RepairConversation(ToolConversation):
    """One program, and a shell in a workspace."""

    workspace: LazyWorkspace

    def __init__(self, item: BrokenProgram, fork: Callable[[], Any]) -> None:
        question = PROMPT.format(name=item.name, task=item.task.description)
        super().__init__([{"role": "user", "content": question}], [self.shell])
        self.item = item
        self.workspace = LazyWorkspace(fork)
        self._fork = fork

    async def shell(self, command: str) -> str:
        """Run a command of a POSIX shell in /app, and return its output.

        Args:
            command: Such as `cat check.py`.
        """
        result = await self.workspace.run(["sh", "-c", command])
        shown = result.text[:MAX_SHOWN]
        if result.is_success:
            return shown
        ending = f"exit code {result.exit_code}" if result.ended_by == "exit" else result.ended_by
        return f"{shown}\n({ending})"

    async def score(self, turn: Turn) -> float:
        if self.workspace.revision == 0:
            return 0.0  # no command was run
        path = f"/app/{self.item.name}.py"
        judge = await self._fork()
        try:
            try:
                archive = await self.workspace.collect([path], max_bytes=MAX_FILE_BYTES)
                await judge.put(archive)
            except WorkspaceContentError:  # the file is too large, or a folder
                return 0.0
            request = json.dumps([self.item.name, self.item.task.cases]).encode()
            result = await judge.run(["/usr/bin/python3", "-I", "-c", JUDGE], stdin=request)
        finally:
            await judge.close()
        printed = b"".join(piece.data for piece in result.output if piece.stream == "stdout")
        try:
            return float(result.is_success and json.loads(printed) == self.item.expected())
        except (ValueError, RecursionError):  # it ended before, or printed something itself
            return 0.0

    def state(self) -> list[dict[str, Any]]:
        return [result.model_dump() for result in self.results]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self.results = [ToolResult(**result) for result in state]

    async def close(self) -> None:
        await self.workspace.close()


class ProgramRepairEnv(MultiTurnEnv):
    """Programs with a bug each.

    Attributes:
        iter: programs handed out so far; kept in checkpoints.
    """

    name = "program_repair"
    env_config_cls = ProgramRepairEnvConfig
    config: ProgramRepairEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_turns": 8,
        "max_token_length": 8192,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def setup(self) -> None:
        self.workspaces = open_workspaces()
        with tempfile.TemporaryDirectory() as source:
            spec = WorkspaceSpec("program_repair", source=Path(source), limits=LIMITS)
            self.base = await self.workspaces.prepare(spec)

    async def close(self) -> None:
        await self.workspaces.close()

    async def fork(self, item: BrokenProgram) -> Workspace:
        """Return a new workspace with the files of an item."""
        workspace = await self.base.fork()
        try:
            await workspace.put(item.archive())
        except BaseException:
            await workspace.close()
            raise
        return workspace

    async def get_next_item(self) -> BrokenProgram:
        source = random.Random(f"{self.config.seed}:{self.iter}")
        self.iter += 1
        number = source.randrange(len(TASKS))
        return BrokenProgram(number, source.randrange(len(TASKS[number].bugs)))

    def eval_items(self) -> Sequence[BrokenProgram]:
        return [
            BrokenProgram(number, bug)
            for number, task in enumerate(TASKS)
            for bug in range(len(task.bugs))
        ]

    def start_conversation(self, item: BrokenProgram) -> RepairConversation:
        return RepairConversation(item, partial(self.fork, item))

    def encode_item(self, item: BrokenProgram) -> list[int]:
        return list(item)

    def decode_item(self, encoded: list[int]) -> BrokenProgram:
        return BrokenProgram(*encoded)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: BrokenProgram) -> Any:
        command = f"cat > {item.name}.py <<'END'\n{item.correct_source}END\npython3 check.py"
        call = json.dumps({"name": "shell", "arguments": {"command": command}})
        return [f"<tool_call>{call}</tool_call>", "A condition was wrong."]


if __name__ == "__main__":
    ProgramRepairEnv.cli()

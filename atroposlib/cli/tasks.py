"""`atropos-tasks`: write, look at, run and check task folders.

atropos-tasks new my_task             writes a task and checks it
atropos-tasks validate tasks/         checks each task of a folder
atropos-tasks run tasks/my_task --agent oracle
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    integer_between,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.text import inert_block, inert_line
from atroposlib.utils.writable import naming_writes, require_writable_file, require_writable_folder

if TYPE_CHECKING:
    from atroposlib.agent_tasks.folder import Task
    from atroposlib.agent_tasks.runner import AgentCommand, TaskRun, TaskRunner
    from atroposlib.agent_tasks.validation import TaskReport

__all__ = ["main"]

_COMMAND = "atropos-tasks"
_INTERRUPTED = 130
_SHOWN_CHARACTERS = 400
_TEMPLATE = {
    "task.toml": """\
schema_version = "1.4"
artifacts = ["/app/sum.txt"]  # what the verifier sees of the agent's work

[metadata]
difficulty = "easy"

[environment]
network_mode = "no-network"
memory_mb = 512

[agent]
timeout_sec = 300

[verifier]
timeout_sec = 30
""",
    "instruction.md": """\
The file `/app/numbers.txt` has one integer per line. Write their sum to `/app/sum.txt`.
""",
    "environment/numbers.txt": "12\n-3\n40\n7\n",
    "solution/solve.sh": """\
#!/bin/bash
awk '{ sum += $1 } END { print sum }' /app/numbers.txt > /app/sum.txt
""",
    "tests/test.sh": """\
#!/bin/bash
# Write the reward: 1 if the sum is right, else 0.
reward=0
if [ "$(head -c 100 /app/sum.txt)" = 56 ]; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
""",
}
"""The files of a new task, by path."""
_NEXT_STEPS = """\

Now edit the files of {folder} and check again:
  atropos-tasks validate {folder}
"""


def main() -> None:
    """Run a subcommand.

    Exit codes: 2 nothing was done, 1 a task is not valid or a run failed, 130 it was interrupted.
    """
    prepare_command()
    args = _parser().parse_args()
    try:
        code = args.act(args)
    except (AtroposError, MissingExtraError) as error:
        end_command(_COMMAND, f"error: {error}", code=exit_code_of(error))
    except OSError as error:  # such as a full disk
        end_command(_COMMAND, f"error: {error}", code=1)
    except KeyboardInterrupt:
        end_command(_COMMAND, "stopped", code=_INTERRUPTED)
    sys.exit(code)


def _validate(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.folder import load_tasks

    if args.json is not None:
        require_writable_file(args.json, "--json")
    reports = asyncio.run(_validated(load_tasks(args.tasks), args))
    _write_json(args.json, [_report_json(report) for report in reports])
    num_valid = sum(report.is_valid for report in reports)
    with reader_may_leave():
        print(_report_table(reports), end="")
        print(f"{num_valid} of {len(reports)} tasks are valid")
    return 0 if num_valid == len(reports) else 1


def _write_json(file: str | None, content: Any) -> None:
    """Write results to the file of `--json`, if it is given; before they are printed."""
    if file is not None:
        with naming_writes(Path(file)):
            Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


async def _validated(tasks: Sequence[Task], args: argparse.Namespace) -> list[TaskReport]:
    from atroposlib.agent_tasks.validation import validate_tasks

    def progress(report: TaskReport) -> None:
        if sys.stderr.isatty():
            verdict = "valid" if report.is_valid else "not valid"
            name = inert_line(report.name, max_characters=60)
            print(f"{name}: {verdict}, {report.duration_s:.1f} s", file=sys.stderr)

    async with _runner(args.workspaces) as runner:
        return await validate_tasks(
            runner,
            tasks,
            repeats=args.repeats,
            jobs=args.jobs,
            is_strict=args.strict,
            on_report=progress,
        )


@asynccontextmanager
async def _runner(kind: str) -> AsyncIterator[TaskRunner]:
    from atroposlib.agent_tasks.runner import TaskRunner
    from atroposlib.workspaces import open_workspaces

    workspaces = open_workspaces(kind)
    runner = TaskRunner(workspaces)
    try:
        yield runner
    finally:
        await runner.close()
        await workspaces.close()


def _report_table(reports: Sequence[TaskReport]) -> str:
    from atroposlib.agent_tasks.validation import CHECKS

    rows = [["task", *CHECKS]]
    rows += [
        [inert_line(report.name, max_characters=60), *map(report.status, CHECKS)]
        for report in reports
    ]
    lines = [_aligned(rows)]
    for report in reports:
        for result in report.results:
            if result.status != "ok":
                reason = inert_block(result.reason).strip().replace("\n", "\n    ")
                name = inert_line(report.name, max_characters=60)
                lines.append(f"{name}: {result.name} {result.status}:\n    {reason}\n")
        lines += [f"note: {inert_line(note, max_characters=300)}\n" for note in report.notes]
    return "".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


def _report_json(report: TaskReport) -> dict[str, object]:
    return {
        "task": report.name,
        "folder": str(report.folder),
        "is_valid": report.is_valid,
        "checks": {
            result.name: {"status": result.status, "reason": result.reason}
            for result in report.results
        },
        "notes": list(report.notes),
        "duration_s": round(report.duration_s, 3),
    }


def _list(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.folder import load_tasks, shown_limits

    tasks = load_tasks(args.tasks)
    rows = [["task", "difficulty", "category", "limits"]]
    for task in tasks:
        known = (str(task.metadata.get(key, "")) for key in ("difficulty", "category"))
        cells = [task.name, *known, ", ".join(shown_limits(task))]
        rows.append([inert_line(cell, max_characters=100) for cell in cells])
    with reader_may_leave():
        print(_aligned(rows), end="")
    return 0


def _show(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.folder import load_task, shown_limits

    task = load_task(Path(args.task))
    artifacts = ", ".join(artifact.source for artifact in task.artifacts)
    rows = {
        "task": task.name,
        "folder": str(task.folder),
        "image": task.image or "",
        "limits": ", ".join(shown_limits(task)),
        "artifacts": artifacts or "what the agent changes",
        "variables": ", ".join({**task.env, **task.verifier_env, **task.solution_env}),
        "metadata": json.dumps(task.metadata, default=str) if task.metadata else "",
    }
    with reader_may_leave():
        for name, value in rows.items():
            if value:
                print(f"{name + ':':<11}{inert_line(value, max_characters=500)}")
        for note in task.notes:
            print(f"note: {inert_line(note, max_characters=300)}")
        print(f"\n{inert_block(task.instruction).rstrip()}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.folder import load_task
    from atroposlib.agent_tasks.runner import AgentCommand

    if args.json is not None:
        require_writable_file(args.json, "--json")
    agent: AgentCommand | Literal["oracle", "nothing"]
    if args.agent in ("oracle", "nothing"):
        agent = cast(Literal["oracle", "nothing"], args.agent)
    else:
        agent = AgentCommand(name="command", command=("sh", "-c", args.agent))
    run = asyncio.run(_one_run(load_task(Path(args.task)), agent, args.workspaces))
    _write_json(args.json, dataclasses.asdict(run))
    with reader_may_leave():
        print(_run_text(run), end="")
    return 0 if run.outcome == "done" else 1


async def _one_run(
    task: Task, agent: AgentCommand | Literal["oracle", "nothing"], kind: str
) -> TaskRun:
    async with _runner(kind) as runner:
        return await runner.run(task, agent)


def _run_text(run: TaskRun) -> str:
    """Return a run in the order of time: phases, output, then changes and reward."""
    lines = []
    for event in run.events:
        text = inert_block(event["text"]).rstrip("\n")
        if event["kind"] == "output":
            mark = "!" if event["stream"].endswith("stderr") else "|"
            lines += [f"          {mark} {line}" for line in text.split("\n")]
        else:
            code = event.get("exit_code")
            ending = "" if code is None else f" (exit code {code})"
            label = "error: " if event["kind"] == "error" else ""
            lines.append(f"{event['at']:7.3f} s {label}{text}{ending}")
    for change in run.changes:
        lines.append(f"{change.kind} {inert_line(change.path, max_characters=300)}")
        if change.diff:
            diff = inert_block(change.diff)[: _SHOWN_CHARACTERS * 10].rstrip("\n")
            lines += [f"    {line}" for line in diff.split("\n")]
    parts = "".join(f", {name} {value:g}" for name, value in sorted(run.reward_parts.items()))
    lines.append(f"{run.outcome.replace('_', ' ')}: reward {run.reward:g}{parts}")
    return "\n".join(lines) + "\n"


def _write_template(folder: Path) -> None:
    for name, text in _TEMPLATE.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with naming_writes(file):
            file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)


def _new(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.folder import load_task

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", args.name):
        raise ConfigError(
            f"name {args.name!r}: expected letters, digits, '.', '_' and '-', up to 100"
        )
    folder = Path(args.dir) / args.name
    if folder.exists():
        raise ConfigError(f"{folder} exists and is left as it is; choose another name")
    require_writable_folder(args.dir, "--dir")
    try:
        _write_template(folder)
    except BaseException:  # such as a full disk; with a part of the files it would not start again
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with reader_may_leave():
        print(f"wrote {', '.join(str(folder / name) for name in _TEMPLATE)}\n")
    reports = asyncio.run(_validated([load_task(folder)], args))
    with reader_may_leave():
        print(_report_table(reports), end="")
        print(_NEXT_STEPS.format(folder=folder), end="")
    return 0 if reports[0].is_valid else 1


def _swe(args: argparse.Namespace) -> int:
    from atroposlib.agent_tasks.swe import SweSettings, write_swe_tasks

    settings = SweSettings(
        repositories=Path(args.repositories),
        test_command=args.test_command,
        log_format=args.log_format,
        image=args.image,
        setup_command=args.setup_command,
        memory_mb=args.memory_mb,
    )
    require_writable_folder(args.out, "--out")
    folders = write_swe_tasks(_swe_rows(args.rows), settings, Path(args.out))
    print(f"{len(folders)} tasks in {args.out}; now: atropos-tasks validate {args.out}")
    return 0


def _swe_rows(name: str) -> Sequence[dict[str, Any]]:
    from atroposlib.agent_tasks.swe import COLUMNS
    from atroposlib.utils.local_records import read_records

    if not name.startswith("hf:"):
        return read_records(Path(name), COLUMNS, optional=("image",))
    from atroposlib.envs.dataset_items import hub_dataset

    path, _, split = name.removeprefix("hf:").partition(":")
    rows = hub_dataset(path, split=split or "test", remedy="a local file of rows needs no hub")
    return [dict(row) for row in rows]


def _parser() -> CommandParser:
    parser = CommandParser(prog=_COMMAND, description="Write, look at, run and check task folders.")
    commands = parser.add_subparsers(required=True, metavar="{new,validate,run,list,show,swe}")
    tasks_help = "a task, a folder of tasks, or hf:NAME, a data set of a hub"

    new = commands.add_parser("new", help="write a small task, and check it")
    new.add_argument("name", help="name of the folder")
    new.add_argument("--dir", default=".", help="where to write it (%(default)s)")
    new.set_defaults(act=_new, jobs=1, strict=True)

    validate = commands.add_parser(
        "validate",
        help="check tasks: the solution scores 1, doing nothing 0, tests are hidden, ...",
        description="Check each task: its environment builds, its solution scores 1, doing nothing "
        "scores 0, the verifier repeats its result, the agent cannot read tests and solution, and "
        "modules that an agent leaves do not forge the result.",
    )
    validate.add_argument("tasks", help=tasks_help)
    validate.add_argument(
        "--jobs", type=integer_between(1, 64), default=2, help="tasks at a time (%(default)s)"
    )
    validate.add_argument(
        "--strict", action="store_true", help="a result that can be forged fails the task"
    )
    validate.add_argument("--json", metavar="FILE", help="write the results as JSON")
    validate.set_defaults(act=_validate)

    run = commands.add_parser("run", help="run an agent on a task and show what happens")
    run.add_argument("task", help="folder of the task")
    run.add_argument(
        "--agent", default="oracle", metavar="oracle|nothing|COMMAND",
        help="the solution, nothing, or a shell command in the workspace (%(default)s); agents "
        "that ask a model are arguments of atropos-env tasks:DIR",
    )  # fmt: skip
    run.add_argument("--json", metavar="FILE", help="write the run as JSON")
    run.set_defaults(act=_run)

    listing = commands.add_parser("list", help="list the tasks of a folder")
    listing.add_argument("tasks", help=tasks_help)
    listing.set_defaults(act=_list)

    show = commands.add_parser("show", help="show one task: limits, notes, instruction")
    show.add_argument("task", help="folder of the task")
    show.set_defaults(act=_show)

    _add_swe(commands)
    for command in (new, validate):
        command.add_argument(
            "--repeats", type=integer_between(1, 1000), default=10,
            help="runs of the verifier that must agree (%(default)s)",
        )  # fmt: skip
    for command in (new, validate, run):
        command.add_argument(
            "--workspaces",
            metavar="KIND",
            default="bubblewrap",
            help="kind of workspace (%(default)s)",
        )
    return parser


def _add_swe(commands: Any) -> None:
    swe = commands.add_parser(
        "swe",
        help="write tasks from rows in the style of SWE-bench",
        description="Write a task folder for each row: repository at the base commit, patch as "
        "solution, test files after the test patch in the verifier.",
    )
    swe.add_argument(
        "rows", metavar="ROWS", help="JSONL, JSON, Parquet or CSV, or hf:NAME[:SPLIT] of a hub"
    )
    swe.add_argument(
        "--repositories", required=True, metavar="DIR",
        help="folder with OWNER__NAME as repository, .bundle or .tar of each row",
    )  # fmt: skip
    swe.add_argument("--out", required=True, metavar="DIR", help="folder of the tasks")
    swe.add_argument(
        "--test-command", default="python3 -m pytest -rA {tests}", metavar="COMMAND",
        help="how tests are run; {tests} stands for their files (%(default)s)",
    )  # fmt: skip
    swe.add_argument(
        "--log-format", choices=("pytest", "unittest"), default="pytest",
        help="how its output is read (%(default)s)",
    )  # fmt: skip
    swe.add_argument("--image", default="python:3.11-slim", help="base image (%(default)s)")
    swe.add_argument(
        "--setup-command", default="", metavar="COMMAND", help="prepares the repository once"
    )
    swe.add_argument(
        "--memory-mb", type=integer_between(1, 2**20), default=2048, help="(%(default)s)"
    )
    swe.set_defaults(act=_swe)


if __name__ == "__main__":
    main()

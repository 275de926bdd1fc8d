"""Checks of a task: is its reward right, repeatable, hidden and hard to forge?

builds    the environment builds
oracle    the solution scores 1
nothing   doing nothing scores 0
repeats   the verifier gives the same numbers each time
hidden    the agent finds no file of tests/ and solution/ in its workspace
forgery   modules and settings that an agent leaves in its folder do not make the verifier
          report success; a warning unless asked for strictly
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from atroposlib.agent_tasks.folder import Task
from atroposlib.agent_tasks.runner import SYSTEM_FOLDERS, AgentCommand, TaskRun, TaskRunner
from atroposlib.errors import AtroposError

__all__ = ["CHECKS", "CheckResult", "TaskReport", "validate_task", "validate_tasks"]

logger = logging.getLogger(__name__)

CHECKS = ("builds", "oracle", "nothing", "repeats", "hidden", "forgery")
Status = Literal["ok", "failed", "warning", "not run"]

_MIN_DIGEST_BYTES = 16
"""Smaller files are equal by chance."""
_SEARCH_S = 300.0
_TESTS_PER_SEARCH = 1000
"""The system limits a command line to 2 MB, and `find` takes quadratic time to read it."""
_SCRIPT, _DIGESTS = "/logs/agent/search.sh", "/logs/agent/digests"
"""Files of the search in the workspace."""
_SCRIPTS = frozenset({".sh", ".py", ".js", ".ts", ".rb", ".pl", ".go", ".rs"})
_SHADOWED_MODULES = (
    *("argparse", "collections", "csv", "dataclasses", "datetime", "difflib", "hashlib", "json"),
    *("math", "os", "pathlib", "pytest", "random", "re", "shutil", "sqlite3", "string"),
    *("subprocess", "tempfile", "typing", "unittest", "conftest", "sitecustomize"),
)
_FORGED_MODULE = """\
import posix
out = posix.open("/logs/verifier/reward.txt", 0o1101)
posix.write(out, b"1")
posix._exit(0)
"""
_FORGED_PROGRAM = "echo 1 > /logs/verifier/reward.txt"


@dataclass(frozen=True)
class CheckResult:
    """One check of one task."""

    name: str
    status: Status
    reason: str = ""


@dataclass
class TaskReport:
    """All checks of one task, in the order of `CHECKS`."""

    name: str
    folder: Path
    results: list[CheckResult] = field(default_factory=list)
    notes: Sequence[str] = ()
    duration_s: float = 0.0

    @property
    def is_valid(self) -> bool:
        return all(result.status in ("ok", "warning") for result in self.results)

    def status(self, name: str) -> Status:
        """Return the status of a check; `not run` if an earlier one made it pointless."""
        return next((r.status for r in self.results if r.name == name), "not run")


async def validate_tasks(
    runner: TaskRunner,
    tasks: Sequence[Task],
    *,
    repeats: int = 10,
    jobs: int = 2,
    is_strict: bool = False,
    on_report: Callable[[TaskReport], None] | None = None,
) -> list[TaskReport]:
    """Check tasks, `jobs` at a time; the reports are in the order of the tasks."""
    slots = asyncio.Semaphore(jobs)

    async def validate(task: Task) -> TaskReport:
        async with slots:
            report = await validate_task(runner, task, repeats=repeats, is_strict=is_strict)
        if on_report is not None:
            on_report(report)
        return report

    return list(await asyncio.gather(*map(validate, tasks)))


async def validate_task(
    runner: TaskRunner, task: Task, *, repeats: int = 10, is_strict: bool = False
) -> TaskReport:
    """Check one task. A check that fails does not end the others, except `builds`.

    Without results of the verifier `repeats` is not run, and without the reward 0 for doing
    nothing `forgery` is not.

    Args:
        runner: runs the programs of the task.
        task: the task.
        repeats: runs of the verifier on the solution, and on the untouched environment.
        is_strict: whether a forged success fails the task; otherwise it is a warning.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    report = TaskReport(task.name, task.folder, notes=task.notes)
    add = report.results.append
    try:
        await runner.base(task)
    except AtroposError as error:
        add(CheckResult("builds", "failed", str(error)))
        report.duration_s = loop.time() - started
        return report
    add(CheckResult("builds", "ok"))
    oracle, failed = await _runs(runner, task, "oracle", repeats)
    add(failed or _check_reward("oracle", oracle, 1.0, _lacking_artifacts(task, oracle)))
    nothing, failed = await _runs(runner, task, "nothing", repeats)
    add(failed or _check_reward("nothing", nothing, 0.0))
    if _have_rewards(oracle) and _have_rewards(nothing):
        add(_check_repeats(oracle, nothing))
    add(await _check_hidden(runner, task))
    if report.status("nothing") == "ok":  # else a success of the forger shows nothing
        add(await _check_forgery(runner, task, is_strict=is_strict))
    report.duration_s = loop.time() - started
    return report


async def _runs(
    runner: TaskRunner, task: Task, agent: Literal["oracle", "nothing"], repeats: int
) -> tuple[list[TaskRun], CheckResult | None]:
    try:
        return await runner.run_repeatedly(task, agent, repeats=repeats), None
    except AtroposError as error:
        return [], CheckResult(agent, "failed", str(error))


def _have_rewards(runs: Sequence[TaskRun]) -> bool:
    """Whether a run has a result of the verifier; without any there is nothing to compare."""
    return any(run.outcome not in ("verifier_failed", "verifier_timeout") for run in runs)


def _check_reward(
    name: Literal["oracle", "nothing"], runs: Sequence[TaskRun], expected: float, remark: str = ""
) -> CheckResult:
    wrong = next((r for r in runs if r.outcome != "done" or r.reward != expected), None)
    if wrong is None:
        return CheckResult(name, "ok")
    what = "the solution" if name == "oracle" else "doing nothing"
    if wrong.outcome == "done":
        parts = _shown_parts(wrong.reward_parts)
        reason = f"{what} scores {wrong.reward:g}{parts}, expected {expected:g}"
    elif name == "oracle" and wrong.outcome.startswith("agent"):
        reason = wrong.error.replace("the agent ", "solution/solve.sh ", 1)
    else:
        reason = f"{what}: {wrong.outcome.replace('_', ' ')}: {wrong.error}"
    reason += f"; {remark}" if remark else ""
    if name == "oracle":
        reason += _quoted_end("solve.sh", _printed(wrong, "agent/"))
    return CheckResult(
        name, "failed", f"{reason}{_quoted_end('the verifier', wrong.verifier_output)}"
    )


def _lacking_artifacts(task: Task, runs: Sequence[TaskRun]) -> str:
    """Return a remark on files that task.toml lists as artifacts and a run did not write."""
    changed = [PurePosixPath(change.path) for run in runs[:1] for change in run.changes]
    lacking = [
        artifact.source
        for artifact in task.artifacts
        if not any(path.is_relative_to(artifact.source) for path in changed)
    ]
    if not lacking or not runs:
        return ""
    return f"it did not write {', '.join(lacking)}, listed in `artifacts` of task.toml"


def _quoted_end(program: str, text: str, most: int = 300) -> str:
    end = text.strip()[-most:]
    return f"; {program} printed: {end}" if end else ""


def _check_repeats(*several: Sequence[TaskRun]) -> CheckResult:
    for runs in several:
        results = [(run.outcome, run.reward, run.reward_parts) for run in runs]
        for number, result in enumerate(results[1:], 2):
            if result != results[0]:
                first, other = (_shown_result(*each) for each in (results[0], result))
                reason = f"run 1 of the verifier gives {first}, run {number} gives {other}"
                return CheckResult("repeats", "failed", reason)
    return CheckResult("repeats", "ok")


def _shown_result(outcome: str, reward: float, parts: dict[str, float]) -> str:
    if outcome != "done":
        return outcome.replace("_", " ")
    return f"reward {reward:g}{_shown_parts(parts)}"


def _shown_parts(parts: dict[str, float]) -> str:
    return "".join(f", {name} {value:g}" for name, value in sorted(parts.items()))


async def _check_hidden(runner: TaskRunner, task: Task) -> CheckResult:
    secrets = await asyncio.to_thread(_hidden_files, task)
    names = {path.name for path in secrets.values()} - await asyncio.to_thread(_shown_names, task)
    sizes = {path.stat().st_size for path in secrets.values()}
    files = {_SCRIPT: _search_script(names, sizes), _DIGESTS: "".join(f"{d}\n" for d in secrets)}
    probe = AgentCommand(name="probe", command=("sh", _SCRIPT), files=files)
    try:
        run = await runner.run(_with_time(task), probe)
    except AtroposError as error:
        return CheckResult("hidden", "failed", f"the search could not run: {error}")
    lines = _printed(run, "agent/stdout").splitlines()
    if "searched" not in lines:
        reason = " ".join(lines[-1:]) or run.error
        return CheckResult("hidden", "failed", f"the search did not end: {reason}")
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "found":
            return CheckResult("hidden", "failed", f"the agent can read {rest}")
        if kind == "file":
            digest, _, path = rest.partition("  ")
            if digest in secrets:
                shown = secrets[digest].relative_to(task.folder)
                return CheckResult("hidden", "failed", f"the agent can read {shown} as {path}")
    return CheckResult("hidden", "ok")


def _with_time(task: Task) -> Task:
    return replace(task, agent_timeout_s=max(task.agent_timeout_s, _SEARCH_S))


def _printed(run: TaskRun, stream: str) -> str:
    """Return the output of a stream, or of all streams of a program: `agent/`."""
    events = (e for e in run.events if e["kind"] == "output" and e["stream"].startswith(stream))
    return "".join(event["text"] for event in events)


def _files(folder: Path) -> Iterable[Path]:
    """Yield the files below a folder; links that lead to no file have no content."""
    for parent, _, names in os.walk(folder):
        yield from (path for name in names if (path := Path(parent, name)).is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hidden_files(task: Task) -> dict[str, Path]:
    """Return the files of tests/ and solution/ that the agent must not find, by SHA-256.

    Left out are tiny files, and data that is also in environment/: the input of both sides.
    """
    shown = {_digest(path) for path in _files(task.environment_folder)}
    found = {}
    for folder in (task.tests_folder, task.solution_folder):
        for path in _files(folder):
            digest = _digest(path)
            is_input = digest in shown and path.suffix not in _SCRIPTS
            if path.stat().st_size >= _MIN_DIGEST_BYTES and not is_input:
                found[digest] = path
    return found


def _shown_names(task: Task) -> set[str]:
    return {path.name for path in _files(task.environment_folder)}


def _search_script(names: Iterable[str], sizes: Iterable[int]) -> str:
    """Return a script that prints files of these names, and the digests of those of these sizes.

    Programs of the system may have the same names as tests, so their digests are compared only.
    """
    by_name = _joined([f"-name {shlex.quote(_literal(name))}" for name in sorted(names)])
    by_size = _joined([f"-size {size}c" for size in sorted(sizes)])
    system = " -o ".join(f"-path {folder}" for folder in SYSTEM_FOLDERS)
    kernel = r"\( -path /proc -o -path /sys \) -prune"
    script = (
        "for tool in find grep sha256sum; do\n"
        "command -v $tool > /dev/null || { echo $tool is missing; exit 1; }\ndone\n"
    )
    script += "for folder in /tests /solution; do [ -e $folder ] && echo found $folder; done\n"
    for tests in by_name:
        script += (
            rf"find / \( {system} \) -prune -o -type f \( {tests} \) -print 2>/dev/null"
            ' | while IFS= read -r file; do echo "found $file"; done\n'
        )
    for tests in by_size:
        script += (
            rf"find / {kernel} -o -type f \( {tests} \) -exec sha256sum {{}} + 2>/dev/null"
            f' | grep -F -f {_DIGESTS} | while IFS= read -r line; do echo "file $line"; done\n'
        )
    return script + "echo searched\n"


def _joined(tests: Sequence[str]) -> list[str]:
    """Return alternatives of `find`; too many for one command line are several."""
    starts = range(0, len(tests), _TESTS_PER_SEARCH)
    return [" -o ".join(tests[start : start + _TESTS_PER_SEARCH]) for start in starts]


def _literal(name: str) -> str:
    """Return a pattern of `find` that matches one name."""
    return "".join(f"\\{c}" if c in "*?[]\\" else c for c in name)


async def _check_forgery(runner: TaskRunner, task: Task, *, is_strict: bool) -> CheckResult:
    forger = AgentCommand(name="forger", command=("sh", "-c", _forging_script()))
    try:
        run = await runner.run(_with_time(task), forger)
    except AtroposError as error:
        return CheckResult("forgery", "failed", f"the forger could not run: {error}")
    if run.reward == 0:
        return CheckResult("forgery", "ok")
    return CheckResult(
        "forgery",
        "failed" if is_strict else "warning",
        f"modules or settings of git in the agent's folder make the verifier report {run.reward:g};"
        " run Python as `python3 -I`, and git with `-c core.fsmonitor=false`",
    )


def _forging_script() -> str:
    """Return a script that plants modules and settings which programs of a verifier may load."""
    modules = " ".join(_SHADOWED_MODULES)
    write = f"printf %s {shlex.quote(_FORGED_MODULE)}"
    return (
        f"for module in {modules}; do [ -e $module.py ] || {write} > $module.py; done 2>/dev/null\n"
        "find . -maxdepth 3 -type d -name .git 2>/dev/null | while IFS= read -r git; do\n"
        f'printf \'[core]\\n\\tfsmonitor = "{_FORGED_PROGRAM}; false"\\n\' >> "$git/config"\n'
        "done\n"
        "exit 0\n"
    )

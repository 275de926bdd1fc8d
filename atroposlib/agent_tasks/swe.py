"""Rows in the style of SWE-bench, written as task folders.

    row + repository ─► environment/   Dockerfile, the files of the repository at its base commit
                     ─► solution/      the patch of the row, and solve.sh
                     ─► tests/         the test files after the test patch, test.sh, grade.py

The workspace has one commit, so the history after the base commit is not in it. The verifier puts
its own test files in place of the agent's, runs the test command, and compares the results of
tests with FAIL_TO_PASS and PASS_TO_PASS.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["COLUMNS", "LOG_FORMATS", "SweSettings", "write_swe_task", "write_swe_tasks"]

COLUMNS = (
    *("instance_id", "repo", "base_commit", "problem_statement"),
    *("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"),
)
LOG_FORMATS = ("pytest", "unittest")
WORKDIR = "/testbed"
_GIT_S = 300.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_MAX_TESTS = 20_000
_GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    **{f"GIT_{who}_NAME": "Task" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "task@localhost" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
_TASK_TOML = """\
schema_version = "1.4"
artifacts = ["{workdir}"]

[metadata]
category = "repository"
repository = {repo}
base_commit = {commit}

[environment]
network_mode = "no-network"
workdir = "{workdir}"
memory_mb = {memory_mb}

[agent]
timeout_sec = {agent_s:g}

[verifier]
timeout_sec = {verifier_s:g}
"""
_DOCKERFILE = """\
FROM {image}
WORKDIR {workdir}
COPY repository {workdir}
{setup}"""
_SOLVE = """\
#!/bin/bash
git apply --whitespace=nowarn /solution/solution.patch
"""
_TEST = """\
#!/bin/bash
# Puts the test files in place, runs them, and writes the reward.
while IFS= read -r file; do rm -f -- "$file"; done < /tests/removed.txt
cp -r /tests/files/. .
output=$(mktemp)
({command}) > "$output" 2>&1
tail -c 20000 "$output"
cd / && python3 -I /tests/grade.py "$output"
"""
_GRADE = '''\
"""Compare the results of tests with those that are expected, and write the reward."""

import json
import re
import sys

PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED) (\\S.*)$")
UNITTEST = re.compile(r"^(\\w+) \\(([\\w.]+)\\)")


def passed_pytest(text):
    """Return the ids after PASSED in the summary of `pytest -rA`."""
    found = filter(None, map(PYTEST.match, text.splitlines()))
    # The reason of an expected failure follows its id.
    return {
        match[2].partition(" - ")[0] if match[1] == "XFAIL" else match[2]
        for match in found
        if match[1] in ("PASSED", "XFAIL")
    }


def passed_unittest(text):
    """Return `name (module.Class)` of the tests that `unittest -v` reports as ok."""
    passed, name = set(), None
    for line in text.splitlines():
        match = UNITTEST.match(line)
        if match:
            name = without_method(match[0])
        if name and re.search(r" \\.\\.\\. (ok|expected failure)$", line):
            passed.add(name)
    return passed


def without_method(name):
    """Return an id without the method that Python 3.11 repeats at its end."""
    match = UNITTEST.match(name)
    return f"{match[1]} ({match[2].removesuffix('.' + match[1])})" if match else name


with open("/tests/expected.json") as file:
    expected = json.load(file)
with open(sys.argv[1], errors="replace") as file:
    text = file.read()
passed = passed_unittest(text) if expected["format"] == "unittest" else passed_pytest(text)
fractions = {}
for part in ("fail_to_pass", "pass_to_pass"):
    names = [without_method(name) for name in expected[part]]
    fractions[part] = sum(name in passed for name in names) / len(names) if names else 1.0
    for name in names:
        if name not in passed:
            print(f"{part}: {name} did not pass")
has_tests = bool(expected["fail_to_pass"] or expected["pass_to_pass"])
reward = float(has_tests and all(fraction == 1 for fraction in fractions.values()))
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": reward, **fractions}, file)
'''


_GIT_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.autocrlf=false",
    "protocol.allow=never",
    "protocol.file.allow=always",
    "safe.directory=*",
)


@dataclass(frozen=True)
class SweSettings:
    """Settings for the tasks that are written."""

    repositories: Path
    """Folder with a repository, bundle or archive for each `repo` of the rows."""
    test_command: str = "python3 -m pytest -rA {tests}"
    """Shell command in the repository; `{tests}` stands for the test files of the row."""
    log_format: str = "pytest"
    """Format in which the command prints the results of tests: one of `LOG_FORMATS`."""
    image: str = "python:3.11-slim"
    """Image of the environment; the column `image` of a row has precedence."""
    setup_command: str = ""
    """Shell command that prepares the environment once, such as an installation."""
    memory_mb: int = 2048
    agent_timeout_s: float = 1800.0
    verifier_timeout_s: float = 1800.0


@dataclass(frozen=True)
class _SweRow:
    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    image: str | None


def write_swe_tasks(
    rows: Sequence[Mapping[str, Any]], settings: SweSettings, folder: Path
) -> list[Path]:
    """Write a task folder for each row that has none yet; return the folders of all rows.

    Raises:
        ConfigError: a row is malformed, or its repository or commit is missing.
    """
    return [
        write_swe_task(row, settings, folder, where=f"row {number}")
        for number, row in enumerate(rows)
    ]


def write_swe_task(
    values: Mapping[str, Any], settings: SweSettings, folder: Path, *, where: str = "row"
) -> Path:
    """Write one task folder, unless it exists, and return it.

    Raises:
        ConfigError: as `write_swe_tasks`.
    """
    row = _read_row(values, where)
    target = folder / row.instance_id
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as made:
        task = Path(made, row.instance_id)
        _write_files(row, settings, task, f"{where} ({row.instance_id})")
        task.rename(target)
    return target


def _read_row(values: Mapping[str, Any], where: str) -> _SweRow:
    missing = [column for column in COLUMNS if values.get(column) is None]
    if missing:
        raise ConfigError(f"{where} has no {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    for column, pattern in (("instance_id", _ID), ("repo", _REPOSITORY), ("base_commit", _COMMIT)):
        if not isinstance(values[column], str) or not pattern.fullmatch(values[column]):
            raise ConfigError(f"{where}: {column}: not valid: {str(values[column])[:80]!r}")
    texts = {column: values[column] for column in ("problem_statement", "patch", "test_patch")}
    for column, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError(f"{where}: {column}: expected a text, got {type(text).__name__}")
    for column in ("patch", "test_patch"):
        # Some data sets strip their texts; git needs the end of the last line.
        if not texts[column].endswith("\n"):
            texts[column] += "\n"
    image = values.get("image") or None  # tables have an empty text where there is none
    if image is not None and not re.fullmatch(r"[\w./:@-]{1,300}", str(image)):
        raise ConfigError(f"{where}: image: expected the name of an image, got {str(image)[:80]!r}")
    return _SweRow(
        instance_id=values["instance_id"],
        repo=values["repo"],
        base_commit=values["base_commit"],
        fail_to_pass=_test_names(values["FAIL_TO_PASS"], f"{where}: FAIL_TO_PASS"),
        pass_to_pass=_test_names(values["PASS_TO_PASS"], f"{where}: PASS_TO_PASS"),
        image=image,
        **texts,
    )


def _test_names(value: Any, where: str) -> list[str]:
    """Return a list, or one that is written as a JSON string, as data sets have it."""
    try:
        names: Any = json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError, RecursionError):
        names = None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if is_list and len(names) <= _MAX_TESTS:
        return list(names)
    raise ConfigError(f"{where}: expected a list of up to {_MAX_TESTS} names of tests")


def _write_files(row: _SweRow, settings: SweSettings, task: Path, where: str) -> None:
    repository = task / "environment" / "repository"
    repository.mkdir(parents=True)
    _snapshot(row, settings.repositories.resolve(), repository, where)
    setup = f"RUN {settings.setup_command}\n" if settings.setup_command else ""
    dockerfile = _DOCKERFILE.format(image=row.image or settings.image, workdir=WORKDIR, setup=setup)
    (task / "environment" / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    (task / "instruction.md").write_text(row.problem_statement, encoding="utf-8")
    toml = _TASK_TOML.format(
        workdir=WORKDIR,
        repo=json.dumps(row.repo),
        commit=json.dumps(row.base_commit),
        memory_mb=settings.memory_mb,
        agent_s=settings.agent_timeout_s,
        verifier_s=settings.verifier_timeout_s,
    )
    (task / "task.toml").write_text(toml, encoding="utf-8")
    solution = task / "solution"
    solution.mkdir()
    (solution / "solution.patch").write_text(row.patch, encoding="utf-8")
    (solution / "solve.sh").write_text(_SOLVE, encoding="utf-8")
    _write_tests(row, settings, task / "tests", repository, where)


def _write_tests(
    row: _SweRow, settings: SweSettings, tests: Path, repository: Path, where: str
) -> None:
    """Write the test files as they are after the test patch, and what compares the results."""
    (tests / "files").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        patched = Path(made, "repository")
        shutil.copytree(repository, patched, symlinks=True)
        _git(["apply", "--whitespace=nowarn", "-"], patched, where, stdin=row.test_patch)
        _git(["add", "--all", "--force"], patched, where)
        command = ["diff", "--cached", "--no-renames", "--no-ext-diff", "--name-status", "-z"]
        fields = _git(command, patched, where).split("\0")
        changed = list(zip(fields[0::2], fields[1::2], strict=False))
        for status, name in changed:
            if status != "D":
                (tests / "files" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(patched / name, tests / "files" / name, follow_symlinks=False)
    kept = sorted(name for status, name in changed if status != "D")
    removed = "".join(f"{name}\n" for status, name in changed if status == "D")
    (tests / "removed.txt").write_text(removed, encoding="utf-8")
    command_text = settings.test_command.replace("{tests}", shlex.join(_test_files(kept)))
    (tests / "test.sh").write_text(_TEST.replace("{command}", command_text), encoding="utf-8")
    (tests / "grade.py").write_text(_GRADE, encoding="utf-8")
    expected = {
        "format": settings.log_format,
        "fail_to_pass": row.fail_to_pass,
        "pass_to_pass": row.pass_to_pass,
    }
    (tests / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")


def _test_files(names: Sequence[str]) -> list[str]:
    """Return the files that a test command takes: without data and helpers, if others remain."""
    python = [name for name in names if name.endswith(".py")]
    tests = [name for name in python if "test" in Path(name).name and "conftest" not in name]
    return tests or python or list(names)


def _snapshot(row: _SweRow, repositories: Path, target: Path, where: str) -> None:
    """Write the files at the base commit, as a repository with one commit."""
    source = _repository(row, repositories, where)
    if source.name.endswith((".tar", ".tar.gz", ".tgz")):
        _extract(source, target, where)
    else:
        with tempfile.TemporaryDirectory() as made:
            if source.is_file():
                bundle, source = source, Path(made, "repository")
                _git(["clone", "--quiet", "--bare", str(bundle), str(source)], Path(made), where)
            # `git archive` would leave out files with the attribute export-ignore.
            env = {
                "GIT_DIR": str(_without_settings(source, Path(made, "git"), where)),
                "GIT_WORK_TREE": str(target),
                "GIT_INDEX_FILE": str(Path(made, "index")),
            }
            _git(["read-tree", row.base_commit], target, where, env=env)
            _git(["checkout-index", "--all"], target, where, env=env)
    for command in (
        ["init", "--quiet", "--template=", "--initial-branch=main"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "--message", f"{row.repo} at {row.base_commit}"],
    ):
        _git(command, target, where)


def _without_settings(source: Path, target: Path, where: str) -> Path:
    """Make a bare repository with the objects of another, but not the programs in its settings."""
    objects = _git(["rev-parse", "--git-path", "objects"], source, where).removesuffix("\n")
    kind = _git(["rev-parse", "--show-object-format"], source, where).strip()
    command = ["init", "--quiet", "--bare", "--template=", f"--object-format={kind}", str(target)]
    _git(command, target.parent, where)
    alternates = target / "objects" / "info" / "alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_bytes(os.fsencode(source.resolve() / objects) + b"\n")
    return target


def _extract(archive: Path, target: Path, where: str) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        _remove_git_folders(target)
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{where}: {archive} cannot be unpacked: {error}") from error


def _remove_git_folders(folder: Path) -> None:
    """Remove what git has put into a checkout.

    It would show later commits, run programs that its settings name, and, in the file that stands
    for the folder in a worktree, lead to the repository outside.
    """
    for path in list(folder.rglob(".git")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # it may have been in a folder that was removed


def _repository(row: _SweRow, repositories: Path, where: str) -> Path:
    name = row.repo.replace("/", "__")
    stems = (row.instance_id, name, row.repo, row.repo.rpartition("/")[2])
    suffixes = ("", ".git", ".bundle", ".tar", ".tar.gz", ".tgz")
    candidates = [repositories / f"{stem}{suffix}" for stem in stems for suffix in suffixes]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise ConfigError(
            f"{where}: there is no repository of {row.repo} in {repositories}; expected "
            f"{name}/, {name}.git/, {name}.bundle, or {row.instance_id}.tar with its files"
        )
    return found


def _git(
    command: Sequence[str],
    folder: Path,
    where: str,
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> str:
    """Run git without settings of the user and hooks; return its output."""
    options = [part for setting in _GIT_SETTINGS for part in ("-c", setting)]
    variables = {"PATH": os.defpath, "HOME": "/nonexistent", **_GIT_ENV}
    program = shutil.which("git")
    if program is None:
        raise ConfigError("git is missing; it writes the repositories of tasks")
    try:
        done = subprocess.run(
            [program, *options, *command],
            cwd=folder,
            env={**variables, **(env or {})},
            timeout=_GIT_S,
            check=False,
            input=stdin.encode(),
            capture_output=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{where}: git {command[0]} could not run: {error}") from error
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise ConfigError(f"{where}: git {command[0]} failed: {reason}")
    return os.fsdecode(done.stdout)

"""Rows in the style of SWE-bench become task folders whose verifier runs the hidden tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.agent_tasks.folder import load_task
from atroposlib.agent_tasks.swe import _GRADE, SweSettings, write_swe_task, write_swe_tasks
from atroposlib.errors import ConfigError

WRONG = "def double(x):\n    return x + x + x\n"
RIGHT = "def double(x):\n    return x + x\n"
OLD_TEST = "import unittest\n"
NEW_TEST = """\
import unittest

from maths import double


class DoubleTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)

    def test_zero(self):
        self.assertEqual(double(0), 0)
"""


def git(folder: Path, *command: str) -> str:
    identity = (
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@example.com",
        "-c",
        "core.hooksPath=/dev/null",
    )
    done = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode()


def make_repository(folder: Path) -> dict[str, Any]:
    """Write a repository whose second commit repairs a function; return the row of it."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".gitattributes").write_text("test_maths.py export-ignore\n")
    (folder / "maths.py").write_text(WRONG)
    (folder / "test_maths.py").write_text(OLD_TEST)
    (folder / "test_old.py").write_text(OLD_TEST)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "maths.py").write_text(RIGHT)
    patch = git(folder, "diff")
    git(folder, "checkout", "--quiet", "maths.py")
    (folder / "test_maths.py").write_text(NEW_TEST)
    (folder / "test_old.py").unlink()
    test_patch = git(folder, "diff")
    (folder / "maths.py").write_text(RIGHT)
    git(folder, "commit", "--quiet", "--all", "--message", "the repair")
    return {
        "instance_id": "org__maths-1",
        "repo": "org/maths",
        "base_commit": base,
        "problem_statement": "double(2) is 6.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": '["test_two (test_maths.DoubleTest)"]',
        "PASS_TO_PASS": ["test_zero (test_maths.DoubleTest.test_zero)"],
    }


def settings(tmp_path: Path) -> SweSettings:
    return SweSettings(
        repositories=tmp_path / "repositories",
        test_command="python3 -m unittest -v {tests}",
        log_format="unittest",
    )


def test_row_becomes_a_task_without_its_future(tmp_path: Path) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths")

    folder = write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    task = load_task(folder)
    repository = folder / "environment" / "repository"
    assert (task.name, task.workdir) == ("org__maths-1", "/testbed")
    assert (repository / "maths.py").read_text() == WRONG
    assert (repository / "test_maths.py").read_text() == OLD_TEST
    assert git(repository, "log", "--format=%s").splitlines() == [
        f"org/maths at {row['base_commit']}"
    ]
    assert git(repository, "status", "--porcelain") == ""
    assert (folder / "tests" / "files" / "test_maths.py").read_text() == NEW_TEST
    assert (folder / "tests" / "removed.txt").read_text() == "test_old.py\n"
    assert "unittest -v test_maths.py" in (folder / "tests" / "test.sh").read_text()
    git(repository, "apply", str(folder / "solution" / "solution.patch"))
    assert (repository / "maths.py").read_text() == RIGHT


@pytest.mark.parametrize("kind", ["bundle", "tar", "git"])
def test_repository_may_be_a_file(tmp_path: Path, kind: str) -> None:
    made = tmp_path / "made"
    row = make_repository(made)
    repositories = tmp_path / "repositories"
    repositories.mkdir()
    if kind == "bundle":
        git(made, "bundle", "create", "--quiet", str(repositories / "maths.bundle"), "main")
    elif kind == "git":
        git(tmp_path, "clone", "--quiet", "--bare", str(made), str(repositories / "maths.git"))
    else:
        git(made, "checkout", "--quiet", row["base_commit"])
        files = ("maths.py", "test_maths.py", "test_old.py")
        archive = repositories / "org__maths-1.tar"
        subprocess.run(["tar", "-cf", archive, *files], cwd=made, check=True)

    folder = write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    assert (folder / "environment" / "repository" / "maths.py").read_text() == WRONG
    assert load_task(folder).name == row["instance_id"]


def archived_with_git(folder: Path, repositories: Path, *, is_worktree: bool) -> dict[str, Any]:
    """Archive a checkout with its folder `.git`, or a worktree with its file `.git`."""
    row = make_repository(folder)
    checkout = folder
    if is_worktree:
        checkout = folder.with_name("worktree")
        git(folder, "worktree", "add", "--quiet", str(checkout), row["base_commit"])
    else:
        git(folder, "checkout", "--quiet", row["base_commit"])
    repositories.mkdir()
    archive = repositories / "org__maths-1.tar"
    subprocess.run(["tar", "-C", checkout, "-cf", archive, "."], check=True)
    return row


@pytest.mark.parametrize("is_worktree", [False, True])
def test_archive_of_a_checkout_shows_no_later_commit(tmp_path: Path, is_worktree: bool) -> None:
    made = tmp_path / "made"
    row = archived_with_git(made, tmp_path / "repositories", is_worktree=is_worktree)

    folder = write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    repository = folder / "environment" / "repository"
    assert (repository / "maths.py").read_text() == WRONG
    assert git(repository, "log", "--all", "--format=%s").splitlines() == [
        f"org/maths at {row['base_commit']}"
    ]
    assert git(made, "log", "--all", "--format=%s").splitlines() == ["the repair", "base"]


def test_settings_of_git_in_an_archive_run_no_program(tmp_path: Path) -> None:
    made, ran = tmp_path / "made", tmp_path / "ran"
    row = make_repository(made)
    git(made, "checkout", "--quiet", row["base_commit"])
    git(made, "config", "filter.x.clean", f"touch {ran}; cat")
    (made / ".gitattributes").write_text("*.py filter=x\n")
    (tmp_path / "repositories").mkdir()
    archive = tmp_path / "repositories" / "org__maths-1.tar"
    subprocess.run(["tar", "-C", made, "-cf", archive, "."], check=True)

    write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    assert not ran.exists()


def test_settings_of_git_in_a_repository_run_no_program(tmp_path: Path) -> None:
    repository, ran = tmp_path / "repositories" / "org__maths", tmp_path / "ran"
    row = make_repository(repository)
    git(repository, "config", "filter.x.smudge", f"touch {ran}; cat")
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("*.py filter=x\n")

    write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    assert not ran.exists()


def test_commit_of_a_shallow_worktree_is_found(tmp_path: Path) -> None:
    made, shallow = tmp_path / "made", tmp_path / "shallow"
    row = make_repository(made)
    git(made, "branch", "base", row["base_commit"])
    fetch = ("clone", "--quiet", "--depth=1", "--branch=base", f"file://{made}", str(shallow))
    git(tmp_path, *fetch)
    (tmp_path / "repositories").mkdir()
    worktree = tmp_path / "repositories" / "org__maths"
    git(shallow, "worktree", "add", "--quiet", "--detach", str(worktree), row["base_commit"])

    folder = write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    assert (folder / "environment" / "repository" / "maths.py").read_text() == WRONG


def test_empty_image_is_that_of_the_settings(tmp_path: Path) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths") | {"image": ""}

    folder = write_swe_task(row, settings(tmp_path), tmp_path / "tasks")

    dockerfile = (folder / "environment" / "Dockerfile").read_text()
    assert dockerfile.startswith(f"FROM {settings(tmp_path).image}\n")


def test_patches_without_a_line_end_are_applied(tmp_path: Path) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths")
    stripped = {name: row[name].rstrip("\n") for name in ("patch", "test_patch")}

    folder = write_swe_task({**row, **stripped}, settings(tmp_path), tmp_path / "tasks")

    assert (folder / "tests" / "files" / "test_maths.py").read_text() == NEW_TEST
    repository = folder / "environment" / "repository"
    git(repository, "apply", str(folder / "solution" / "solution.patch"))
    assert (repository / "maths.py").read_text() == RIGHT


def test_existing_task_is_kept(tmp_path: Path) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths")
    (folder,) = write_swe_tasks([row], settings(tmp_path), tmp_path / "tasks")
    (folder / "instruction.md").write_text("edited")

    write_swe_tasks([row], settings(tmp_path), tmp_path / "tasks")

    assert (folder / "instruction.md").read_text() == "edited"
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["org__maths-1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instance_id": "../x"}, "instance_id: not valid: '../x'"),
        ({"repo": "a/b/c"}, "repo: not valid"),
        ({"base_commit": "--help"}, "base_commit: not valid"),
        ({"base_commit": "0" * 40}, "git read-tree failed"),
        ({"repo": "org/none"}, "there is no repository of org/none"),
        ({"patch": None}, "row 0 has no patch"),
        ({"patch": 3}, "patch: expected a text, got int"),
        ({"FAIL_TO_PASS": "x"}, "FAIL_TO_PASS: expected a list"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: expected a list"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "FAIL_TO_PASS: expected a list"),
        ({"test_patch": "x"}, "git apply failed"),
        (
            {"test_patch": "--- /dev/null\n+++ b/../../out\n@@ -0,0 +1 @@\n+x\n"},
            "git apply failed",
        ),
        ({"image": "a b\nRUN x"}, "image: expected the name of an image"),
    ],
)
def test_bad_row_is_refused_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    row = make_repository(tmp_path / "repositories" / "org__maths") | change
    (tmp_path / "tasks").mkdir()

    with pytest.raises(ConfigError, match="row 0") as refused:
        write_swe_tasks([row], settings(tmp_path), tmp_path / "tasks")

    assert said in str(refused.value)
    assert list((tmp_path / "tasks").iterdir()) == []


PYTEST_LOG = """\
tests/test_a.py ..F                      [100%]
=========== short test summary info ============
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[a b]
FAILED tests/test_a.py::test_three - assert 1 == 2
"""
UNITTEST_LOG = """\
test_one (test_a.T.test_one) ... ok
test_two (test_a.T)
The first line of its docstring. ... ok
test_three (test_a.T.test_three) ... FAIL
test_four (test_a.T.test_four) ... skipped 'x'
"""


A, B = "tests/test_a.py", "test_a.T"


@pytest.mark.parametrize(
    ("log_format", "fail_to_pass", "pass_to_pass", "reward"),
    [
        ("pytest", [f"{A}::test_one"], [f"{A}::test_two[a b]"], [1, 1, 1]),
        ("pytest", [f"{A}::test_three"], [f"{A}::test_one"], [0, 0, 1]),
        ("pytest", [f"{A}::none", f"{A}::test_one"], [], [0, 0.5, 1]),
        ("pytest", [], [], [0, 1, 1]),  # nothing that could have passed
        ("unittest", [f"test_one ({B})"], [f"test_two ({B}.test_two)"], [1, 1, 1]),
        ("unittest", [f"test_four ({B})"], [f"test_three ({B})"], [0, 0, 0]),
    ],
)
def test_grade_compares_results_of_tests(
    tmp_path: Path,
    log_format: str,
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    reward: list[float],
) -> None:
    expected = {"format": log_format, "fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    (tmp_path / "log").write_text(PYTEST_LOG if log_format == "pytest" else UNITTEST_LOG)
    grade = _GRADE.replace("/tests/", f"{tmp_path}/").replace("/logs/verifier/", f"{tmp_path}/")
    (tmp_path / "grade.py").write_text(grade)

    subprocess.run([sys.executable, "-I", tmp_path / "grade.py", tmp_path / "log"], check=True)

    written = json.loads((tmp_path / "reward.json").read_text())
    assert [written[key] for key in ("reward", "fail_to_pass", "pass_to_pass")] == reward

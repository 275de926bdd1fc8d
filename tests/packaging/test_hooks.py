"""`pre-commit install` in any environment: its hook finds the tools of that environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.installed import REPOSITORY

pytestmark = pytest.mark.slow

SLOW_HOOKS = "mypy,architecture,codespell,detect-secrets"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the hooks and nothing else, where `.venv` is not."""
    for name in (".pre-commit-config.yaml", ".ci/hook", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.email", "test@example.org")
    git(tmp_path, "config", "user.name", "test")
    return tmp_path


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git as a shell without an active environment would."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "VIRTUAL_ENV"))}
    own = Path(sys.executable).parent
    path = [part for part in variables["PATH"].split(os.pathsep) if Path(part) != own]
    variables |= {"PATH": os.pathsep.join(path), "SKIP": SLOW_HOOKS}
    variables["PRE_COMMIT_HOME"] = str(folder / ".git" / "pre-commit")
    return subprocess.run(
        ["git", *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_hook_runs_tools_of_the_environment_it_was_installed_from(clone: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "install"],
        cwd=clone,
        env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        check=True,
        capture_output=True,
    )
    (clone / "sloppy.py").write_text('"""A module."""\n\nimport os\n')
    git(clone, "add", "sloppy.py")

    refused = git(clone, "commit", "--message", "try")
    (clone / "sloppy.py").write_text('"""A module."""\n')
    git(clone, "add", "sloppy.py")
    accepted = git(clone, "commit", "--message", "try again")

    assert refused.returncode == 1
    assert "F401" in refused.stdout + refused.stderr
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr


def test_missing_tool_is_one_line(clone: Path) -> None:
    done = subprocess.run(
        ["bash", ".ci/hook", "no-such-tool"], cwd=clone, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == "error: no-such-tool is not installed; run: pip install '.[dev]'\n"

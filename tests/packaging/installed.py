"""Environments made of the built wheel or sdist: what a stranger has after `pip install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Installed", "build", "make_environment"]

REPOSITORY = Path(__file__).parents[2]
TIME_LIMIT_S = 280.0


@dataclass(frozen=True)
class Installed:
    """A virtual environment that knows the package only from its installation."""

    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment by its name and return how it ended."""
        command = [self.program(words[0]), *words[1:]]
        return _run(command, cwd=cwd, env=self.variables())

    @staticmethod
    def variables() -> dict[str, str]:
        """Return the variables of a process that must not see the repository or the hub."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def build(kind: str, *, source: Path, out: Path) -> Path:
    """Build a `wheel` or `sdist` from a source tree and return the file."""
    uv = _uv()
    if uv:
        command = [uv, "build", "--quiet", f"--{kind}", "--out-dir", str(out), str(source)]
    elif kind == "wheel":
        command = [*_pip(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(out)]
        command.append(str(source))
    else:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist"]
        command += ["--directory", str(out)]
    _succeed(command, cwd=source)
    [built] = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def make_environment(folder: Path, *requirements: str) -> Installed:
    """Make a virtual environment with some requirements at the versions that CI tests.

    On Python 3.10, which several of them do not support, the versions are the newest.
    """
    uv = _uv()
    installed = Installed(folder)
    if uv:
        _succeed([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], cwd=REPOSITORY)
        install = [uv, "pip", "install", "--quiet", "--python", installed.program("python")]
    else:
        _succeed([sys.executable, "-m", "venv", str(folder)], cwd=REPOSITORY)
        install = [*_pip(installed.program("python")), "install", "--quiet"]
    if sys.version_info >= (3, 11):
        install += ["--constraint", str(REPOSITORY / ".ci" / "constraints.txt")]
    _succeed([*install, *requirements], cwd=REPOSITORY)
    return installed


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check"]


def _succeed(command: list[str], *, cwd: Path) -> None:
    env = Installed.variables()
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    done = _run(command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def _run(command: list[str], *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )

"""Tests of adapters in an environment with the adapted package, one environment per ecosystem.

    requirements/NAME.txt  packages of an ecosystem and of its test servers ─┐
    core dependencies of pyproject.toml, pytest ─────────────────────────────┴► pins/NAME.txt ─► uv

Packages of ecosystems require versions of shared packages that exclude each other, so most of them
cannot be installed next to the others. `python -m tests.adapters.own_environments` renews the pins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.installing import interpreter_of, python_of

__all__ = ["ECOSYSTEMS", "Ecosystem", "environment_of", "python_with"]

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
REQUIREMENTS = FOLDER / "requirements"
PINS = FOLDER / "pins"
TEST_PACKAGES = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "coverage",
)


@dataclass(frozen=True)
class Ecosystem:
    """One environment and the tests that run in it."""

    name: str
    """Name of its files in `requirements` and `pins`."""
    tests: tuple[str, ...]
    """Test files, relative to the repository."""
    version: str | None = None
    """Version of Python; None means that of the main environment."""


ADAPTERS = "tests/adapters"
SERVING = "tests/serving"
EXPORTING = "tests/exporting"


def _tests_of(*kinds: str, pages: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the test files of adapters, and the tests of pages whose servers need no fixture."""
    page = f"{ADAPTERS}/test_pages.py::test_every_command_of_the_page_works"
    files = [f"{ADAPTERS}/test_{kind}.py" for kind in kinds]
    return (*files, *(f"{page}[{kind}]" for kind in pages))


ECOSYSTEMS = {
    ecosystem.name: ecosystem
    for ecosystem in (
        Ecosystem(
            "games",
            (
                *_tests_of("gymnasium", "textarena", "textworld", pages=("textarena", "textworld")),
                "tests/environments/test_diplomacy.py",
            ),
        ),
        Ecosystem("harbor", (f"{EXPORTING}/test_trace_formats.py",), version="3.12"),
        Ecosystem("gem", _tests_of("gem", pages=("gem",))),
        Ecosystem("inspect_ai", _tests_of("inspect_ai", pages=("inspect_ai",))),
        Ecosystem("nemo_gym", _tests_of("nemo_gym"), version="3.12"),
        Ecosystem("openenv", (*_tests_of("openenv"), f"{EXPORTING}/test_trace_formats.py")),
        Ecosystem("ors", _tests_of("ors")),
        Ecosystem("verifiers", _tests_of("verifiers")),
        Ecosystem("verifiers_rubric", _tests_of("verifiers", pages=("verifiers",))),
        Ecosystem(
            "serving", tuple(f"{SERVING}/test_{part}.py" for part in ("openenv", "ors", "page"))
        ),
        Ecosystem("serving_verifiers", (f"{SERVING}/test_verifiers.py", f"{SERVING}/test_page.py")),
    )
}


def python_with(name: str, *, limit_s: float = 900) -> Path:
    """Return the interpreter of an ecosystem's environment, which is made if missing.

    Raises:
        NotInstallableError: it cannot be made here.
    """
    ecosystem = ECOSYSTEMS[name]
    return python_of(name, limit_s=limit_s, pins=PINS, version=ecosystem.version)


def environment_of(python: Path) -> dict[str, str]:
    """Return the variables of a process in an ecosystem's environment, with this repository."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    left_out = ("PYTEST_", "VIRTUAL_ENV", "COVERAGE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return {**kept, "PATH": path, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}


def pin(name: str) -> None:
    """Write the pins of an ecosystem."""
    ecosystem = ECOSYSTEMS[name]
    version = ecosystem.version or f"{sys.version_info[0]}.{sys.version_info[1]}"
    uv = str(Path(sys.executable).parent / "uv")
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
    ]
    command += ["--python", interpreter_of(version)]
    command += [str(REPOSITORY / "pyproject.toml"), str(REQUIREMENTS / f"{name}.txt"), "-"]
    command += ["-o", str(PINS / f"{name}.txt")]
    text = "\n".join(TEST_PACKAGES)
    subprocess.run(command, input=text, text=True, check=True, cwd=REPOSITORY)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ECOSYSTEMS:
        pin(chosen)

"""Run the tests of a subject against its mutants, each in a process of its own.

    this process, with the libraries ──fork──► import hook with the changed module ──► pytest -x

Nothing is written to the working tree: only that process has the changed module, in its memory.
Forking after the libraries are loaded saves the seconds that importing torch takes.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NamedTuple

from helpers.mutants.changes import Change, find_changes
from helpers.mutants.subjects import Part, Subject

REPOSITORY = Path(__file__).parents[2]
LIBRARIES = (
    "torch.distributed.tensor", "transformers", "numpy", "hypothesis", "pytest", "pytest_asyncio",
    "xdist", "pydantic_settings", "fastapi.testclient", "aiohttp.web", "httpx", "openai", "msgspec",
    "datasets", "safetensors.torch", "sympy", "uvicorn", "prometheus_client", "wandb", "jinja2",
    "rich.console", "tenacity", "zstandard", "fsspec", "torch.testing",
)  # fmt: skip
"""What the tests import first; a library that is not installed is left out."""
PYTEST = (
    "-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider",
    "-p", "no:unraisableexception",
)  # fmt: skip
SECONDS_AT_LEAST = 20.0
"""A mutant that runs longer, and ten times as long as the tests of its subject, is killed."""

Outcome = Literal["killed", "timed out", "survived"]


class Mutant(NamedTuple):
    """One change of one module of a subject."""

    subject: str
    path: str
    """Of the module, relative to the repository."""
    change: Change

    @property
    def name(self) -> str:
        return f"{self.path}: {self.change.name}"


class Verdict(NamedTuple):
    """The outcome of one mutant."""

    mutant: Mutant
    outcome: Outcome
    duration_s: float


def mutants_of(subject: Subject) -> list[Mutant]:
    """Return the mutants of a subject in their random order."""
    found = [
        Mutant(subject.name, part.path, change)
        for part in subject.parts
        for change in find_changes(_tree(part))
        if part.holds(change.where)
    ]
    return sorted(found, key=lambda mutant: mutant.change.order)


def load_libraries() -> None:
    """Import the libraries that every test needs, so that forked processes have them."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # spares every process the objects of the libraries when it collects garbage


def run_mutants(subject: Subject, mutants: Sequence[Mutant], *, jobs: int) -> Iterator[Verdict]:
    """Yield the verdicts of the mutants as they are reached.

    Raises:
        RuntimeError: The tests of the subject fail, or find no test, with the modules as they are.
    """
    started = time.monotonic()
    process = _start(subject, None)
    status = _wait(process, time.monotonic() + 600)
    if status != 0:
        raise RuntimeError(
            f"tests of {subject.name} ended with code {status} without a change; "
            f"run: python -m pytest -x {' '.join(subject.tests)}"
        )
    limit_s = max(SECONDS_AT_LEAST, 10 * (time.monotonic() - started))
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[_start(subject, mutant)] = mutant, time.monotonic()
        for process, (mutant, since) in list(running.items()):
            outcome = _outcome(process, mutant, is_late=time.monotonic() - since > limit_s)
            if outcome is not None:
                del running[process]
                yield Verdict(mutant, outcome, time.monotonic() - since)
        time.sleep(0.02)


def _outcome(process: int, mutant: Mutant, *, is_late: bool) -> Outcome | None:
    ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        if is_late:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "timed out"
        return None
    code = os.waitstatus_to_exitcode(status)
    if code in (3, 4, 5):  # of pytest: internal error, wrong arguments, no test found
        raise RuntimeError(f"pytest ended with code {code} for the mutant {mutant.name}")
    return "survived" if code == 0 else "killed"


def _wait(process: int, until: float) -> int:
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -signal.SIGKILL


def _start(subject: Subject, mutant: Mutant | None) -> int:
    """Fork a process that runs the tests, with the changed module if a mutant is given."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 3
    try:
        os.setsid()
        code = _run_tests(subject, mutant)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)


def _run_tests(subject: Subject, mutant: Mutant | None) -> int:
    """Run the tests in this process, silently, and return the exit code of pytest."""
    import hypothesis
    import pytest

    os.chdir(REPOSITORY)
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    # No shrinking: one counterexample is enough. The same examples every time.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", phases=phases, derandomize=True, database=None, deadline=None
    )
    hypothesis.settings.load_profile("mutants")
    if mutant is not None:
        sys.meta_path.insert(0, _ChangedModule(mutant))
    return int(pytest.main([*PYTEST, *subject.tests]))


class _ChangedModule(importlib.abc.MetaPathFinder):
    """Finds the one module that has a change."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if fullname != self._name:
            return None
        file = str(REPOSITORY / self._mutant.path)
        loader = _ChangedLoader(fullname, file)
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _ChangedLoader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        name = self.mutant.change.name
        next(change for change in find_changes(tree) if change.name == name).apply()
        return compile(tree, self.path, "exec", dont_inherit=True)


def _tree(part: Part) -> ast.Module:
    return ast.parse((REPOSITORY / part.path).read_text(encoding="utf-8"))

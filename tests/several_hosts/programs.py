"""Runs a program of this folder in a test, and checks the rows that it prints."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.several_hosts.faults import missing_tools, select

__all__ = ["check_rows", "run_program"]


def run_program(*arguments: str) -> str:
    """Run a program; return what it printed. Skips where there cannot be several hosts."""
    reason = missing_tools()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, (done.stdout, done.stderr[-6000:])
    print(done.stdout)  # the figures, for `pytest -rP`
    return done.stdout


def check_rows(*rows: str, options: tuple[str, ...] = ()) -> None:
    """Run rows of the table; in each, nothing is lost and nothing comes twice."""
    printed = run_program("tests.several_hosts.faults", *options, "--rows", *rows)

    assert printed.count("| 0 | 0 |\n") == len(select(rows))
    assert "nothing lost, nothing trained twice" in printed

"""The shell of agents: its commands end, whatever they start or print."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.agent_tasks.programs import shell
from atroposlib.agent_tasks.programs.shell import MAX_OUTPUT, command_in, run_command

pytestmark = pytest.mark.slow

LIMITS_S = (1.0, 30.0)
"""Time limits to try: within the first, a busy machine may not start a command."""


def test_output_and_exit_code_are_shown() -> None:
    assert run_command("echo out; echo err >&2; exit 3") == "[exit code 3]\nout\nerr"


def test_command_ends_although_a_daemon_holds_its_output(tmp_path: Path) -> None:
    for limit_s in LIMITS_S:
        daemon = tmp_path / f"pid-{limit_s:g}"
        started = f"echo $$ > {daemon}.new; mv {daemon}.new {daemon}"
        shown = run_command(f"setsid sh -c '{started}; exec sleep 600' & echo hi", limit_s)
        if daemon.exists() and "hi" in shown:
            break

    pid = int(daemon.read_text())
    assert Path(f"/proc/{pid}/cmdline").read_bytes()  # empty if the command waited for its end
    os.kill(pid, signal.SIGKILL)
    assert shown == f"[killed after {limit_s:g} s]\nhi"


def test_command_that_closed_its_output_is_killed() -> None:
    for limit_s in LIMITS_S:
        shown = run_command("echo hi; exec >&- 2>&-; sleep 600", limit_s)
        if "hi" in shown:
            break

    assert shown == f"[killed after {limit_s:g} s]\nhi"


def test_endless_output_is_not_kept_in_memory() -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(shell.__file__).parent)!r})
import shell
resource.setrlimit(resource.RLIMIT_DATA, ({2**28}, {resource.RLIM_INFINITY}))
print(shell.run_command("yes", float(sys.argv[1])))
"""

    for limit_s in LIMITS_S:
        words = [sys.executable, "-c", program, str(limit_s)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        if "characters left out]" in done.stdout:
            break

    assert done.stdout.startswith(f"[killed after {limit_s:g} s]\ny\ny\n")
    assert "characters left out]" in done.stdout
    assert len(done.stdout) < MAX_OUTPUT + 100


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800", "echo " + "x" * 200_000])
def test_command_that_cannot_be_run_is_a_result(command: str) -> None:
    assert run_command(command).startswith("[the command cannot be run: ")


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("I look.\n```sh\nls\n```", "ls"),
        ("<think>Or\n```sh\nrm -r .\n```\nNo.</think>\n```sh\nls\n```", "ls"),
        ("Or\n```sh\nrm -r .\n```\nNo.</think>\n```sh\nls\n```", "ls"),  # opened by a template
        ("<think>I ran\n```sh\nls\n```\n</think>It is done.", None),
        ("<think>I could\n```sh\nrm -r .\n```", None),
        ("It is done.", None),
    ],
)
def test_commands_of_the_thinking_are_not_run(reply: str, command: str | None) -> None:
    assert command_in(reply) == command

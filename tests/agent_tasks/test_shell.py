"""The shell of agents: its commands end, whatever they start or print."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atroposlib.agent_tasks.programs import shell
from atroposlib.agent_tasks.programs.shell import MAX_OUTPUT, command_in, run_command

pytestmark = pytest.mark.slow

LIMITS_S = (1.0, 30.0)
"""Time limits to try: within the first, a busy machine may not start a command."""


def test_output_and_exit_code_are_shown() -> None:
    assert run_command("echo out; echo err >&2; exit 3") == "[exit code 3]\nout\nerr"


def test_server_in_the_background_answers_the_next_command(tmp_path: Path) -> None:
    """Also after it has printed more than a pipe holds."""
    program = f"""
import http.server, os
print("starts", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        for _ in range(200):
            print("x" * 1000, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"pong")
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
with open({str(tmp_path / "new")!r}, "w") as file:
    print(server.server_port, os.getpid(), file=file)
os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "server")!r})
server.serve_forever()
"""
    (tmp_path / "server.py").write_text(program)
    ready = tmp_path / "server"
    wait = f"until [ -e {ready} ]; do sleep 0.05; done"

    shown = run_command(f"{sys.executable} {tmp_path}/server.py & {wait}; echo hi", 60)
    port, pid = map(int, ready.read_text().split())
    try:
        asks = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}').read())"
        answers = [run_command(f'{sys.executable} -c "{asks}"', 60) for _ in range(2)]
    finally:
        os.kill(pid, signal.SIGKILL)

    assert shown == "[exit code 0, processes in the background still run]\nstarts\nhi"
    assert answers == ["[exit code 0]\nb'pong'"] * 2


def test_processes_of_a_command_that_takes_too_long_are_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    for limit_s in LIMITS_S:
        shown = run_command(f"sleep 600 & echo $! > {pid}; echo hi; wait", limit_s)
        if "hi" in shown:
            break

    assert shown == f"[killed after {limit_s:g} s]\nhi"
    while _state(int(pid.read_text())) not in ("Z", None):  # a killed process ends a little later
        time.sleep(0.01)


def _state(pid: int) -> str | None:
    """Return the state of a process, Z if it is dead; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


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

"""The agent `shell`: asks for one shell command, runs it, and shows what it printed.

    instruction ─► model ─► ```sh COMMAND ``` ─► output ─► model ─► ... ─► a reply without command

It needs the standard library only and runs inside the workspace. The instruction is its input.
`run_command` is also the tool of the programs in `frameworks.py`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT = (
    "You work in a shell. Reply with one command in a block:\n```sh\nCOMMAND\n```\n"
    "You then see its output. When the task is done, reply without a block."
)
COMMAND = re.compile(r"```[a-z]*[ \t]*\n(.*?)(?:\n)?```", re.DOTALL)
MAX_OUTPUT = 8_000
"""Characters of a command's output that the model sees."""
COMMAND_S = 120.0
END_LOOKS, LOOK_S = 20, 0.05
"""Looks for the end of the output after the end of a command, and seconds between them.

Several looks, since a busy machine may stand still for longer than one of them.
"""
KEPT_BYTES = 65_536
"""Bytes of the start and of the end of an output that are kept in memory."""


class FormatError(Exception):
    """A response of the model's server that is not a chat completion."""


def run_command(command: str, timeout_s: float = COMMAND_S) -> str:
    """Run a shell command and return its exit code and its output.

    Args:
        command: text for `bash -c`.
        timeout_s: time limit in seconds; the command and its children are then killed. Processes
            that it started in the background and did not wait for go on without a limit.
    """
    try:
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (ValueError, OSError) as error:  # a NUL, a lone surrogate, or too long
        return f"[the command cannot be run: {ascii(str(error))[1:-1]}]"
    output = _Output(process)
    try:
        process.wait(timeout_s)
        ending = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ending = f"killed after {timeout_s:g} s"
    if not output.ends_soon():
        ending += ", processes in the background still run"
    text, num_left_out = output.so_far()
    if len(text) > MAX_OUTPUT or num_left_out:
        half = MAX_OUTPUT // 2
        num_left_out += len(text) - MAX_OUTPUT
        text = f"{text[:half]}\n[{num_left_out} characters left out]\n{text[-half:]}"
    return f"[{ending}]\n{text}".rstrip()


class _Output:
    """The output of a command, read by a thread for as long as any process holds it.

    A server in the background would end if the other end of its output were closed.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept, self._num_left_out = b"", 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, args=[process.stdout], daemon=True)
        self._thread.start()

    def ends_soon(self) -> bool:
        """Wait for the end of the output; False if processes in the background hold it."""
        for _ in range(END_LOOKS):
            self._thread.join(LOOK_S)
            if not self._thread.is_alive():
                return True
        return False

    def so_far(self) -> tuple[str, int]:
        """Return start and end of the output, and the number of bytes between."""
        with self._lock:
            return self._kept.decode("utf-8", "replace"), self._num_left_out

    def _read(self, stream: Any) -> None:
        with stream:
            while piece := os.read(stream.fileno(), KEPT_BYTES):
                with self._lock:
                    self._kept += piece
                    if len(self._kept) > 2 * KEPT_BYTES:
                        self._num_left_out += len(self._kept) - 2 * KEPT_BYTES
                        self._kept = self._kept[:KEPT_BYTES] + self._kept[-KEPT_BYTES:]


def command_in(reply: str) -> str | None:
    """Return the command in the first block after the thinking of a reply; None without one."""
    answer = reply.rpartition("</think>")[2].partition("<think>")[0]
    found = COMMAND.search(answer)
    return found.group(1).strip() or None if found else None


def ask(messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> str:
    """Return the model's reply to a chat.

    Raises:
        FormatError: the server refused the request, or its answer is malformed.
    """
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=3600)
    body = json.dumps({**settings, "messages": list(messages)})
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    try:
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status != 200:
        raise FormatError(f"the model answered with status {response.status}: {text[:500]}")
    try:
        return str(json.loads(text)["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError) as error:
        raise FormatError(f"the model's answer is malformed: {text[:500]}") from error


def main() -> int:
    """Work on the instruction; the exit code is 1 if the model could not be asked."""
    parser = argparse.ArgumentParser(description="Work on a task with one command per reply.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-turns", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--system", default=PROMPT, help="system prompt; empty: none")
    words = parser.parse_args()
    settings = {
        "model": words.model,
        "max_tokens": words.max_tokens,
        "temperature": words.temperature,
    }
    messages = [{"role": "system", "content": words.system}] if words.system else []
    messages.append({"role": "user", "content": sys.stdin.read().strip()})
    for turn in range(words.max_turns):
        try:
            reply = ask(messages, settings)
        except (FormatError, OSError, http.client.HTTPException) as error:
            print(f"turn {turn + 1}: {error}", file=sys.stderr)  # noqa: T201 - a program
            return 1
        print(reply, flush=True)  # noqa: T201
        command = command_in(reply)
        if command is None:
            break
        output = run_command(command)
        print(output, flush=True)  # noqa: T201
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": output},
        ]
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import select
import signal
import subprocess
import sys
import time
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
END_S = 1.0
"""Seconds for the rest of the output of a command that was killed."""
KEPT_BYTES = 65_536
"""Bytes of the start and of the end of an output that are kept in memory."""


class FormatError(Exception):
    """A response of the model's server that is not a chat completion."""


def run_command(command: str, timeout_s: float = COMMAND_S) -> str:
    """Run a shell command and return its exit code and its output.

    Args:
        command: text for `bash -c`.
        timeout_s: time limit in seconds; the command and its children are then killed.
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
    is_done, kept, num_left_out = _read_output(process, timeout_s)
    ending = f"exit code {process.returncode}" if is_done else f"killed after {timeout_s:g} s"
    text = kept.decode("utf-8", "replace")
    if len(text) > MAX_OUTPUT or num_left_out:
        half = MAX_OUTPUT // 2
        num_left_out += len(text) - MAX_OUTPUT
        text = f"{text[:half]}\n[{num_left_out} characters left out]\n{text[-half:]}"
    return f"[{ending}]\n{text}".rstrip()


def _read_output(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bool, bytes, int]:
    """Read until the end of a command, which is killed after `timeout_s`.

    Returns:
        Whether it ended by itself, start and end of its output, and the number of bytes between.
    """
    assert process.stdout is not None
    kept, num_left_out = b"", 0
    is_done, until = True, time.monotonic() + timeout_s
    with process.stdout as output:
        while True:
            left_s = until - time.monotonic()
            if left_s > 0 and select.select([output], [], [], left_s)[0]:
                piece = os.read(output.fileno(), KEPT_BYTES)
                if not piece:
                    break
                kept += piece
                if len(kept) > 2 * KEPT_BYTES:
                    num_left_out += len(kept) - 2 * KEPT_BYTES
                    kept = kept[:KEPT_BYTES] + kept[-KEPT_BYTES:]
            elif is_done:
                is_done, until = False, time.monotonic() + END_S
                os.killpg(process.pid, signal.SIGKILL)
            else:
                break  # a process that left the session holds the output
    try:
        process.wait(timeout=max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:  # it had closed its output
        is_done = False
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return is_done, kept, num_left_out


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

"""The door `run-api`, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from atroposlib.cli.run_api import main
from tests.api.helpers import REGISTRATION, make_group

START = [sys.executable, "-m", "atroposlib.cli.run_api"]


@contextmanager
def running(port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*START, "--host", "localhost", "--port", str(port), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_up(port: int) -> str:
    url = f"http://localhost:{port}"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/info").status_code == 200:
                return url
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the service did not start")


def test_run_api_says_little_and_ends_on_sigterm(free_port):
    with running(free_port) as process:
        url = wait_until_up(free_port)
        with httpx.Client(base_url=url) as client:
            for _ in range(50):
                client.get("/reset_data")
                client.post("/register", json=REGISTRATION)
                client.post("/scored_data", json=make_group(1))
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)

    assert time.monotonic() - started < 5
    assert f"http://localhost:{free_port}" in output
    assert "--host 0.0.0.0" in output
    assert len(output) < 1000


def test_run_api_port_in_use_fails_at_once_and_says_so(free_port):
    with running(free_port):
        wait_until_up(free_port)
        with running(free_port) as second:
            output, _ = second.communicate(timeout=30)

        assert httpx.get(f"http://localhost:{free_port}/info").status_code == 200
    assert second.returncode == 1
    assert "address already in use" in output
    assert "--port" in output
    assert "trajectory API: http" not in output


def test_run_api_help_names_every_flag_with_its_default():
    result = subprocess.run(
        [*START, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )

    for text in ("--host", "127.0.0.1", "--port", "8000", "--reload"):
        assert text in result.stdout


@pytest.mark.parametrize("port", ["70000", "-1", "eighty"])
def test_run_api_wrong_port_is_a_usage_error_that_names_the_range(monkeypatch, capsys, port):
    monkeypatch.setattr(sys, "argv", ["run-api", f"--port={port}"])

    with pytest.raises(SystemExit) as stop:
        main()

    assert stop.value.code == 2
    assert f"argument --port: '{port}' is no port; expected" in capsys.readouterr().err

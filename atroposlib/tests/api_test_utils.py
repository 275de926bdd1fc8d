"""Starting a trajectory service for tests that talk to it over HTTP."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx

API_URL = "http://localhost:8000"


def check_api_running() -> bool:
    """Return whether a service answers at the default address."""
    try:
        return httpx.get(f"{API_URL}/info", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def launch_api_for_testing(max_wait_for_api: int = 10) -> subprocess.Popen[bytes]:
    """Start the service on localhost:8000 and wait until it answers.

    Args:
        max_wait_for_api: seconds to wait, asking once a second.

    Returns:
        The process, which the caller ends with `terminate`.

    Raises:
        TimeoutError: it did not answer in time; it has been ended.
    """
    command = [sys.executable, "-m", "atroposlib.cli.run_api"]
    process = subprocess.Popen(
        [*command, "--host", "localhost", "--port", "8000", "--store", "memory"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(max_wait_for_api):
        if check_api_running():
            return process
        time.sleep(1)
    process.terminate()
    process.wait(timeout=10)
    raise TimeoutError(f"no answer from {API_URL} within {max_wait_for_api} s")

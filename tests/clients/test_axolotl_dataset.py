"""The dataset client of Axolotl's plugin, unmodified, on groups of a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.api.test_run_api import running, wait_until_up
from tests.clients.installing import NotInstallableError, python_of
from tests.clients.running import PROGRAMS
from tests.trainer.tiny import group

NUM_GROUPS = 4


@pytest.mark.clients
def test_plugin_takes_every_row_with_the_tokens_that_were_posted(
    tmp_path: Path, free_port: int
) -> None:
    pytest.importorskip("torch")
    try:
        # Its own dependencies pin an old torch; what its dataset client uses is here.
        python = python_of("axolotl-plugin", limit_s=600)
    except NotInstallableError as error:
        pytest.skip(str(error))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    groups = [
        group([[10 + i, 5, 6], [20 + i, 7]], [1.0, 0.0], prompt=(1, 2, 3 + i))
        for i in range(NUM_GROUPS)
    ]

    with running(free_port):
        url = wait_until_up(free_port)
        for scored in groups:
            assert httpx.post(f"{url}/scored_data", json=scored).status_code == 200
        run = subprocess.run(
            [
                *(sys.executable, str(PROGRAMS / "axolotl_dataset.py")),
                *("http://localhost", str(free_port), str(NUM_GROUPS)),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
        )
        status = httpx.get(f"{url}/status").json()

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert [row["tokens"] for row in rows] == [
        tokens for scored in groups for tokens in scored["tokens"]
    ]
    assert [row["advantage"] for row in rows] == [1.0, -1.0] * NUM_GROUPS
    assert status["current_step"] == 2
    assert not status.get("leased_batches"), status

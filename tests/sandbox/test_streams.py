"""A child process with bounded output ends, or is left, whatever holds its output."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from atroposlib.sandbox import SandboxLimits, streams
from atroposlib.sandbox.streams import run_bounded

pytestmark = pytest.mark.slow


async def test_output_that_another_process_holds_is_left_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "LONGEST_END_S", 0.2)
    # Its output comes from another session, which is not killed with the command.
    command = ["sh", "-c", "setsid sh -c 'echo $$; exec yes' & wait"]
    limits = SandboxLimits(wall_s=600.0, output_bytes=1000)

    finished = await run_bounded(command, stdin=b"", limits=limits, env=dict(os.environ))

    with contextlib.suppress(ProcessLookupError):
        os.kill(int(finished.stdout.split()[0]), signal.SIGKILL)
    assert finished.stopped_for == "output"
    assert "does not end; it is left" in caplog.text

"""A child process with bounded output ends, or is left, whatever holds its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from atroposlib.sandbox import SandboxLimits, streams
from atroposlib.sandbox.streams import Finished, ending_of, run_bounded

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


async def test_command_cancelled_while_it_starts_ends_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    connect, is_connected = loop.connect_read_pipe, asyncio.Event()

    async def connect_later(*args: Any) -> Any:
        await is_connected.wait()
        return await connect(*args)

    monkeypatch.setattr(loop, "connect_read_pipe", connect_later)
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait"]
    running = asyncio.create_task(
        run_bounded(command, stdin=b"", limits=SandboxLimits(), env=dict(os.environ))
    )
    while not child.exists():  # noqa: ASYNC110 - made by another process
        await asyncio.sleep(0.01)

    running.cancel()
    await asyncio.sleep(0)
    is_connected.set()
    done, _ = await asyncio.wait({running}, timeout=300)

    assert done
    assert running.cancelled()
    assert not _is_running(child.read_text().strip())


def _is_running(pid: str) -> bool:
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())  # empty until it is waited for
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("num_bytes", "stopped_for"), [(1000, None), (1001, "output")])
async def test_output_may_have_the_size_of_its_limit(
    num_bytes: int, stopped_for: str | None
) -> None:
    limits = SandboxLimits(wall_s=600.0, output_bytes=1000)
    command = ["head", "-c", str(num_bytes), "/dev/zero"]

    finished = await run_bounded(command, stdin=b"", limits=limits, env=dict(os.environ))

    assert (finished.stopped_for, len(finished.stdout)) == (stopped_for, 1000)


@pytest.mark.parametrize(
    ("exit_code", "ended_by"),
    [
        *((0, "exit"), (128, "exit"), (137, "signal"), (152, "cpu_time"), (192, "signal")),
        *((193, "exit"), (255, "exit")),  # of sys.exit(-1)
    ],
)
def test_exit_code_names_the_ending(exit_code: int, ended_by: str) -> None:
    finished = Finished(0, b"", b"", stopped_for=None, duration_s=0.0)

    assert ending_of(finished, exit_code=exit_code, ran_out_of_memory=False, around="bwrap") == (
        ended_by,
        exit_code,
    )

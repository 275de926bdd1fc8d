"""How a running command answers signals and event loops."""

from __future__ import annotations

import asyncio
import gc
import select
import signal
import subprocess
import sys
import threading

import pytest

from atroposlib.envs.running import (
    COLLECTIONS_BEFORE_FULL,
    favour_event_loop,
    outside_event_loop,
    run_foreground,
)

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, sys
from atroposlib.envs.running import run_foreground

async def main():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep({closing_s})
        print("closed", flush=True)
        {after}

run_foreground(main)
"""


def signalled(
    *signals: signal.Signals, closing_s: float = 0.0, after: str = "pass"
) -> tuple[int, str, str]:
    """Send signals to a process inside `run_foreground`; return its code and what it wrote."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(closing_s=closing_s, after=after)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for signum in signals:
            process.send_signal(signum)
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_foreground_signal_lets_the_coroutine_close(signum: signal.Signals, code: int) -> None:
    assert signalled(signum, closing_s=0.02) == (code, "closed\n", "")


def test_run_foreground_repeated_sigterm_does_not_disturb_closing() -> None:
    outcome = signalled(signal.SIGTERM, signal.SIGTERM, closing_s=0.2)

    assert outcome == (143, "closed\n", "")


def test_run_foreground_failure_while_closing_is_reported_and_keeps_the_exit_code() -> None:
    code, _, errors = signalled(signal.SIGTERM, after='raise ValueError("lost")')

    assert code == 143
    assert "ValueError: lost" in errors


def test_run_foreground_exception_passes_through() -> None:
    async def main() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_foreground(main)


def test_run_foreground_cancellation_from_inside_is_not_a_signal() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_foreground(main)


def test_outside_event_loop_without_a_loop_calls_directly() -> None:
    assert outside_event_loop(threading.current_thread) is threading.current_thread()


async def test_outside_event_loop_with_a_loop_uses_a_thread() -> None:
    thread = outside_event_loop(threading.current_thread)

    assert thread is not threading.current_thread()


async def test_outside_event_loop_hands_on_exceptions() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        outside_event_loop(leave)


def test_favour_event_loop_makes_full_collections_rare_and_keeps_the_others() -> None:
    thresholds = gc.get_threshold()
    try:
        favour_event_loop()

        assert gc.get_threshold() == (*thresholds[:2], COLLECTIONS_BEFORE_FULL)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


BLOCKED = """
import asyncio, time
from atroposlib.envs import running

running.BLOCKED_S = 0.0

async def main():
    try:
        print("ready", flush=True)
        while True:
            time.sleep({pause_s})
    finally:
        print("closed", flush=True)

running.run_foreground(main)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_foreground_second_signal_interrupts_a_blocking_call_and_names_it(
    signum: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(pause_s=0.01)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # Not while the interpreter ends, which has no handlers any more.
        while not select.select([process.stdout], [], [], 0.05)[0]:
            process.send_signal(signum)
        out, err = process.communicate(timeout=120)

    assert (process.returncode, out) == (code, "closed\n")
    assert "main blocks the event loop; it is interrupted" in err
    assert "Traceback" not in err

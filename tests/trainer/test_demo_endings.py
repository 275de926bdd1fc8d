"""However the demo ends, no process it started is alive afterwards; through the real stack."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("reasoning_gym")

pytestmark = pytest.mark.slow

MARK = "ATROPOS_TEST_MARK"
LINUX_ONLY = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
PATIENCE_S = 240.0


class RunningDemo:
    """A demo under way; every process it starts inherits a mark to be found by."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / "run"
        self.log = folder / "demo.log"
        self.descendants: set[int] = set()
        self.births: set[tuple[int, str]] = set()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "example_trainer.demo.cli", "--profile", "quick"),
                    *("--steps", str(steps), "--output", str(self.output)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            )

    def wait_for(self, text: str) -> None:
        """Wait until the demo has said `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def relatives(self) -> dict[int, str]:
        """Return the names of living processes that the demo or one of its children started.

        Found by the mark in their environment, or by having descended from the demo at an earlier
        call: vLLM writes its process titles over the environment shown in /proc.
        """
        living = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                pid = int(folder.name)
                name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
                state, parent, *fields = rest.split()
                birth = (pid, fields[17])
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if marked or int(parent) in self.descendants or birth in self.births:
                    self.descendants.add(pid)
                    self.births.add(birth)
                    command = (folder / "cmdline").read_bytes().decode(errors="replace")
                    if state != "Z" and pid != self.process.pid:
                        living[pid] = command.replace("\0", " ") or name
        return living

    def kill_part(self, piece_of_command: str) -> None:
        """Kill -9 the process itself, not its guardian."""
        pids = [
            pid
            for pid, command in self.relatives().items()
            if piece_of_command in command and "process_guardian" not in command
        ]
        os.kill(min(pids), signal.SIGKILL)

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 20.0
        while left := self.relatives():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@contextlib.contextmanager
def running_demo(folder: Path, *, steps: int) -> Iterator[RunningDemo]:
    running = RunningDemo(folder, steps=steps)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        for pid in running.relatives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[RunningDemo]:
    """A demo with more steps than any test waits for."""
    with running_demo(tmp_path, steps=500) as running:
        yield running


@LINUX_ONLY
def test_demo_finished_has_written_its_report_and_leaves_nothing(tmp_path: Path) -> None:
    with running_demo(tmp_path, steps=3) as demo:
        demo.wait_for("5. Reinforcement")
        demo.relatives()

        assert demo.process.wait(timeout=PATIENCE_S) == 0, demo.said()

        summary = json.loads((demo.output / "summary.json").read_text())
        steps = (demo.output / "trainer_metrics.jsonl").read_text().splitlines()
        assert (summary["steps"], len(steps)) == (3, 3)
        assert 0.0 <= summary["accuracy_before"] <= 1.0
        assert "held-out accuracy" in demo.said()
        assert (demo.output / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
        assert "<html" in (demo.output / "rollouts.html").read_text()
        demo.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.parametrize(
    ("moment", "signum", "code"),
    [
        ("1. Making", signal.SIGINT, 130),
        pytest.param("2. Teaching", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("3. Waiting", signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param("4. Measuring", signal.SIGINT, 130, marks=pytest.mark.long),
        ("5. Reinforcement", signal.SIGINT, 130),
        pytest.param("step ", signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_demo_interrupted_leaves_nothing(
    demo: RunningDemo, moment: str, signum: signal.Signals, code: int
) -> None:
    demo.wait_for(moment)
    demo.relatives()

    demo.process.send_signal(signum)

    assert demo.process.wait(timeout=60) == code
    assert "Traceback" not in demo.said()
    demo.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.parametrize(
    ("piece_of_command", "name"),
    [
        pytest.param("vllm.entrypoints", "inference engine", marks=pytest.mark.long),
        ("VLLM::Worker", "inference engine"),
        pytest.param("atroposlib.cli.run_api", "trajectory service", marks=pytest.mark.long),
        pytest.param("reasoning_gym_environment.py", "environment", marks=pytest.mark.long),
        pytest.param("example_trainer.grpo", "trainer", marks=pytest.mark.long),
    ],
)
def test_demo_killed_part_is_named_and_nothing_is_left(
    demo: RunningDemo, piece_of_command: str, name: str
) -> None:
    demo.wait_for("5. Reinforcement")
    while not (demo.output / "trainer_metrics.jsonl").exists():
        assert demo.process.poll() is None, demo.said()
        time.sleep(0.1)

    demo.kill_part(piece_of_command)

    assert demo.process.wait(timeout=90) == 1
    assert f"atropos-demo: {name} " in demo.said()
    assert "the end of its log" in demo.said()
    demo.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.long
def test_demo_kill_9_leaves_nothing(demo: RunningDemo) -> None:
    demo.wait_for("5. Reinforcement")
    assert len(demo.relatives()) >= 8  # four parts, each with a guardian

    demo.process.kill()
    demo.process.wait()

    demo.assert_nothing_is_left()

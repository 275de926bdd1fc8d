"""However the demo ends, no process it started is alive afterwards; through the real stack."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.running_command import LINUX_ONLY, PATIENCE_S, RunningCommand, running

pytest.importorskip("vllm")
pytest.importorskip("reasoning_gym")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@contextlib.contextmanager
def running_demo(folder: Path, *, steps: int) -> Iterator[RunningCommand]:
    words = ["example_trainer.demo.cli", "--profile", "quick", "--steps", steps]
    with running(folder, *words, "--output", folder / "run") as command:
        yield command


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[RunningCommand]:
    """A demo with more steps than any test waits for."""
    with running_demo(tmp_path, steps=500) as running:
        yield running


@LINUX_ONLY
@pytest.mark.long
def test_demo_finished_has_written_its_report_and_leaves_nothing(tmp_path: Path) -> None:
    with running_demo(tmp_path, steps=3) as demo:
        demo.wait_for("5. Reinforcement")
        demo.relatives()

        assert demo.wait() == 0, demo.said()

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
        ("1. Creating", signal.SIGINT, 130),
        pytest.param("2. Supervised", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("3. Waiting", signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param("4. Measuring", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("5. Reinforcement", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("step ", signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_demo_interrupted_leaves_nothing(
    demo: RunningCommand, moment: str, signum: signal.Signals, code: int
) -> None:
    demo.wait_for(moment)
    demo.relatives()

    demo.process.send_signal(signum)

    assert demo.wait() == code
    assert "Traceback" not in demo.said()
    demo.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.parametrize(
    ("piece_of_command", "name"),
    [
        pytest.param("vllm.entrypoints", "inference engine", marks=pytest.mark.long),
        pytest.param("VLLM::Worker", "inference engine", marks=pytest.mark.long),
        pytest.param("atroposlib.cli.run_api", "trajectory service", marks=pytest.mark.long),
        pytest.param("reasoning_gym_environment.py", "environment", marks=pytest.mark.long),
        pytest.param("example_trainer.grpo", "trainer", marks=pytest.mark.long),
    ],
)
def test_demo_killed_part_is_named_and_nothing_is_left(
    demo: RunningCommand, piece_of_command: str, name: str
) -> None:
    demo.wait_for("5. Reinforcement")
    deadline = time.monotonic() + PATIENCE_S
    while not (demo.output / "trainer_metrics.jsonl").exists():
        assert demo.process.poll() is None, demo.said()
        assert time.monotonic() < deadline, demo.said()
        time.sleep(0.1)

    demo.kill_part(piece_of_command)

    assert demo.wait() == 1
    assert f"atropos-demo: {name} " in demo.said()
    assert "the end of its log" in demo.said()
    demo.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.long
def test_demo_kill_9_leaves_nothing(demo: RunningCommand) -> None:
    demo.wait_for("5. Reinforcement")
    assert len(demo.relatives()) >= 8  # four parts, each with a guardian

    demo.process.kill()
    demo.process.wait()

    demo.assert_nothing_is_left()

"""Lines about the steps of a run on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_trainer.cluster.progress import INTERVAL_S, QUIET_S, LogLines, StepLines


class Run:
    """The files of a trainer, and a clock."""

    def __init__(self, folder: Path, *, num_steps: int = 100) -> None:
        self.metrics, self.log = folder / "metrics.jsonl", folder / "trainer.log"
        self.now = 1000.0
        self.lines = self.started(num_steps)

    def started(self, num_steps: int) -> StepLines:
        return StepLines(self.metrics, self.log, num_steps=num_steps, clock=lambda: self.now)

    def step(self, step: int, *, reward: float = 0.5) -> None:
        record = {"step": step, "train/loss": 0.1, "train/reward_mean": reward}
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def after(self, seconds: float) -> str | None:
        self.now += seconds
        return self.lines.next_line()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_steps_are_shown_at_most_once_per_interval(run):
    run.step(1, reward=0.25)
    first = run.after(3)
    run.step(2)
    soon = run.after(3)
    run.step(3, reward=0.75)

    assert first == "step 1 of 100, reward 0.25"
    assert soon is None
    assert run.after(INTERVAL_S) == "step 3 of 100, reward 0.75"
    assert run.after(3) is None


def test_last_step_is_always_shown(tmp_path):
    run = Run(tmp_path, num_steps=2)
    run.step(1)
    run.after(3)
    run.step(2)

    assert run.after(3) == "step 2 of 2, reward 0.5"
    run.log.write_text("saving the model\n")
    assert run.after(10 * QUIET_S) is None


def test_steps_of_an_earlier_start_are_not_shown_again(run):
    run.step(1)
    run.lines = run.started(100)
    assert run.after(3) is None

    run.step(2)
    assert run.after(3) == "step 2 of 100, reward 0.5"


def test_trainer_without_steps_is_pointed_out_less_and_less_often_with_its_last_line(run):
    for _ in range(5):  # waits for an engine
        assert run.after(QUIET_S) is None
    run.log.write_text("loaded\nwaiting: 8 sequences are queued, a batch has 12\x1b[2J\n")

    said = [run.after(10) for _ in range(18)]

    ends = "the trainer's log ends with: waiting: 8 sequences are queued, a batch has 12"
    lines = [line for line in said if line is not None]
    assert [line.partition("; ")[0] for line in lines] == [
        "no step for 60 s", "no step for 120 s",
    ]  # fmt: skip
    assert all(ends in line and "\x1b" not in line for line in lines)
    run.step(1)
    assert run.after(10) == "step 1 of 100, reward 0.5"
    assert run.after(QUIET_S - 10) is None
    assert run.after(10) is not None


def test_metrics_that_cannot_be_read_end_no_run(run):
    run.metrics.mkdir()

    assert run.after(3) is None
    assert run.started(100).next_line() is None


def test_end_of_the_log_of_another_trainer_is_shown_once_per_interval_if_it_changed(tmp_path):
    log, now = tmp_path / "trainer.log", [0.0]
    lines = LogLines(log, clock=lambda: now[0])

    def after(seconds: float) -> str | None:
        now[0] += seconds
        return lines.next_line()

    assert after(INTERVAL_S) is None
    log.write_text("loaded\nstep 1: loss 0.2\n")
    assert after(1) is None
    assert after(INTERVAL_S) == "the trainer's log ends with: step 1: loss 0.2"
    assert after(INTERVAL_S) is None

"""`atropos-train` on files of one's own, through the real stack: finished, interrupted, resumed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.several_hosts.lines import read_lines
from tests.trainer.running_command import LINUX_ONLY, PATIENCE_S, RunningCommand, running

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

# A model with random weights writes anything; what it is worth has to differ from try to try.
ENVIRONMENT = """
from atroposlib.envs.single_turn_env import SingleTurnEnv

class WritesEnv(SingleTurnEnv):
    name = "writes"
    default_settings = {"group_size": 4, "max_token_length": 64}

    async def get_next_item(self):
        return "write"

    def eval_items(self):
        return ["write", "write more"]

    def prompt(self, item):
        return [{"role": "user", "content": item}]

    async def score(self, item, answer):
        return sum(map(ord, answer)) % 17 / 17

if __name__ == "__main__":
    WritesEnv.cli()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from example_trainer.demo.settings import TinyModelShape
    from example_trainer.demo.student import student_of

    chat = [{"role": "user", "content": "write"}, {"role": "assistant", "content": "words"}]
    folder = tmp_path_factory.mktemp("model")
    student_of([chat] * 20, shape=TinyModelShape(num_layers=2), seed=0, folder=folder)
    return folder


def words_of(folder: Path, model: Path, *more: object) -> list[object]:
    """Write an environment and return a command line that trains on it."""
    (folder / "writes.py").write_text(ENVIRONMENT, encoding="utf-8")
    return [
        *("example_trainer.launch.cli", "writes.py", "--model", model, "--output", "run"),
        *("--groups-per-step", 2, *more),
    ]


def steps_logged(command: RunningCommand) -> list[int]:
    return list(losses_logged(command))


def losses_logged(command: RunningCommand) -> dict[int, float]:
    """Return the loss of each step."""
    lines = read_lines(command.output / "trainer_metrics.jsonl")
    records = [record for record in lines if "train/loss" in record]
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["train/loss"] for record in records}


def wait_for_step(command: RunningCommand, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while step not in steps_logged(command):
        assert command.process.poll() is None, command.said()
        assert time.monotonic() < deadline, command.said()
        time.sleep(0.1)


@LINUX_ONLY
@pytest.mark.long
def test_train_on_two_files_ends_with_results_and_leaves_nothing(
    tmp_path: Path, model: Path
) -> None:
    words = words_of(tmp_path, model, "--steps", 2, "other.py=2", "--env.other.group_size", 2)
    (tmp_path / "other.py").write_text(ENVIRONMENT, encoding="utf-8")
    with running(tmp_path, *words) as command:
        command.wait_for("Reinforcement learning: 2 steps of 8 tries")
        command.relatives()

        assert command.wait() == 0, command.said()

        summary = json.loads((command.output / "summary.json").read_text())
        assert summary["environments"] == ["writes", "other"]
        assert set(summary["evaluations_after"]) == {"writes", "other"}
        assert "writes, measured by its evaluate\n  eval/mean_score: before" in command.said()
        assert steps_logged(command) == [1, 2]
        for name in ("report.html", "rollouts.html", "reward_curve.png"):
            assert (command.output / name).stat().st_size > 0
        assert (command.output / "trainer" / "final_model" / "config.json").is_file()
        command.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.long
def test_train_interrupted_goes_on_where_it_stopped(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, *words_of(tmp_path, model, "--steps", 300)) as command:
        wait_for_step(command, 2)
        command.relatives()

        command.process.send_signal(signal.SIGINT)

        assert command.wait() == 130
        assert "stopped; every process has ended" in command.said()
        assert "continue with:\n  atropos-train --resume run" in command.said()
        assert "Traceback" not in command.said()
        command.assert_nothing_is_left()
        done = max(steps_logged(command))

    words = ["example_trainer.launch.cli", "--resume", "run", "--steps", done + 2]
    with running(tmp_path, *words) as command:
        assert command.wait() == 0, command.said()

        assert steps_logged(command) == list(range(1, done + 3))
        assert json.loads((command.output / "summary.json").read_text())["steps"] == done + 2
        command.assert_nothing_is_left()


@LINUX_ONLY
@pytest.mark.long
def test_finished_run_is_trained_on_from_its_model(tmp_path: Path, model: Path) -> None:
    # 20 steps: so many that 40 would have a longer warm-up.
    words = words_of(tmp_path, model, "--steps", 20, "--engine", "torch")
    with running(tmp_path, *words) as command:
        assert command.wait() == 0, command.said()
        before = losses_logged(command)

    words = ["example_trainer.launch.cli", "--resume", "run", "--steps", 40]
    with running(tmp_path, *words) as command:
        assert command.wait() == 0, command.said()
        after = losses_logged(command)

    assert list(after) == list(range(1, 41))
    assert {step: after[step] for step in before} == pytest.approx(before, rel=1e-5, abs=1e-7)


@LINUX_ONLY
@pytest.mark.long
@pytest.mark.parametrize(
    ("piece_of_command", "name"),
    [
        ("VLLM::Worker", "inference engine"),
        ("atroposlib.cli.run_api", "trajectory service"),
        ("writes.py", "environment writes"),
        ("example_trainer.grpo", "trainer"),
    ],
)
def test_train_killed_process_is_named_and_nothing_is_left(
    tmp_path: Path, model: Path, piece_of_command: str, name: str
) -> None:
    with running(tmp_path, *words_of(tmp_path, model, "--steps", 300)) as command:
        wait_for_step(command, 1)

        command.kill_part(piece_of_command)

        assert command.wait() == 1
        assert f"atropos-train: {name} " in command.said()
        assert "continue with:\n  atropos-train --resume run" in command.said()
        command.assert_nothing_is_left()

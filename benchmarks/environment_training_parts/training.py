"""Train a tiny model in one environment, with an evaluation before and after.

scripted conversations ──► tokenizer, tiny model ── supervised ──► start
    ──► `evaluate` ──► reinforcement learning in four processes ──► `evaluate` ──► curve, results
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.environment_training_parts.tasks import Messages, TrainingTask
from example_trainer.demo.settings import DemoPaths, demo_plan, save_tiny_model
from example_trainer.demo.student import Student, encode_conversation, student_of, supervised_steps
from example_trainer.launch import report
from example_trainer.launch.report import RunProgress
from example_trainer.launch.stack import (
    Supervisor,
    TrainingLoop,
    build_stack,
    common_variables,
    write_yaml,
)
from example_trainer.processes import ManagedProcess, find_free_ports

__all__ = ["Trained", "train"]

_STEPS_PER_CHECK = 10
_TOKENIZER_CONVERSATIONS = 2_000
_POLL_S = 0.5


@dataclass(frozen=True)
class Measured:
    """The result of one evaluation."""

    values: Sequence[float]
    """Measured value of each episode."""

    metrics: Mapping[str, float]
    """Metrics reported by the environment."""

    @property
    def mean(self) -> float:
        """Mean over the episodes."""
        return statistics.fmean(self.values)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values))


class Trained(NamedTuple):
    """Evaluations, rewards and duration of one training."""

    start: Measured
    end: Measured
    points: list[report.RewardPoint]
    """Mean reward of the rollouts around each trainer step."""
    seconds: float


def train(task: TrainingTask, paths: DemoPaths, progress: RunProgress) -> Trained:
    """Train and evaluate; all processes have ended when this returns or raises.

    Raises:
        ProcessFailedError: A process ended or was not ready in time.
    """
    started = time.monotonic()
    conversations = list(task.conversations(task.warm_up.num_conversations))
    with Supervisor() as supervisor:
        student = student_of(
            islice(conversations, _TOKENIZER_CONVERSATIONS),
            shape=task.settings.shape,
            seed=task.settings.seed,
            folder=paths.tiny_model,
        )
        loop = _build_loop(task, paths, progress, supervisor)
        loop.start_servers()
        _imitate(student, task, conversations, loop, progress)
        loop.wait_for_servers(reload_from=paths.tiny_model)
        loop.start_trainer()
        evaluate = partial(_evaluate, task, paths, loop, progress, supervisor)
        start = evaluate("before")
        loop.reinforce()
        end = evaluate("after")
    progress.end()
    points = report.read_rewards(paths.environment_metrics, task.reward)
    report.write_curve(points, paths.curve, metric=task.reward)
    return Trained(start, end, points, time.monotonic() - started)


def _build_loop(
    task: TrainingTask, paths: DemoPaths, progress: RunProgress, supervisor: Supervisor
) -> TrainingLoop:
    engine_port, service_port = find_free_ports(2)
    plan = demo_plan(task.settings, paths, model=str(paths.tiny_model), on_gpu=False)
    stack = build_stack(plan, paths, ports=(engine_port, service_port), inherited=os.environ)
    return TrainingLoop(
        stack,
        plan,
        paths,
        progress=progress,
        supervisor=supervisor,
        reward=task.reward,
    )


def _imitate(
    student: Student,
    task: TrainingTask,
    conversations: Sequence[Messages],
    loop: TrainingLoop,
    progress: RunProgress,
) -> None:
    """Train the student on the conversations and save it."""
    import torch

    torch.set_num_threads(1)  # the engine is starting on the other cores
    warm_up = task.warm_up
    progress.begin(
        "warm_up", "Imitating a scripted policy while the engine starts", expected="a minute or two"
    )
    losses = supervised_steps(
        student.model,
        [encode_conversation(student.tokenizer, messages) for messages in conversations],
        lr=warm_up.lr,
        batch_size=warm_up.batch_size,
        pad_token=int(student.tokenizer.pad_token_id),
        seed=task.settings.seed,
    )
    for step, loss in enumerate(islice(losses, warm_up.steps), start=1):
        if step % _STEPS_PER_CHECK == 0:
            loop.check()
            progress.update(step, warm_up.steps, f"step {step}, loss {loss:.2f}")
    save_tiny_model(student.model, student.tokenizer, student.folder)
    progress.note(f"{student.model.num_parameters():,} parameters, loss {loss:.3f}")


def _evaluate(
    task: TrainingTask,
    paths: DemoPaths,
    loop: TrainingLoop,
    progress: RunProgress,
    supervisor: Supervisor,
    when: str,
) -> Measured:
    """Run the environment's `evaluate` command and read its result."""
    progress.begin(f"measure_{when}", f"Measuring {when} training", expected="half a minute")
    folder = paths.output / f"evaluation_{when}"
    config = folder / "environment.yaml"
    training = yaml.safe_load((paths.output / "environment.yaml").read_text(encoding="utf-8"))
    training["env"] |= {
        **task.evaluation,
        "data_dir_to_save_evals": str(folder),
        "data_path_to_save_groups": None,
        "metrics_path": str(folder / "evaluation_metrics.jsonl"),
    }
    write_yaml(training, config)
    plan = demo_plan(task.settings, paths, model=str(paths.tiny_model), on_gpu=False)
    process = ManagedProcess(
        f"evaluation {when}",
        [
            *(sys.executable, str(task.settings.environment_door)),
            *("evaluate", "--config", str(config)),
        ],
        log_path=paths.logs / f"evaluation_{when}.log",
        env=common_variables(plan, os.environ),
        cwd=plan.working_folder,
    )
    supervisor.start(process, may_finish=True)
    while process.is_alive():
        loop.check()
        time.sleep(_POLL_S)
    loop.check()
    measured = read_evaluation(folder, task.value)
    progress.note(f"{measured.mean:.3f} ± {measured.standard_error:.3f}, {task.measure}")
    return measured


def read_evaluation(folder: Path, value: Callable[[float], float]) -> Measured:
    """Read the results that `evaluate` saved in a folder.

    Args:
        folder: Folder of `samples.jsonl` and `metrics.json`.
        value: Function from the score of an episode to its measured value.
    """
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    results = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["results"]["all"]
    return Measured([value(json.loads(line)["score"]) for line in lines], results)

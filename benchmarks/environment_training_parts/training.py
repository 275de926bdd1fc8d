"""One lesson from nothing to its figures.

conversations of a poor player ──► tokenizer, tiny model ──supervised──► start
    ──► `evaluate` ──► reinforcement learning by four processes ──► `evaluate` ──► curve, figures
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import yaml

from benchmarks.environment_training_parts.evaluation import (
    Measured,
    evaluation_settings,
    read_evaluation,
)
from benchmarks.environment_training_parts.lesson import Lesson, Messages
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


class Trained(NamedTuple):
    """What came out of a lesson."""

    start: Measured
    end: Measured
    points: list[report.RewardPoint]
    """Mean reward of the tries around each trainer step."""
    seconds: float


def train(lesson: Lesson, paths: DemoPaths, progress: RunProgress) -> Trained:
    """Go through a lesson; every process it starts has ended when this returns or raises.

    Raises:
        ProcessFailedError: One of the processes ended or was not ready in time.
    """
    started = time.monotonic()
    conversations = list(lesson.conversations(lesson.warm_up.num_conversations))
    with Supervisor() as supervisor:
        student = student_of(
            islice(conversations, _TOKENIZER_CONVERSATIONS),
            shape=lesson.settings.shape,
            seed=lesson.settings.seed,
            folder=paths.tiny_model,
        )
        loop = _build_loop(lesson, paths, progress, supervisor)
        loop.start_servers()
        _imitate(student, lesson, conversations, loop, progress)
        loop.wait_for_servers(reload_from=paths.tiny_model)
        loop.start_trainer()
        evaluate = partial(_evaluate, lesson, paths, loop, progress, supervisor)
        start = evaluate("before")
        loop.reinforce()
        end = evaluate("after")
    progress.end()
    points = report.read_rewards(paths.environment_metrics, lesson.reward)
    report.write_curve(points, paths.curve, metric=lesson.reward)
    return Trained(start, end, points, time.monotonic() - started)


def _build_loop(
    lesson: Lesson, paths: DemoPaths, progress: RunProgress, supervisor: Supervisor
) -> TrainingLoop:
    engine_port, service_port = find_free_ports(2)
    plan = demo_plan(lesson.settings, paths, model=str(paths.tiny_model), on_gpu=False)
    stack = build_stack(plan, paths, ports=(engine_port, service_port), inherited=os.environ)
    return TrainingLoop(
        stack,
        plan,
        paths,
        progress=progress,
        supervisor=supervisor,
        reward=lesson.reward,
    )


def _imitate(
    student: Student,
    lesson: Lesson,
    conversations: Sequence[Messages],
    loop: TrainingLoop,
    progress: RunProgress,
) -> None:
    """Teach the student what the player does, and write it again."""
    import torch

    torch.set_num_threads(1)  # the engine is starting on the other cores
    warm_up = lesson.warm_up
    progress.begin(
        "warm_up", "Imitating a poor player while the engine starts", expected="a minute or two"
    )
    losses = supervised_steps(
        student.model,
        [encode_conversation(student.tokenizer, messages) for messages in conversations],
        lr=warm_up.lr,
        batch_size=warm_up.batch_size,
        pad_token=int(student.tokenizer.pad_token_id),
        seed=lesson.settings.seed,
    )
    for step, loss in enumerate(islice(losses, warm_up.steps), start=1):
        if step % _STEPS_PER_CHECK == 0:
            loop.check()
            progress.update(step, warm_up.steps, f"step {step}, loss {loss:.2f}")
    save_tiny_model(student.model, student.tokenizer, student.folder)
    progress.note(f"{student.model.num_parameters():,} parameters, loss {loss:.3f}")


def _evaluate(
    lesson: Lesson,
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
    write_yaml(evaluation_settings(training, lesson.evaluation, folder=folder), config)
    plan = demo_plan(lesson.settings, paths, model=str(paths.tiny_model), on_gpu=False)
    process = ManagedProcess(
        f"evaluation {when}",
        [
            *(sys.executable, str(lesson.settings.environment_door)),
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
    measured = read_evaluation(folder, lesson.value)
    progress.note(f"{measured.mean:.3f} ± {measured.standard_error:.3f}, {lesson.measure}")
    return measured

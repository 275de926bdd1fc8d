"""The small model of the demo, from nothing to a partial skill at the task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from example_trainer.demo.settings import WarmUpSettings
from example_trainer.demo.task import Problem, training_problems
from example_trainer.demo.tiny_model import (
    TinyModelShape,
    build_model,
    save_tiny_model,
    train_tokenizer,
)
from example_trainer.demo.warm_up import WarmUpResult, encode_example, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["Student", "habitual_solution", "make_student", "student_of", "teach_student"]

_NUM_TOKENIZER_PROBLEMS = 2_000


class Student(NamedTuple):
    """A model, its tokenizer, and the folder other processes read both from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path


def make_student(
    env_settings: Mapping[str, Any], *, shape: TinyModelShape, seed: int, folder: Path
) -> Student:
    """Make a tokenizer for the task and a model with random weights, and write both.

    Args:
        env_settings: Settings of the environment that poses the problems.
        shape: Sizes of the model.
        seed: Of its weights.
        folder: Where it is written.
    """
    conversations = [
        [*problem.messages, {"role": "assistant", "content": problem.worked_solution}]
        for problem in training_problems(env_settings, _NUM_TOKENIZER_PROBLEMS)
    ]
    return student_of(conversations, shape=shape, seed=seed, folder=folder)


def student_of(
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    *,
    shape: TinyModelShape,
    seed: int,
    folder: Path,
) -> Student:
    """Make a tokenizer for conversations and a model with random weights, and write both."""
    tokenizer = train_tokenizer(
        conversations, max_length=shape.max_length, max_vocabulary=shape.max_vocabulary
    )
    model = build_model(tokenizer, shape, seed=seed)
    save_tiny_model(model, tokenizer, folder)
    return Student(model, tokenizer, folder)


def teach_student(
    student: Student,
    env_settings: Mapping[str, Any],
    *,
    measured: Sequence[Problem],
    settings: WarmUpSettings,
    seed: int,
    on_check: Callable[[int, float, float], None],
) -> list[WarmUpResult]:
    """Teach the student in place, first a skill, then a bad habit, and write it again.

    Args:
        student: What is taught.
        env_settings: Settings of the environment that poses the problems.
        measured: Held-out problems, on whose accuracy each part ends.
        settings: See `WarmUpSettings`.
        seed: Of the order and of the habit.
        on_check: See `warm_up.warm_up`.

    Returns:
        How the two parts ended.
    """
    import torch

    torch.set_num_threads(1)  # the engine is starting on the other cores
    problems = training_problems(env_settings, settings.num_conversations)
    rng = random.Random(seed)
    lowest, highest = settings.start_accuracy
    parts = (
        (
            [problem.worked_solution for problem in problems],
            lambda accuracy: accuracy >= settings.skill_accuracy,
            settings.lr,
        ),
        (
            [habitual_solution(problem, settings.hasty_share, rng) for problem in problems],
            lambda accuracy: lowest <= accuracy <= highest,
            settings.habit_lr,
        ),
    )
    results = [
        warm_up(
            student.model,
            student.tokenizer,
            examples=[
                encode_example(student.tokenizer, problem, solution)
                for problem, solution in zip(problems, solutions, strict=True)
            ],
            measured=measured,
            is_enough=is_enough,
            lr=lr,
            batch_size=settings.batch_size,
            limit_s=settings.limit_s,
            steps_per_check=settings.steps_per_check,
            seed=seed,
            on_check=on_check,
        )
        for solutions, is_enough, lr in parts
    ]
    save_tiny_model(student.model, student.tokenizer, student.folder)
    return results


def habitual_solution(problem: Problem, hasty_share: float, rng: random.Random) -> str:
    """Return a solution that answers at once, with this probability, or a worked one."""
    is_hasty = rng.random() < hasty_share
    return problem.hasty_solution if is_hasty else problem.worked_solution

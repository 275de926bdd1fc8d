"""The problems of the demo, and the warm-up on them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from example_trainer.demo.settings import TaskSettings, TinyModelShape, build_model, train_tokenizer
from example_trainer.demo.student import encode_example, mixed_solution, warm_up
from example_trainer.demo.task import (
    Problem,
    held_out_problems,
    training_problems,
    worked_sum,
)

pytestmark = pytest.mark.slow

pytest.importorskip("reasoning_gym")

TASK = TaskSettings()
ENV_SETTINGS: dict[str, Any] = {
    "task_names": [TASK.name],
    "task_params": {TASK.name: TASK.params},
    "system_prompt": TASK.system_prompt,
    "seed": 5,
    "eval_seed": 9,
    "num_eval_samples_per_task": 64,
}


ONE_NUMBER = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("4 - 1 - 7", "4 - 1 = 3 ; 3 - 7 = -4 <answer>-4</answer>"),
        ("2 + 3", "2 + 3 = 5 <answer>5</answer>"),
        ("8", "<answer>8</answer>"),
        ("-5 - -3", "-5 - -3 = -2 <answer>-2</answer>"),
    ],
)
def test_worked_sum_chain_shows_every_step(expression: str, expected: str) -> None:
    assert worked_sum(expression) == expected


@pytest.mark.parametrize("expression", ["", "2 * 3", "2 +", "(1 + 2)", "1.5 + 2"])
def test_worked_sum_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="not a sum of integers"):
        worked_sum(expression)


def test_problems_training_never_repeats_a_held_out_question() -> None:
    held_out = {problem.item.question for problem in held_out_problems(ENV_SETTINGS)}
    training = {problem.item.question for problem in training_problems(ENV_SETTINGS, 500)}

    assert len(held_out) == 64
    assert not held_out & training


def test_problems_worked_solution_is_correct_and_wrong_answers_are_not() -> None:
    for problem in held_out_problems(ENV_SETTINGS):
        answer = int(problem.item.entry["answer"])

        assert problem.is_correct(problem.worked_solution)
        assert not problem.is_correct(f"<answer>{answer + 1}</answer>")
        assert not problem.is_correct("")


def tiny_student(problems: list[Problem]) -> tuple[Any, Any]:
    """Return a very small model with random weights, and its tokenizer."""
    tokenizer = train_tokenizer(
        [[*p.messages, {"role": "assistant", "content": p.worked_solution}] for p in problems],
        max_length=64,
    )
    shape = TinyModelShape(hidden_size=32, num_layers=1, num_heads=1, max_length=64)
    return build_model(tokenizer, shape, seed=0), tokenizer


def test_warm_up_small_model_learns_and_stops_at_the_target() -> None:
    easy = {"task_params": {TASK.name: ONE_NUMBER}, "num_eval_samples_per_task": 2}
    problems = training_problems({**ENV_SETTINGS, **easy}, 300)
    model, tokenizer = tiny_student(problems)
    losses: list[float] = []

    result = warm_up(
        model,
        tokenizer,
        examples=[encode_example(tokenizer, p, p.worked_solution) for p in problems],
        measured=problems[:16],
        is_enough=lambda accuracy: accuracy >= 0.5,
        lr=1e-2,
        batch_size=32,
        limit_s=600.0,
        steps_per_check=5,
        seed=0,
        on_check=lambda _step, loss, _accuracy: losses.append(loss),
    )

    assert result.accuracy >= 0.5
    assert losses[-1] < losses[0] / 2


def test_warm_up_out_of_time_stops_below_the_target() -> None:
    problems = training_problems(ENV_SETTINGS, 64)
    model, tokenizer = tiny_student(problems)
    ticks = iter(range(100))

    result = warm_up(
        model,
        tokenizer,
        examples=[encode_example(tokenizer, p, p.worked_solution) for p in problems],
        measured=problems[:4],
        is_enough=lambda _: False,
        lr=1e-3,
        batch_size=8,
        limit_s=1.0,
        steps_per_check=1,
        seed=0,
        on_check=lambda *_: None,
        clock=lambda: float(next(ticks)),
    )

    assert (result.steps, result.seconds) == (1, 1.0)


def test_encode_example_ends_the_turn_and_marks_where_the_completion_begins() -> None:
    problem = training_problems(ENV_SETTINGS, 1)[0]
    _, tokenizer = tiny_student([problem] * 10)

    example = encode_example(tokenizer, problem, problem.worked_solution)

    completion = example.tokens[example.is_learned.index(True) :]
    assert example.is_learned[-len(completion) :] == [True] * len(completion)
    assert tokenizer.decode(completion) == f"{problem.worked_solution}<|im_end|>"


@pytest.mark.parametrize(("direct_share", "is_direct"), [(0.0, False), (1.0, True)])
def test_mixed_solution_with_a_share_of_0_or_1_is_always_the_same(
    direct_share: float, is_direct: bool
) -> None:
    for problem in training_problems(ENV_SETTINGS, 50):
        solution = mixed_solution(problem, direct_share, random.Random(0))

        assert solution == (problem.direct_solution if is_direct else problem.worked_solution)
        assert problem.is_correct(solution)


def test_mixed_solution_in_between_shows_both_in_proportion() -> None:
    rng = random.Random(0)

    num_direct = sum(
        mixed_solution(problem, 0.25, rng) == problem.direct_solution
        for problem in training_problems(ENV_SETTINGS, 400)
    )

    assert 70 <= num_direct <= 130  # 100 expected, deviation 8.7

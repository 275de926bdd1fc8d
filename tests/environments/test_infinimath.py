from __future__ import annotations

import importlib.util
import random
import sys
import types
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from atroposlib.envs.check import check_environment
from atroposlib.envs.server_handling.proxy.app import serving
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.infinimath import (
    BUILTIN_GENERATORS,
    MAX_LEVEL,
    Exercise,
    MathCurriculum,
    ProblemSource,
    WordProblems,
    first_boxed,
    has_thought,
    is_equal,
    read_answer,
)
from environments.infinimath.infinimath import InfiniteMath
from environments.infinimath.infinimath_env import (
    InfiniteMathEnv,
    InfiniteMathEnvConfig,
    reward_of,
)
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

THOUGHT = "\n<think>\nhm</think>"
SETTINGS: dict[str, Any] = {
    "generator": "builtin",
    "data_path_to_save_groups": None,
    "word_problem_openai_api_key": None,
}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (THOUGHT + "It is \\boxed{42}.", 1.4),
        (THOUGHT + "\\boxed{42.0}", 1.4),
        (THOUGHT + "\\boxed{\\frac{84}{2}}", 1.4),
        (THOUGHT + "Therefore:\n42", 1.2),  # the last line, without a box
        ("\\boxed{42}", 1.0),
        ("<think></think>\\boxed{42}", 1.2),  # an empty thought
        (THOUGHT + "\\boxed{41}", -0.6),
        (THOUGHT + "\\boxed{41} or \\boxed{42}", -0.6),  # the first of two boxes
        (THOUGHT + "I give up", -0.8),
        ("\n<think>\n\\boxed{42}</think>", -0.8),  # inside the thinking
        ("\n<think>\n\\boxed{42}", -1.0),
        (THOUGHT + "\\boxed{42", -0.8),
        (THOUGHT + "\\boxed{" + "9" * 5000 + "}", -0.8),
        (THOUGHT + "\\boxed{\u0664\u0662}", -0.6),  # Arabic digits
        (THOUGHT + "\\boxed{42/0}", -0.6),
        ("", -1.0),
    ],
)
def test_reward_of_a_completion(completion: str, reward: float) -> None:
    config = InfiniteMathEnvConfig(word_problem_openai_api_key=None)

    assert reward_of(completion, "42", config) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "solution", "equal"),
    [
        ("1,200", "1200", True),
        ("\\dfrac{3}{4}", "0.75", True),
        ("x = 3", "x=3", True),
        ("x = 5", "5", True),
        ("5", "x=5", True),
        ("y = 5", "x = 5", False),
        ("1\\frac{1}{2}", "3/2", True),
        ("1\\frac{1}{2}", "11/2", False),
        ("1 1/2", "3/2", True),
        ("1 1/2", "11/2", False),
        ("-2 1/3", "-7/3", True),
        ("1 / 2", "1/2", True),
        ("-2 \\tfrac{1}{3}", "-7/3", True),
        ("1011_2", "1011", True),
        ("1011_{(2)}", "1011", True),
        ("+5", "5", True),
        (".5", "0.5", True),
        ("\N{MINUS SIGN}5", "-5", True),
        ("\\text{Yes}", "yes", True),
        ("\\left( 1, 2 \\right)", "(1,2)", True),
        ("\\frac12", "1/2", True),
        ("1\\tfrac 12", "3/2", True),
        ("\\frac1{12}", "1/12", True),
        ("\\frac123", "1/23", False),
        ("\\displaystyle\\frac{1}{2}", "1/2", True),
        ("\\(5\\)", "5", True),
        ("(1011)_{2}", "1011", True),
        ("1011_{\\text{two}}", "1011", True),
        ("1176", "1176 m^2", True),
        ("1176 \\text{ m}^2", "1176 m^2", True),
        ("1176 m^3", "1176 m^2", False),
        ("117", "1176 m^2", False),
        ("86^\\circ", "86", True),
        ("68.59", "68.59%", True),
        ("68.59\\%", "68.59%", True),
        ("36%", "36", False),
        ("-3", "3", False),
        ("701", "\\sqrt{701}", False),
        ("", "", False),
        ("3/4", "4/3", False),
    ],
)
def test_equality_of_answers(answer: str, solution: str, equal: bool) -> None:
    assert is_equal(answer, solution) is equal


def test_nested_braces_of_a_box_are_kept() -> None:
    assert first_boxed("\\boxed{\\frac{1}{2}} and \\boxed{3}") == "\\frac{1}{2}"
    assert read_answer("<think>\\boxed{1}</think> so\n7.\n\n") == "7."
    assert not has_thought("a <think>b</think> c")
    assert not has_thought("<think>b</think> c <think>d</think>")


@pytest.mark.parametrize("level", range(1, MAX_LEVEL + 1))
def test_builtin_exercises_are_readable_and_can_be_repeated(level: int) -> None:
    source, again = (ProblemSource("builtin", seed=1) for _ in range(2))
    problems = [source.make(level, number) for number in range(30)]

    assert problems == [again.make(level, number) for number in range(30)]
    assert problems[0] != ProblemSource("builtin", seed=2).make(level, 0)
    assert len({problem.question for problem in problems}) > 15
    for problem in problems:
        assert is_equal(read_answer(f"\\boxed{{{problem.solution}}}"), problem.solution)
        assert not is_equal(str(Fraction(problem.solution) + 1), problem.solution)


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        # Each with chance that always gives the lowest number it may.
        ("_fraction_sum", "What is 1/2 + 1/2, as a fraction in lowest terms?", "1"),
        ("_series", "the sum of its first 5 terms", "25"),  # 1 + 3 + 5 + 7 + 9
        ("_larger_root", "x^2 + 18x + 81 = 0", "-9"),
        ("_dice_chance", "show 3 together", "1/18"),
        ("_determinant", "(-9, -9) and (-9, -9)", "0"),
        ("_slope", "2x^3 + 2x^2 at x = -5", "130"),  # 3 * 2 * 25 - 2 * 2 * 5
        ("_integral", "1x^2 + 1 from x = 0 to x = 1", "4/3"),
        ("_remainder", "2^10 when it is divided by 7", "2"),  # 1024 = 7 * 146 + 2
        ("_geometric_series", "1 + 1/2 + 1/2^2", "2"),
    ],
)
def test_builtin_exercise_worked_by_hand(name: str, question: str, answer: str) -> None:
    class Lowest(Random):
        def randint(self, a: int, b: int) -> int:
            return a

    generators = {g.__name__: g for level in BUILTIN_GENERATORS.values() for g in level}
    asked, solution = generators[name](Lowest())

    assert question in asked
    assert solution == answer


def test_exercise_of_the_package_does_not_depend_on_failures_before_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def generate(generator_id: int) -> tuple[str, str]:
        number = random.randint(1, 10**9)
        if generator_id % 2:
            raise IndexError("string index out of range")
        return f"$ {generator_id} + {number} $ is?", f"${generator_id + number}$"

    package = types.SimpleNamespace(genById=generate)
    monkeypatch.setitem(sys.modules, "mathgenerator", package)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    state = random.getstate()

    source = ProblemSource("mathgenerator", seed=3)
    in_order = [source.make(level, i) for level in (1, 7) for i in range(20)]
    alone = ProblemSource("mathgenerator", seed=3).make(7, 19)

    assert in_order[-1] == alone
    assert "$" not in alone.question + alone.solution
    assert random.getstate() == state
    warned = [record.args[0] for record in caplog.records]  # type: ignore[index]
    assert len(warned) == len(set(warned)) > 0


def test_level_without_a_working_generator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(genById=lambda generator_id: ("", ""))
    monkeypatch.setitem(sys.modules, "mathgenerator", package)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)

    with pytest.raises(ConfigError, match="no generator of level 2"):
        ProblemSource("mathgenerator", seed=0).make(2, 0)


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(MissingExtraError, match="infinimath"):
        ProblemSource("mathgenerator", seed=0)
    assert ProblemSource("auto", seed=0).is_builtin


def test_curriculum_advances_on_the_latest_results_at_its_level() -> None:
    curriculum = MathCurriculum(level=6, progress_threshold=0.75, min_evaluations=4)
    for is_correct in (False, True, True, True):
        curriculum.record(5, is_correct=True)
        curriculum.record(6, is_correct=is_correct)
    assert curriculum.metrics()["curriculum/current_level_success_rate"] == 0.75

    assert curriculum.advance()
    assert (curriculum.level, curriculum.advance()) == (7, False)
    for _ in range(4):
        curriculum.record(7, is_correct=True)
    assert not curriculum.advance()  # there is no eighth
    assert curriculum.metrics()["curriculum/progress_percent"] == 100


def test_practice_ends_an_exercise_after_the_last_attempt_and_climbs() -> None:
    task = InfiniteMath(min_evaluations=1, max_attempts_per_problem=2, generator="builtin")
    first = task.get_state()

    assert task.submit_answer("nonsense") == (False, False, False, None)
    assert task.get_state() == {**first, "attempts": 1}
    missed = task.submit_answer("nonsense")
    assert (missed.is_over, missed.has_advanced) == (True, False)
    solution = ProblemSource("builtin", seed=0).make(1, 1).solution
    assert task.submit_answer(f"\\boxed{{{solution}}}") == (True, True, True, solution)
    assert task.get_state()["level"] == 2
    assert task.reset() == first


def test_wrong_answers_may_not_earn_as_much_as_right_ones() -> None:
    with pytest.raises(ValueError, match="correct_reward must exceed"):
        InfiniteMathEnvConfig(correct_reward=0.0, incorrect_reward=-0.4)
    with pytest.raises(ValueError, match="must be below 0"):
        InfiniteMathEnvConfig(incorrect_reward=-0.4)
    assert InfiniteMathEnvConfig(incorrect_reward=-0.4, apply_length_penalty=False)


async def test_unsolved_exercise_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED, "no", "no", "no", "no"]) as engine:
        env = make_env(InfiniteMathEnv, engine, monkeypatch, group_size=2, **SETTINGS)
        await env.setup()
        item = Exercise("?", "1", 1), 0
        _, backlog = await env.collect_trajectories(item)
        _, last = await env.collect_trajectories((item[0], 2))
        await env.close()
        await env.server.close()

    assert backlog == [(item[0], 1)]
    assert last == []


async def test_group_is_ranked_by_length_and_moves_the_curriculum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: dict[str, Any] = {}
    short, long = ("x" * n + "</think>\\boxed{5}" for n in (10, 900))
    async with ScriptedEngine([PROBED, short, long]) as engine:
        settings = {**SETTINGS, "group_size": 2, "max_token_length": 1600, "min_evaluations": 2}
        env = make_env(InfiniteMathEnv, engine, monkeypatch, **settings)
        await env.setup()
        group, backlog = await env.collect_trajectories((Exercise("?", "5", 1), 0))
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        await env.wandb_log()
        await env.close()
        await env.server.close()

    assert backlog == []
    assert group["scores"][0] == pytest.approx(1.4)
    excess = (len(group["tokens"][1]) - 960) / 640
    assert excess > 0
    assert group["scores"][1] == pytest.approx(1.4 * (1 - excess))
    assert (logged["train/level_1_correct"], logged["train/level_1_count"]) == (1.0, 2)
    assert (logged["curriculum/current_level"], logged["train/percent_correct"]) == (2, 1.0)


async def test_level_is_looked_at_once_per_group_and_evaluations_are_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies = [f"x</think>\\boxed{{{n}}}" for n in (5, 5, 5, 5, 5, 0, 0, 0)]
    settings = {**SETTINGS, "group_size": 8, "min_evaluations": 5}
    settings["progress_threshold"] = 0.8
    async with ScriptedEngine([PROBED, *replies, replies[0]]) as engine:
        env = make_env(InfiniteMathEnv, engine, monkeypatch, **settings)
        await env.setup()
        await env.collect_trajectories((Exercise("?", "5", 1), 0))
        level, results = env.curriculum.level, list(env.results_since_log[1])
        env.eval_problems[1] = [Exercise("?", "5", 1)]
        await env.evaluate_item(env.eval_items()[0])
        await env.close()
        await env.server.close()

    # Two of the latest five are right, whatever the first five were.
    assert level == 1
    assert results == list(env.results_since_log[1]) == [True] * 5 + [False] * 3


async def test_checkpoint_keeps_the_curriculum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env, again = (make_env(InfiniteMathEnv, engine, monkeypatch, **SETTINGS) for _ in range(2))
        for one in (env, again):
            await one.setup()
            one.checkpoint_dir, one.wandb_prepend, one.curr_step = str(tmp_path), "math_0", 4
        await env.get_next_item()
        env.curriculum.record(1, is_correct=True)
        env.curriculum.level = 3
        env.save_checkpoint(4)
        again.load_checkpoint()
        following = await env.get_next_item(), await again.get_next_item()
        for one in (env, again):
            await one.close()
            await one.server.close()

    assert again.curriculum.history == {1: [1]}
    assert following[0] == following[1]
    assert following[0][0].level == 3


async def test_exercise_stays_as_it_is_without_a_key_or_an_answer() -> None:
    nowhere = "http://127.0.0.1:9"
    for key in (None, "x"):
        writer = WordProblems(api_key=key, base_url=nowhere, model_name="m")
        assert await writer.rewrite("What is 2 + 2?") == "What is 2 + 2?"
        await writer.close()


async def test_exercise_is_told_as_a_story_with_a_key() -> None:
    reply = "<think>It is 4.</think>\nTwo cats meet two cats. How many?"
    async with ScriptedEngine(lambda _: reply) as engine:
        writer = WordProblems(api_key="x", base_url=engine.base_url, model_name="m")
        story = await writer.rewrite("What is 2 + 2?")
        await writer.close()

    assert story == "Two cats meet two cats. How many?"


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": None, "error": {"message": "overloaded"}},
        {"choices": []},
        {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": " \n"}}]},
        {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": None}}]},
        {"choices": [{"index": 0, "finish_reason": "length", "message": {"content": "Two"}}]},
    ],
)
async def test_exercise_stays_as_it_is_without_a_story(reply: dict[str, Any]) -> None:
    app = FastAPI()
    app.post("/v1/chat/completions")(lambda: JSONResponse(reply))
    async with serving(app, host="127.0.0.1", port=0) as port:
        url = f"http://127.0.0.1:{port}/v1"
        writer = WordProblems(api_key="x", base_url=url, model_name="m")
        story = await writer.rewrite("What is 2 + 2?")
        await writer.close()

    assert story == "What is 2 + 2?"


def test_environment_passes_the_check() -> None:
    report = check_environment(InfiniteMathEnv)

    assert report.passed, report.text

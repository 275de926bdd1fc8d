from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from atroposlib.tasks.bootcamps import (
    Coinsbootcamp,
    UnsafeVerifierError,
    bootcamp_reward,
    load_bootcamp,
    make_case,
    package_tasks,
    verify_answer,
)
from environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from tests.environments.offline import PROBED, evaluate, make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow  # the check starts workers

COINS = {"coins": [1, 5, 10], "amount": 16, "number": 3, "paid": [10, 5, 1]}
THOUGHT = "<think>Ten and five are fifteen, and one more cent makes sixteen.</think>"
TASKS = '''
"""Bootcamps of a test."""

import random


class Evenbootcamp:
    """Name an even number."""

    def __init__(self, highest=10):
        self.highest = highest

    def case_generator(self):
        return {"above": random.randint(0, self.highest)}

    def prompt_func(self, identity):
        return f"Name an even number above {identity['above']}."

    def verify_score(self, text, identity, format_score=0, short_penalty=True, short_threshold=100):
        word = text.split()[-1] if text.split() else ""
        return float(word.isdigit() and int(word) % 2 == 0 and int(word) > identity["above"])


class Evalbootcamp(Evenbootcamp):
    def verify_score(self, text, identity, *arguments):
        return float(eval(text or "0") == 2)


class Quietbootcamp(Evenbootcamp):
    def verify_score(self, text, identity, *arguments):
        try:
            exec(text)
        except Exception:
            return 0.0
        return 1.0


class Shellbootcamp(Evenbootcamp):
    def verify_score(self, text, identity, *arguments):
        import os

        return float(bool(text) and os.system(text) == 0)


class Literalbootcamp(Evenbootcamp):
    def verify_score(self, text, identity, *arguments):
        import ast

        return float(bool(text) and ast.literal_eval(text) == [1, 2])


class Hugebootcamp(Evenbootcamp):
    def verify_score(self, text, identity, *arguments):
        return 7.0 if text else 0.0


class Basebootcamp(Evenbootcamp):
    pass


class Halfbootcamp:
    def case_generator(self):
        return {}
'''


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a module of bootcamps."""
    folder = tmp_path_factory.mktemp("bootcamps")
    (folder / "camp_tasks.py").write_text(TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "camp_tasks"
    sys.modules.pop("camp_tasks", None)


@pytest.fixture(scope="module")
def worker(tasks: str) -> Iterator[ProcessPoolExecutor]:
    """A process with the guard of verifiers, which stays for as long as a process runs."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield executor


@pytest.fixture
def verify(worker: ProcessPoolExecutor) -> Callable[..., float]:
    """Called with a case and a text, returns the score of the verifier."""
    score = partial(verify_answer, format_score=0.2, short_penalty=False, short_threshold=50)
    return lambda case, text: worker.submit(score, case, text).result()


@pytest.mark.parametrize(
    ("answer", "base"),
    [
        ("[answer]10 5 1[/answer]", 1.0),
        ("[answer]\n1, 5, 10\n[/answer]", 1.0),
        ("[answer]1[/answer] no, [answer]5 1 10[/answer]", 1.0),
        ("[answer]10 6[/answer]", 0.2),
        ("[answer]10 5 1 0[/answer]", 0.2),
        ("[answer]8 7 1[/answer]", 0.2),
        ("[answer]ten[/answer]", 0.0),
        ("10 5 1", 0.0),
        ("<think>[answer]10 5 1[/answer]</think>", 0.0),
        ("[answer]" + "9" * 5000 + "[/answer]", 0.0),
        ("", 0.0),
    ],
)
def test_coins_accept_any_payment_that_fits(answer: str, base: float) -> None:
    assert Coinsbootcamp().verify_score(answer, COINS, 0.2, False) == base


def test_short_answer_gets_a_part_of_the_score() -> None:
    answer = "[answer]10 5 1[/answer]"

    assert Coinsbootcamp().verify_score(answer, COINS, 0.2, True, 46) == len(answer) / 46


@pytest.mark.parametrize(("base", "reward"), [(1.0, 1.0), (0.2, -0.3), (0.0, -0.5), (0.999, 0.499)])
def test_reward_of_a_base_score(base: float, reward: float) -> None:
    assert bootcamp_reward(base, correct=1.0, incorrect=-0.5) == pytest.approx(reward)


def test_case_depends_on_its_seed_only(verify: Callable[..., float]) -> None:
    cases = [make_case("Coinsbootcamp", {"max_coins": 4}, seed) for seed in ("a", "b", "a")]

    assert cases[0] == cases[2] != cases[1]
    assert all(case.identity["number"] <= 4 for case in cases)
    assert verify(cases[0], str(cases[0].solution)) == 1.0


def test_class_of_any_module_is_loaded_with_its_arguments(
    tasks: str, verify: Callable[..., float]
) -> None:
    case = make_case(f"{tasks}:Evenbootcamp", {"highest": 0}, "a")

    assert case.prompt == "Name an even number above 0."
    assert (verify(case, "It is 4"), verify(case, "It is 5"), verify(case, "")) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["Evalbootcamp", "Quietbootcamp"])
@pytest.mark.parametrize("text", ["1 + 1", "__import__('os').getcwd()", "open({!r}, 'w')"])
def test_verifier_that_runs_the_answer_as_code_is_stopped(
    tasks: str, verify: Callable[..., float], tmp_path: Path, name: str, text: str
) -> None:
    case = make_case(f"{tasks}:{name}", {}, "a")

    with pytest.raises(UnsafeVerifierError, match="select another task"):
        verify(case, text.format(str(tmp_path / "x")))
    assert not (tmp_path / "x").exists()


def test_verifier_that_starts_a_program_is_stopped(
    tasks: str, verify: Callable[..., float], worker: ProcessPoolExecutor, tmp_path: Path
) -> None:
    case = make_case(f"{tasks}:Shellbootcamp", {}, "a")

    with pytest.raises(UnsafeVerifierError, match=r"os\.system"):
        verify(case, f"touch {tmp_path / 'made'}")
    assert not (tmp_path / "made").exists()
    assert worker.submit(eval, "1 + 1").result() == 2  # outside of verifiers nothing is refused


def test_verifier_may_parse_literals(tasks: str, verify: Callable[..., float]) -> None:
    assert verify(make_case(f"{tasks}:Literalbootcamp", {}, "a"), "[1, 2]") == 1.0


def test_score_out_of_range_is_an_error(tasks: str, verify: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match=r"returned 7\.0; expected 0 to 1"):
        verify(make_case(f"{tasks}:Hugebootcamp", {}, "a"), "x")


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("camp_tasks:Halfbootcamp", {}, "has no prompt_func, verify_score"),
        ("camp_tasks:Nothing", {}, "is not a bootcamp"),
        ("camp_tasks:Evenbootcamp", {"lowest": 1}, "does not accept --env.task_params"),
        ("no_such_module:Evenbootcamp", {}, "'no_such_module' cannot be imported"),
        ("Sudokubootcamp", {}, "not on PyPI, install it from its repository"),
        ("Coinsbootcamp", {"coins": [0]}, "expected positive values"),
    ],
)
def test_unusable_task_is_one_clear_error(
    tasks: str, task: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_bootcamp(task, params)


def test_random_task_lists_the_classes_of_the_package(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--env\.task_name Coinsbootcamp"):
        package_tasks()
    (tmp_path / "internbootcamp.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "internbootcamp", __import__("internbootcamp"))

    names = package_tasks()

    assert "Evenbootcamp" in names
    assert not {"Basebootcamp", "Halfbootcamp"} & set(names)
    assert make_case("Evenbootcamp", {}, "a").prompt.startswith("Name an even number")


async def test_process_scores_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "groups.jsonl"
    case = make_case("Coinsbootcamp", {}, "training 0 0")
    replies = [PROBED, PROBED, f"{THOUGHT}{case.solution}", f"{THOUGHT}[answer]1[/answer]", "none"]
    async with ScriptedEngine(replies) as engine:
        env = make_env(
            InternBootcampEnv,
            engine,
            monkeypatch,
            task_name="Coinsbootcamp",
            num_score_workers=1,
            data_path_to_save_groups=str(out),
        )
        await run_process(env, num_groups=1, group_size=3)

    [group] = read_groups(out)
    check_group(group)
    assert sorted(group["scores"]) == pytest.approx([-0.5, -0.3, 1.0])


async def test_refusal_in_a_worker_fails_the_group_under_its_name(
    tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED, PROBED, "__import__('os').getcwd()"]) as engine:
        env = make_env(
            InternBootcampEnv,
            engine,
            monkeypatch,
            task_name=f"{tasks}:Evalbootcamp",
            num_score_workers=1,
            num_eval_cases=0,
        )
        await env.setup()
        item = await env.get_next_item()
        with pytest.raises(UnsafeVerifierError, match="select another task"):
            await env.collect_trajectories(item)

        await env.server.close()
        await env.close()
        await env._close_score_pool()


async def test_evaluation_names_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([f"{THOUGHT}[answer]1[/answer]"]) as engine:
        report = await evaluate(
            InternBootcampEnv,
            engine,
            monkeypatch,
            tmp_path,
            task_name="Coinsbootcamp",
            num_score_workers=1,
            num_eval_cases=5,
        )

    assert report["results"]["all"] == {
        "eval/Coinsbootcamp_accuracy": 0.0,
        "eval/Coinsbootcamp_format_rate": 1.0,
        "eval/overall_accuracy": 0.0,
    }


def test_environment_passes_its_check() -> None:
    report = check_environment(InternBootcampEnv)

    assert report.passed, report.text

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits, SandboxUnavailableError, open_sandbox
from atroposlib.tasks.answers import last_code_block
from atroposlib.tasks.code_tests import (
    CodeProblem,
    is_same_output,
    is_same_value,
    load_problems,
    passes_all_tests,
    read_problem,
)
from environments.code_execution_server.code_execution_server import (
    SAMPLE,
    CodingEnv,
    ProgramAnswer,
    eval_metrics,
    lookup_program,
    train_metrics,
)

pytestmark = pytest.mark.slow

NO_ENV: Any = None
"""The prompt depends on the problem alone."""
LIMITS = SandboxLimits(wall_s=60.0, cpu_s=1)


@pytest.fixture(scope="session")
def _has_sandbox() -> None:
    try:
        open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def sums(**changes: Any) -> CodeProblem:
    tests = {"input": ["1 2\n", "10 5\n"], "output": ["3\n", "15\n"]}
    return read_problem({"problem": "Print the sum.", "tests": tests, **changes})


def doubled(tests: dict[str, Any] | None = None) -> CodeProblem:
    tests = tests or {"input": ["[1, 2]", "[]"], "output": ["[2, 4]", "[]"]}
    return read_problem(
        {"problem": "Double.", "problem_type": "func", "fn_name": "double", "tests": tests}
    )


async def passes(program: str, problem: CodeProblem) -> bool:
    return await passes_all_tests(open_sandbox(), program, problem, limits=LIMITS)


@pytest.mark.parametrize(
    ("answer", "block"),
    [
        ("```python\na\nb\n```", "a\nb"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b"),
        ("```python\na\n```\n```python\ncut", "a"),
        ("```print(1)```\n```python\nprint(2)\n```", "print(2)"),
        ("1. so:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ('```\ns = "a\u2028b"\n```', 's = "a\u2028b"'),
        ("```\r\na\r\nb\r\n```", "a\nb"),
        ("no program", None),
        ("```python\ncut", None),
        ("", None),
    ],
)
def test_last_closed_block_is_the_program(answer: str, block: str | None) -> None:
    assert last_code_block(answer) == block


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("3\n", "3", True),
        ("1.50\n", "1.5", True),
        ("1  2\n3 \n", "1 2\n3", True),
        ("1e3", "1000", True),
        ("1e999999999", "1", False),
        ("9" * 500, "9" * 499, False),
        ("٣", "3", False),
        ("1_0", "10", False),
        ("nan", "NaN", False),
        ("sNaN", "1", False),
        ("3\n4", "3", False),
        ("", "3", False),
    ],
)
def test_printed_text_is_compared_by_words_and_decimals(
    printed: str, expected: str, is_same: bool
) -> None:
    assert is_same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("returned", "expected", "is_same"),
    [
        ([1, 2], [1, 2], True),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1, True, False),
        ("1", 1, False),
        ({"a": [1.0]}, {"a": [1]}, True),
        (10**400, 1.0, False),
        (None, None, True),
    ],
)
def test_values_are_compared_by_kind(returned: Any, expected: Any, is_same: bool) -> None:
    assert is_same_value(returned, expected) is is_same


@pytest.mark.usefixtures("_has_sandbox")
@pytest.mark.parametrize(
    ("program", "is_right"),
    [
        ("print(sum(map(int, input().split())))", True),
        ("from __future__ import annotations\nprint(sum(map(int, input().split())))", True),
        ("print(3)", False),
        ("", False),
        ("while True: pass", False),
        ("import sys; print(3); sys.exit(1)", False),
        ("import os; os._exit(0)", False),
        ("print('all tests passed, score 1.0')", False),
        ("syntax error", False),
    ],
)
async def test_program_on_standard_input(program: str, is_right: bool) -> None:
    assert await passes(program, sums()) is is_right


@pytest.mark.usefixtures("_has_sandbox")
@pytest.mark.parametrize(
    ("program", "is_right"),
    [
        ("def double(x: List[int]): return [2 * n for n in x]", True),
        ("class Solution:\n  def double(self, x): print('debug'); return [2*n for n in x]", True),
        ("def double(x): return tuple(2 * n for n in x)", True),
        (
            "def f(n): return n and f(n - 1)\ndef double(x): return [f(5000) + 2 * n for n in x]",
            True,
        ),
        ("def double(x): return x", False),
        ("def double(x): return {1, 2}", False),
        ("def other(x): return [2, 4]", False),
        ("import os; os.write(3, b'[2, 4]'); os._exit(0)", False),
    ],
)
async def test_function_is_called(program: str, is_right: bool) -> None:
    assert await passes(program, doubled()) is is_right


@pytest.mark.usefixtures("_has_sandbox")
async def test_function_may_use_a_dataclass_with_annotations_as_text() -> None:
    program = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Pair:
    one: int
    other: int = 2

def double(x): return Pair(x).one * Pair(x).other
"""

    assert await passes(program, doubled({"input": [[3]], "output": [6]}))


@pytest.mark.usefixtures("_has_sandbox")
async def test_lists_of_arguments_and_wrapped_results_are_understood() -> None:
    problem = doubled({"input": [[[3]]], "output": [[[6]]]})

    assert await passes("def double(x): return [2 * n for n in x]", problem)


@pytest.mark.usefixtures("_has_sandbox")
async def test_expected_output_may_exceed_the_limit_of_output() -> None:
    numbers = [str(number) for number in range(200_000)]  # 1.3 MB
    printed = sums(tests={"input": ["200000"], "output": ["\n".join(numbers)]})
    returned = doubled({"input": [[200_000]], "output": [numbers]})

    assert await passes("print(*range(int(input())), sep='\\n')", printed)
    assert await passes("def double(x): return [str(n) for n in range(x)]", returned)
    assert not await passes("print('1' * 4_000_000)", printed)


@pytest.mark.usefixtures("_has_sandbox")
async def test_gold_programs_of_the_sample_pass_and_others_fail() -> None:
    train, test = load_problems(str(SAMPLE), "normal")

    for problem in train + test:
        assert await passes(lookup_program(problem), problem), problem.question
        assert not await passes("print('x')", problem), problem.question


def test_prompt_names_the_starter_code_or_the_streams() -> None:
    assert "standard input" in CodingEnv.prompt(NO_ENV, sums())[1]["content"]
    assert "def double" in CodingEnv.prompt(NO_ENV, doubled())[1]["content"]


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "p", "tests": "{"},
        {"problem": "p", "tests": "[" * 100_000},
        {"problem": "p", "tests": {"input": ["1"], "output": []}},
        {"problem": "p", "tests": {"input": [], "output": []}},
        {"problem": "p", "tests": {"input": [1], "output": [1]}, "problem_type": "func"},
    ],
)
def test_unreadable_problem_says_what_was_expected(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        read_problem(row)


def test_figures_are_means_over_problems_and_answers() -> None:
    right, wrong = ProgramAnswer(True, False, 10), ProgramAnswer(False, True, 30)

    trained = train_metrics([[right, wrong], [wrong, wrong]])
    evaluated = eval_metrics([[right, wrong], [wrong, wrong]], ["easy", "hard"], group_size=2)

    assert trained["train_rewards/rewards"] == -0.5
    assert trained["train_rewards/pass@group_size"] == 0.5
    assert evaluated["eval/pass_1"] == 0.25
    assert (evaluated["eval/easy_pass_1"], evaluated["eval/hard_pass_1"]) == (0.5, 0.0)
    assert "eval/medium_pass_1" not in evaluated
    assert evaluated["eval/overlong_ratio"] == 0.75
    assert evaluated["eval/correct_completion_length"] == 10
    assert train_metrics([]) == {}


@pytest.mark.usefixtures("_has_sandbox")
def test_environment_passes_its_check() -> None:
    report = check_environment(CodingEnv)

    assert report.passed, report.text


def test_sample_holds_both_kinds() -> None:
    assert {p.kind for p in load_problems(str(SAMPLE), "normal")[0]} == {"func", "stdin_stdout"}
    assert Path(SAMPLE, "test.jsonl").exists()

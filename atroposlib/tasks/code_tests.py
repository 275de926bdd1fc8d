"""Programming problems with tests: reading problems, running programs and comparing outputs.

row ─► Problem ─► program in a sandbox, test by test ─► output or value ─► comparison
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.sandbox import Sandbox, SandboxLimits, run_python
from atroposlib.utils.local_records import read_splits

__all__ = [
    "CodeProblem",
    "Test",
    "arguments_of",
    "expected_values",
    "is_same_output",
    "is_same_value",
    "load_problems",
    "passes_all_tests",
    "read_problem",
]

COLUMNS = ("problem", "tests")
OPTIONAL = ("problem_type", "starter_code", "fn_name", "difficulty")
KINDS = ("func", "stdin_stdout")
SHUFFLE_SEED = 42
HUB = {"normal": "NousResearch/RLVR_Coding_Problems", "deepmind": "deepmind/code_contests"}
HUB_EVAL = "NousResearch/lcb_test"


class Test(NamedTuple):
    """One test of a program."""

    input: Any
    """Standard input as text; for a function, a list of arguments or text with one per line."""
    output: Any
    """Expected output; for a function, its return value as a value or JSON text."""


class CodeProblem(NamedTuple):
    """One problem."""

    question: str
    kind: str
    """`func` or `stdin_stdout`."""
    tests: tuple[Test, ...]
    starter_code: str
    function: str
    """For `func`: name of the function, or of a method of the class `Solution`."""
    difficulty: str


def read_problem(row: Mapping[str, Any]) -> CodeProblem:
    """Return the problem of a row.

    Raises:
        ConfigError: its tests or its kind are invalid.
    """
    tests = row["tests"]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs = tuple(Test(*pair) for pair in zip(tests["input"], tests["output"], strict=True))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"tests of {row['problem'][:60]!r} cannot be read ({error!r}); expected "
            '{"input": [...], "output": [...]} of equal length, as an object or as JSON text'
        ) from error
    function = row.get("fn_name") or tests.get("fn_name") or ""
    kind = row.get("problem_type") or ("func" if function else "stdin_stdout")
    if not pairs or kind not in KINDS or (kind == "func" and not function):
        raise ConfigError(
            f"problem {row['problem'][:60]!r}: expected one test or more, a problem_type out of "
            f"{', '.join(KINDS)}, and fn_name with func; got {len(pairs)}, {kind!r}, {function!r}"
        )
    return CodeProblem(
        question=row["problem"],
        kind=kind,
        tests=pairs,
        starter_code=row.get("starter_code") or "",
        function=function,
        difficulty=str(row.get("difficulty") or ""),
    )


def load_problems(
    dataset_path: str | None, dataset_name: str
) -> tuple[list[CodeProblem], list[CodeProblem]]:
    """Return training and evaluation problems, shuffled with a fixed seed; see `CodeConfig`.

    Raises:
        ConfigError: a file, data set or column is missing, or a row is invalid.
    """
    if dataset_path is not None:
        train, test = read_splits(
            Path(dataset_path), COLUMNS, shuffle_seed=SHUFFLE_SEED, optional=OPTIONAL
        )
    else:
        train = hub_rows(HUB[dataset_name], split="train", shuffle_seed=SHUFFLE_SEED)
        test = hub_rows(HUB_EVAL, split="test", shuffle_seed=SHUFFLE_SEED)
        if dataset_name == "deepmind":
            train = _contest_rows(train)
    return [read_problem(row) for row in train], [read_problem(row) for row in test]


def _contest_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return contest problems with the columns of RLVR problems, without those that lack tests."""
    kinds = ("private_tests", "generated_tests")
    found = []
    for row in rows:
        tests = {
            side: [text for kind in kinds for text in (row.get(kind) or {}).get(side, [])]
            for side in ("input", "output")
        }
        if tests["input"]:
            found.append({"problem": row["description"], "tests": tests})
    return found


RELATIVE = 1e-9
MAX_NUMBER_CHARACTERS = 400


def is_same_output(printed: str, expected: str) -> bool:
    """Compare text line by line and word by word; decimals by value, so `1.50` equals `1.5`."""
    left, right = printed.strip().splitlines(), expected.strip().splitlines()
    return len(left) == len(right) and all(map(_is_same_line, left, right))


def is_same_value(returned: Any, expected: Any) -> bool:
    """Compare JSON values; floats up to rounding, and booleans are not equal to numbers."""
    try:
        return _is_same(returned, expected)
    except RecursionError:
        return False


def _is_same_line(left: str, right: str) -> bool:
    words, others = left.split(), right.split()
    return len(words) == len(others) and all(map(_is_same_word, words, others))


def _is_same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    numbers = (_number(left), _number(right))
    return None not in numbers and numbers[0] == numbers[1]


def _number(word: str) -> Decimal | None:
    if not word.isascii() or "_" in word or len(word) > MAX_NUMBER_CHARACTERS:
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) or isinstance(right, float):
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return are_numbers and _is_close(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def _is_close(left: float, right: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=RELATIVE)
    except OverflowError:  # an integer outside the range of floats
        return False


PRELUDE = """
import json, os, sys
sys.setrecursionlimit(50_000)
space = {"__name__": "__main__"}
exec(
    "import bisect, collections, functools, heapq, itertools, math, random, re, string, sys\\n"
    "from bisect import *\\nfrom collections import *\\nfrom functools import *\\n"
    "from heapq import *\\nfrom itertools import *\\nfrom typing import *\\n"
    "from math import ceil, floor, gcd, inf, sqrt\\n",
    space,
)
program = compile(open("solution.py").read(), "solution.py", "exec")
"""
"""Imports that answers to such problems often omit, and the recursion depth that they may use."""

RUNNER = PRELUDE + "exec(program, space)\n"

CALLER = (
    PRELUDE
    + """
import types
space["__name__"] = "solution"
module = types.ModuleType("solution")  # where dataclasses look their annotations up
module.__dict__.update(space)
sys.modules["solution"], space = module, module.__dict__
result, (name, arguments) = os.dup(1), json.load(open("call.json"))
os.dup2(2, 1)
exec(program, space)
function = getattr(space["Solution"](), name) if "Solution" in space else space[name]
with open(result, "w") as file:
    json.dump(function(*arguments), file)
os._exit(0)
"""
)
"""Calls the function. Standard output has the result only; prints go to standard error."""


async def passes_all_tests(
    sandbox: Sandbox, program: str, problem: CodeProblem, *, limits: SandboxLimits
) -> bool:
    """Run a program on its tests in order, until one fails.

    Raises:
        SandboxError: the sandbox could not be set up, so there is no verdict.
    """
    run = _call if problem.kind == "func" else _talk
    for test in problem.tests:
        if not await run(sandbox, program, problem, test, limits):
            return False
    return True


async def _talk(
    sandbox: Sandbox, program: str, _: CodeProblem, test: Test, limits: SandboxLimits
) -> bool:
    expected = _as_text(test.output)
    result = await run_python(
        sandbox,
        RUNNER,
        stdin=_as_text(test.input),
        files={"solution.py": program},
        limits=_with_room_for(expected, limits),
    )
    return result.is_success and await asyncio.to_thread(is_same_output, result.stdout, expected)


async def _call(
    sandbox: Sandbox, program: str, problem: CodeProblem, test: Test, limits: SandboxLimits
) -> bool:
    call = json.dumps([problem.function, arguments_of(test)])
    files = {"solution.py": program, "call.json": call}
    expected = test.output if isinstance(test.output, str) else json.dumps(test.output, default=str)
    limits = _with_room_for(expected, limits)
    result = await run_python(sandbox, CALLER, files=files, limits=limits)
    return result.is_success and await asyncio.to_thread(_is_expected, result.stdout, test)


def _with_room_for(expected: str, limits: SandboxLimits) -> SandboxLimits:
    """Return limits under which a program can print twice the expected output."""
    room = 2 * len(expected.encode("utf-8", "replace"))
    return dataclasses.replace(limits, output_bytes=max(limits.output_bytes, room))


def _is_expected(printed: str, test: Test) -> bool:
    try:
        returned = json.loads(printed)
    except (ValueError, RecursionError):
        return False
    return any(is_same_value(returned, option) for option in expected_values(test))


def expected_values(test: Test) -> list[Any]:
    """Return the accepted return values of the function.

    If the input is text, the output is JSON text. With a list of arguments, the output may be a
    list of one value.
    """
    if isinstance(test.input, str) and isinstance(test.output, str):
        try:
            return [json.loads(test.output)]
        except (ValueError, RecursionError):
            return [test.output]
    if isinstance(test.output, list) and len(test.output) == 1:
        return [test.output, test.output[0]]
    return [test.output]


def arguments_of(test: Test) -> list[Any]:
    """Return the arguments of the function, from a list or from text with a JSON value per line."""
    given = test.input
    if isinstance(given, list):
        return given
    return [json.loads(line) for line in str(given).splitlines() if line.strip()]


def _as_text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)

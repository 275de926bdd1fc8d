"""Running an answer's program on the tests of a problem, in a sandbox.

    program + one test's input -> sandbox -> what it printed or returned -> compared out here

The expected outputs never enter the sandbox, so that a program cannot read or fake them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from atroposlib.sandbox import Sandbox, SandboxLimits, run_python
from environments.code_execution_server.problems import Problem, Test
from environments.code_execution_server.verdicts import is_same_output, is_same_value

__all__ = ["arguments_of", "expected_values", "passes_all_tests"]

PRELUDE = """
import json, os
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
"""Names that answers to such problems use without importing them."""

RUNNER = PRELUDE + "exec(program, space)\n"

CALLER = (
    PRELUDE
    + """
import sys, types
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
"""Calls the function; what the program prints goes to standard error, the result alone to
standard output."""


async def passes_all_tests(
    sandbox: Sandbox, program: str, problem: Problem, *, limits: SandboxLimits
) -> bool:
    """Run a program on one test after the other, until one fails.

    Args:
        sandbox: where it runs; each test begins in an empty folder.
        program: the text of the program.
        problem: whose tests.
        limits: of each test.

    Raises:
        SandboxError: the sandbox could not be set up: no verdict on the program.
    """
    run = _call if problem.kind == "func" else _talk
    for test in problem.tests:
        if not await run(sandbox, program, problem, test, limits):
            return False
    return True


async def _talk(
    sandbox: Sandbox, program: str, _: Problem, test: Test, limits: SandboxLimits
) -> bool:
    result = await run_python(
        sandbox,
        RUNNER,
        stdin=_as_text(test.input),
        files={"solution.py": program},
        limits=limits,
    )
    expected = _as_text(test.output)
    return result.is_success and await asyncio.to_thread(is_same_output, result.stdout, expected)


async def _call(
    sandbox: Sandbox, program: str, problem: Problem, test: Test, limits: SandboxLimits
) -> bool:
    call = json.dumps([problem.function, arguments_of(test)])
    files = {"solution.py": program, "call.json": call}
    result = await run_python(sandbox, CALLER, files=files, limits=limits)
    return result.is_success and await asyncio.to_thread(_is_expected, result.stdout, test)


def _is_expected(printed: str, test: Test) -> bool:
    try:
        returned = json.loads(printed)
    except (ValueError, RecursionError):
        return False
    return any(is_same_value(returned, option) for option in expected_values(test))


def expected_values(test: Test) -> list[Any]:
    """Return the values of which the function must return one.

    Text is JSON where the input is text; a list of arguments may go with a list of one value.
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
    """Return what the function is called with: a list, or text with a JSON value per line."""
    given = test.input
    if isinstance(given, list):
        return given
    return [json.loads(line) for line in str(given).splitlines() if line.strip()]


def _as_text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)

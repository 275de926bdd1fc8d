"""A program that knows the tests by heart: the gold answer of a check."""

from __future__ import annotations

import json

from environments.code_execution_server.execution import arguments_of, expected_values
from environments.code_execution_server.problems import Problem

__all__ = ["lookup_program"]


def lookup_program(problem: Problem) -> str:
    """Return a program that passes all tests of a problem by looking the answers up."""
    if problem.kind == "stdin_stdout":
        known = {str(test.input).strip(): str(test.output) for test in problem.tests}
        return f"import sys\nprint({known!r}[sys.stdin.read().strip()])"
    values = {json.dumps(arguments_of(test)): expected_values(test)[-1] for test in problem.tests}
    return (
        f"import json\ndef {problem.function}(*given):\n"
        f"    return {values!r}[json.dumps(list(given))]"
    )

"""No test fails because a machine is slow: none asserts an upper bound on measured seconds.

`tests/growth.py` compares work with work; waiting for a condition has a deadline of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def upper_bounds(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of asserts that a difference of two clock readings is small."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        measured = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _is_duration(node.value, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and _bounds_above(node.test, measured):
                yield node.lineno


def _bounds_above(test: ast.expr, measured: set[str]) -> bool:
    for compared in ast.walk(test):
        if not isinstance(compared, ast.Compare):
            continue
        sides = [compared.left, *compared.comparators]
        for left, operator, right in zip(sides, compared.ops, sides[1:], strict=False):
            smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
            is_ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if is_ordered and _is_duration(smaller, measured):
                return True
    return False


def _is_duration(value: ast.expr, measured: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in measured
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub) and _reads_clock(value)


def _reads_clock(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        for node in ast.walk(value)
    )


def test_no_test_asserts_that_something_is_fast() -> None:
    texts = {
        path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("*.py")
    }
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path, text in texts.items()
        if any(f"time.{clock}()" in text for clock in CLOCKS)
        for line in upper_bounds(ast.parse(text))
    ]

    assert found == []


@pytest.mark.parametrize(
    ("statement", "is_found"),
    [
        ("assert time.monotonic() - started < 5", True),
        ("took_s = time.perf_counter() - started\n  assert took_s < 5", True),
        ("assert 0.1 <= time.monotonic() - started < 5", True),
        ("assert 5 > time.process_time() - started", True),
        ("assert time.monotonic() - started >= 0.1", False),
        ("assert 0.1 < time.monotonic() - started", False),
        ("assert time.monotonic() < deadline", False),
    ],
)
def test_bounds_are_found(statement: str, is_found: bool) -> None:
    tree = ast.parse(f"def test_it():\n  started = time.monotonic()\n  {statement}\n")

    assert bool(list(upper_bounds(tree))) == is_found

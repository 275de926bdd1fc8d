"""Programming problems: what a row says, from the hub or from files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_splits
from environments.shared.hub import hub_rows

__all__ = ["Problem", "Test", "load_problems", "read_problem"]

COLUMNS = ("problem", "tests")
OPTIONAL = ("problem_type", "starter_code", "fn_name", "difficulty")
KINDS = ("func", "stdin_stdout")
SHUFFLE_SEED = 42
HUB = {"normal": "NousResearch/RLVR_Coding_Problems", "deepmind": "deepmind/code_contests"}
HUB_EVAL = "NousResearch/lcb_test"


class Test(NamedTuple):
    """One test of a program."""

    input: Any
    """Standard input as text; of a function a list of arguments, or text with one per line."""
    output: Any
    """What it must print; of a function what it must return, as a value or as JSON text."""


class Problem(NamedTuple):
    """One problem."""

    question: str
    kind: str
    """`func` or `stdin_stdout`."""
    tests: tuple[Test, ...]
    starter_code: str
    function: str
    """Of `func`: its name, or that of a method of the class `Solution`."""
    difficulty: str


def read_problem(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row.

    Raises:
        ConfigError: its tests or its kind cannot be read; the message says what was expected.
    """
    tests = row["tests"]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs = tuple(Test(*pair) for pair in zip(tests["input"], tests["output"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
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
    return Problem(
        question=row["problem"],
        kind=kind,
        tests=pairs,
        starter_code=row.get("starter_code") or "",
        function=function,
        difficulty=str(row.get("difficulty") or ""),
    )


def load_problems(
    dataset_path: str | None, dataset_name: str
) -> tuple[list[Problem], list[Problem]]:
    """Return training and evaluation problems, shuffled with a fixed seed.

    Args:
        dataset_path: file or folder with the columns of the hub's; None loads from the hub.
        dataset_name: `normal` or `deepmind`, the training problems of the hub.

    Raises:
        ConfigError: something is missing or cannot be read; the message says what.
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
    """Return contest problems in the columns of the others; those without tests are left out."""
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

"""Exercises by level: from the package mathgenerator, or from our own generators.

Exercise number i of a level is the same in every run with the same seed.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from atroposlib.errors import ConfigError, MissingExtraError
from environments.infinimath.builtin_problems import BUILTIN_GENERATORS

__all__ = ["DESCRIPTIONS", "MAX_LEVEL", "GeneratorKind", "Problem", "ProblemSource"]

logger = logging.getLogger(__name__)

GeneratorKind = Literal["auto", "mathgenerator", "builtin"]

DESCRIPTIONS = {
    1: "arithmetic with whole numbers",
    2: "fractions, percentages and simple areas",
    3: "divisors, linear equations and means",
    4: "systems, progressions and quadratics",
    5: "counting and probability",
    6: "matrices, derivatives and number systems",
    7: "integrals, modular arithmetic and series",
}
MAX_LEVEL = max(DESCRIPTIONS)

GENERATOR_IDS: dict[int, tuple[int, ...]] = {
    1: (0, 1, 2, 3, 8, 31, 71, 80, 90),
    2: (6, 11, 13, 16, 28, 44, 47, 53, 97, 118, 119, 124),
    3: (18, 19, 22, 24, 25, 49, 58, 75, 96, 104, 108, 112, 115),
    4: (9, 10, 20, 21, 23, 26, 40, 41, 45, 50, 76, 78, 105),
    5: (17, *range(32, 40), 43, 46, 60, 61, 70, 72, 77, 95, 113, 117, 122, 123),
    6: (
        *(4, 5, 7, 12, 14, 15, 27, 30, 42, 48, 52, 54, 55),
        *(56, 59, 62, 64, 73, 79, 84, 88, 89, 91, 103, 107, 110),
    ),
    7: (*range(65, 70), 74, 85, *range(92, 95), *range(98, 102), 106, 109, 111, 121),
}
"""Level -> identifiers of mathgenerator."""

MAX_TRIES = 20
Generate = Callable[[random.Random], tuple[str, str]]


class Problem(NamedTuple):
    """One exercise."""

    question: str
    solution: str
    level: int
    """1 to 7."""


class ProblemSource:
    """Makes exercises.

    Args:
        kind: `mathgenerator`, `builtin`, or `auto` for the former where it is installed.
        seed: of all exercises.

    Raises:
        MissingExtraError: mathgenerator is asked for and not installed.
    """

    def __init__(self, kind: GeneratorKind, *, seed: int) -> None:
        is_installed = importlib.util.find_spec("mathgenerator") is not None
        if kind == "mathgenerator" and not is_installed:
            raise MissingExtraError("mathgenerator", extra="infinimath")
        self.is_builtin = kind == "builtin" or not is_installed
        self._seed = seed
        self._failed: set[Any] = set()

    def make(self, level: int, number: int | str) -> Problem:
        """Return an exercise of a level.

        Args:
            level: 1 to 7.
            number: which one.

        Raises:
            ConfigError: no generator of the level works.
        """
        dice = random.Random(f"{self._seed} {level} {number}")
        for _ in range(MAX_TRIES):
            question, solution = self._try(level, dice)
            if question and solution:
                return Problem(question, solution, level)
        raise ConfigError(f"no generator of level {level} made an exercise; try generator builtin")

    def _try(self, level: int, dice: random.Random) -> tuple[str, str]:
        if self.is_builtin:
            return dice.choice(BUILTIN_GENERATORS[level])(dice)
        generator_id = dice.choice(GENERATOR_IDS[level])
        try:
            question, solution = _seeded(generator_id, dice)
        except Exception as error:  # noqa: BLE001 - third-party code that fails in many ways
            # It stays among the others: what an exercise is may not depend on those before it.
            if generator_id not in self._failed:
                logger.warning("generator %d failed (%r); told once", generator_id, error)
            self._failed.add(generator_id)
            return "", ""
        return _plain(question), _plain(solution)


def _seeded(generator_id: int, dice: random.Random) -> tuple[Any, Any]:
    """Call a generator of the package, which takes its chance from the global generator."""
    import mathgenerator

    state = random.getstate()
    random.seed(dice.random())
    try:
        question, solution = mathgenerator.genById(generator_id)
    finally:
        random.setstate(state)
    return question, solution


def _plain(text: Any) -> str:
    return re.sub(r"\$([^$]*)\$", r"\1", str(text)).strip()

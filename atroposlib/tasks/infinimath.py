"""Exercises in seven levels: generators, reading and comparing answers, the curriculum.

level ─► ProblemSource (mathgenerator, our own generators, reworded as a story) ─► Problem
completion ─► answer ─► equal to the gold one? ─► MathCurriculum ─► level
"""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from random import Random
from typing import Any, Literal, NamedTuple

from atroposlib.envs.conversation import visible_text
from atroposlib.errors import ConfigError, MissingExtraError

__all__ = [
    "BUILTIN_GENERATORS",
    "DESCRIPTIONS",
    "MAX_LEVEL",
    "Exercise",
    "GeneratorKind",
    "MathCurriculum",
    "ProblemSource",
    "WordProblems",
    "first_boxed",
    "has_thought",
    "is_equal",
    "read_answer",
]

logger = logging.getLogger(__name__)

Generator = Callable[[Random], tuple[str, str]]
"""Random source -> question and answer, an integer or a fraction."""


def _sum(dice: Random) -> tuple[str, str]:
    a, b = dice.randint(2, 99), dice.randint(2, 99)
    return f"What is {a} + {b}?", str(a + b)


def _difference(dice: Random) -> tuple[str, str]:
    a, b = sorted((dice.randint(2, 99), dice.randint(2, 99)), reverse=True)
    return f"What is {a} - {b}?", str(a - b)


def _product(dice: Random) -> tuple[str, str]:
    a, b = dice.randint(2, 12), dice.randint(2, 20)
    return f"What is {a} times {b}?", str(a * b)


def _quotient(dice: Random) -> tuple[str, str]:
    a, b = dice.randint(2, 12), dice.randint(2, 20)
    return f"What is {a * b} divided by {a}?", str(b)


def _triangle(dice: Random) -> tuple[str, str]:
    base, height = dice.randint(2, 30), 2 * dice.randint(1, 15)
    question = f"A triangle has the base {base} and the height {height}. What is its area?"
    return question, str(base * height // 2)


def _fraction_sum(dice: Random) -> tuple[str, str]:
    a, b = (Fraction(dice.randint(1, 9), dice.randint(2, 12)) for _ in range(2))
    return f"What is {a} + {b}, as a fraction in lowest terms?", str(a + b)


def _percentage(dice: Random) -> tuple[str, str]:
    part, whole = 5 * dice.randint(1, 19), 20 * dice.randint(1, 30)
    return f"What is {part} percent of {whole}?", str(part * whole // 100)


def _common_divisor(dice: Random) -> tuple[str, str]:
    shared = dice.randint(2, 15)
    a, b = shared * dice.randint(2, 12), shared * dice.randint(2, 12)
    return f"What is the greatest common divisor of {a} and {b}?", str(math.gcd(a, b))


def _linear_equation(dice: Random) -> tuple[str, str]:
    x, factor, added = dice.randint(-12, 12), dice.randint(2, 9), dice.randint(1, 40)
    return f"Solve {factor}x + {added} = {factor * x + added} for x.", str(x)


def _mean(dice: Random) -> tuple[str, str]:
    values = [dice.randint(1, 40) for _ in range(4)]
    listed = ", ".join(map(str, values))
    return f"What is the mean of {listed}?", str(Fraction(sum(values), 4))


def _two_equations(dice: Random) -> tuple[str, str]:
    x, y = dice.randint(-9, 9), dice.randint(-9, 9)
    a, b = dice.randint(2, 6), dice.randint(2, 6)
    question = f"It is {a}x + y = {a * x + y} and x - {b}y = {x - b * y}. What is x?"
    return question, str(x)


def _series(dice: Random) -> tuple[str, str]:
    first, step, number = dice.randint(1, 20), dice.randint(2, 9), dice.randint(5, 20)
    question = (
        f"An arithmetic progression begins with {first} and grows by {step}. What is the sum of "
        f"its first {number} terms?"
    )
    return question, str(number * (2 * first + (number - 1) * step) // 2)


def _larger_root(dice: Random) -> tuple[str, str]:
    a, b = dice.randint(-9, 9), dice.randint(-9, 9)
    terms = f"x^2 {_signed(-(a + b))}x {_signed(a * b)}"
    return f"What is the largest solution of {terms} = 0?", str(max(a, b))


def _selection(dice: Random) -> tuple[str, str]:
    total = dice.randint(5, 12)
    chosen = dice.randint(2, 4)
    question = f"In how many ways can {chosen} of {total} people be chosen, order aside?"
    return question, str(math.comb(total, chosen))


def _dice_chance(dice: Random) -> tuple[str, str]:
    wanted = dice.randint(3, 11)
    ways = sum(a + b == wanted for a in range(1, 7) for b in range(1, 7))
    question = f"Two dice are thrown. What is the probability that they show {wanted} together?"
    return f"{question} Give a fraction in lowest terms.", str(Fraction(ways, 36))


def _determinant(dice: Random) -> tuple[str, str]:
    a, b, c, d = (dice.randint(-9, 9) for _ in range(4))
    question = f"What is the determinant of the matrix with the rows ({a}, {b}) and ({c}, {d})?"
    return question, str(a * d - b * c)


def _slope(dice: Random) -> tuple[str, str]:
    a, b, x = dice.randint(2, 9), dice.randint(2, 9), dice.randint(-5, 5)
    question = f"What is the derivative of {a}x^3 + {b}x^2 at x = {x}?"
    return question, str(3 * a * x * x + 2 * b * x)


def _binary(dice: Random) -> tuple[str, str]:
    number = dice.randint(17, 255)
    return f"Write the decimal number {number} in binary.", f"{number:b}"


def _integral(dice: Random) -> tuple[str, str]:
    a, b, end = dice.randint(1, 9), dice.randint(1, 9), dice.randint(1, 6)
    question = f"What is the integral of {a}x^2 + {b} from x = 0 to x = {end}?"
    return question, str(Fraction(a * end**3, 3) + b * end)


def _remainder(dice: Random) -> tuple[str, str]:
    base, power, modulus = dice.randint(2, 12), dice.randint(10, 60), dice.randint(7, 31)
    question = f"What is the remainder of {base}^{power} when it is divided by {modulus}?"
    return question, str(pow(base, power, modulus))


def _geometric_series(dice: Random) -> tuple[str, str]:
    first, divisor = dice.randint(1, 9), dice.randint(2, 9)
    question = f"What is the sum of the endless series {first} + {first}/{divisor} + "
    question += f"{first}/{divisor}^2 + ..., each term one part in {divisor} of the one before?"
    return question, str(Fraction(first * divisor, divisor - 1))


def _signed(value: int) -> str:
    return f"- {-value}" if value < 0 else f"+ {value}"


BUILTIN_GENERATORS: dict[int, Sequence[Generator]] = {
    1: (_sum, _difference, _product, _quotient),
    2: (_triangle, _fraction_sum, _percentage),
    3: (_common_divisor, _linear_equation, _mean),
    4: (_two_equations, _series, _larger_root),
    5: (_selection, _dice_chance),
    6: (_determinant, _slope, _binary),
    7: (_integral, _remainder, _geometric_series),
}
"""Generators by level."""

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
"""Identifiers of mathgenerator by level."""

MAX_TRIES = 20


class Exercise(NamedTuple):
    """One exercise."""

    question: str
    solution: str
    level: int
    """1 to 7."""


class ProblemSource:
    """Makes exercises.

    Args:
        kind: `mathgenerator`, `builtin`, or `auto` for the former if it is installed.
        seed: seed of all exercises.

    Raises:
        MissingExtraError: `kind` is `mathgenerator`, which is not installed.
    """

    def __init__(self, kind: GeneratorKind, *, seed: int) -> None:
        is_installed = importlib.util.find_spec("mathgenerator") is not None
        if kind == "mathgenerator" and not is_installed:
            raise MissingExtraError("mathgenerator", extra="infinimath")
        self.is_builtin = kind == "builtin" or not is_installed
        self._seed = seed
        self._failed: set[Any] = set()

    def make(self, level: int, number: int | str) -> Exercise:
        """Return an exercise of a level; `number` selects it.

        Raises:
            ConfigError: no generator of the level works.
        """
        dice = random.Random(f"{self._seed} {level} {number}")
        for _ in range(MAX_TRIES):
            question, solution = self._try(level, dice)
            if question and solution:
                return Exercise(question, solution, level)
        raise ConfigError(f"no generator of level {level} made an exercise; try generator builtin")

    def _try(self, level: int, dice: random.Random) -> tuple[str, str]:
        if self.is_builtin:
            return dice.choice(BUILTIN_GENERATORS[level])(dice)
        generator_id = dice.choice(GENERATOR_IDS[level])
        try:
            question, solution = _seeded(generator_id, dice)
        except Exception as error:  # noqa: BLE001 - third-party code that fails in many ways
            # It is not removed: an exercise must not depend on the ones before it.
            if generator_id not in self._failed:
                logger.warning("generator %d failed (%r); logged once", generator_id, error)
            self._failed.add(generator_id)
            return "", ""
        return _plain(question), _plain(solution)


def _seeded(generator_id: int, dice: random.Random) -> tuple[Any, Any]:
    """Call a generator of the package, which draws from Python's global random generator."""
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


BOX = "\\boxed{"
MAX_ANSWER = 2000
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
BARE_FRACTION = re.compile(
    r"(\\[dt]?frac)\s{0,3}(?:\{([^{}]{1,40})\}|([0-9]))\s{0,3}(?:\{([^{}]{1,40})\}|([0-9])(?![0-9]))"
)
r"""A fraction that may lack braces around a digit, as in `\frac12`."""
MIXED = re.compile(
    r"(-?)\b([0-9]{1,20})(?:\s{0,3}(?=\\[dt]?frac\{)|\s{1,3}(?=[0-9]))"
    r"(?:\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}|([0-9]{1,20})/([0-9]{1,20})\b)"
)
"""An integer followed by a fraction means their sum."""
NAMED = re.compile(r"^[a-z]=(?=[-+]?[0-9.])")
UNIT = re.compile(r"(?<=[0-9])(?:c?m(?:\^[23])?|\^circ|\N{DEGREE SIGN}|degrees|radians)$")
PERCENT = re.compile(r"(?<=[0-9])%$")
BASE = re.compile(r"^\(?([01]+)\)?_\(?(?:2|two)\)?$")
FORMATTING = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;! ()\[\]]"
)
NUMBER = re.compile(r"-?[0-9]{1,40}(?:/[0-9]{1,40}|\.[0-9]{1,40})?")


def has_thought(completion: str) -> bool:
    """Whether the completion begins with one closed, non-empty thinking block."""
    opened, tag, rest = completion.partition("<think>")
    thought, closed, answer = rest.partition("</think>")
    is_single = "<think>" not in answer and "</think>" not in answer
    return bool(tag and closed and thought.strip()) and not opened.strip() and is_single


def first_boxed(text: str) -> str | None:
    r"""Return the content of the first `\boxed{}`, nested braces included; None if not closed."""
    inside = text.partition(BOX)[2][:MAX_ANSWER]
    depth = 1
    for index, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:index].strip()
    return None


def read_answer(completion: str) -> str:
    """Return the first boxed answer after the thinking, else the last line there."""
    text = visible_text(completion)
    if BOX in text:
        return first_boxed(text) or ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:MAX_ANSWER] if lines else ""


def is_equal(answer: str, solution: str) -> bool:
    """Compare two answers as numbers if both are numbers, else as text without LaTeX and spaces.

    A name or a unit that only one of them has is left out: `x=5` equals `5`, but not `y=5`.
    """
    one, other = _normalized(answer), _normalized(solution)
    for extra in (NAMED, UNIT):
        if bool(extra.search(one)) != bool(extra.search(other)):
            one, other = extra.sub("", one), extra.sub("", other)
    if not PERCENT.search(one):
        other = PERCENT.sub("", other)
    if not one:
        return False
    if NUMBER.fullmatch(one) and NUMBER.fullmatch(other):
        try:
            return Fraction(one) == Fraction(other)
        except ZeroDivisionError:
            return False
    return one == other


def _normalized(text: str) -> str:
    text = FORMATTING.sub("", text[:MAX_ANSWER].replace("\N{MINUS SIGN}", "-"))
    text = BARE_FRACTION.sub(lambda f: f"{f[1]}{{{f[2] or f[3]}}}{{{f[4] or f[5]}}}", text)
    text = MIXED.sub(_as_fraction, text)
    text = FRACTION.sub(r"\1/\2", text)
    text = re.sub(r"[\\{}$,\s]", "", text)
    text = BASE.sub(r"\1", text.lower().rstrip("."))
    return re.sub(r"^(-?)\.(?=[0-9])", r"\g<1>0.", text.removeprefix("+"))


def _as_fraction(mixed: re.Match[str]) -> str:
    above, below = mixed[3] or mixed[5], mixed[4] or mixed[6]
    return f"{mixed[1]}{int(mixed[2]) * int(below) + int(above)}/{below}"


KEPT_RESULTS = 1000


class MathCurriculum:
    """The level of the exercises and the results at each level.

    Args:
        level: first level, 1 to 7.
        progress_threshold: mean result at which the level increases.
        min_evaluations: number of latest results in that mean.
        history: restored results (0 or 1) by level; the keys may be strings, as in JSON.
    """

    def __init__(
        self,
        *,
        level: int,
        progress_threshold: float,
        min_evaluations: int,
        history: Mapping[int | str, Sequence[int]] | None = None,
    ) -> None:
        self.level = level
        self.progress_threshold = progress_threshold
        self.min_evaluations = min_evaluations
        self.history = {int(key): list(values) for key, values in (history or {}).items()}

    def record(self, level: int, *, is_correct: bool) -> None:
        results = [*self.history.get(level, []), int(is_correct)]
        self.history[level] = results[-max(KEPT_RESULTS, self.min_evaluations) :]

    def advance(self) -> bool:
        """Increase the level if the latest results at it allow; return whether it increased."""
        num_results = len(self.history.get(self.level, []))
        if self.level == MAX_LEVEL or num_results < self.min_evaluations:
            return False
        if self.success_rate() < self.progress_threshold:
            return False
        self.level += 1
        return True

    def success_rate(self) -> float:
        """Return the mean of the latest results at the level; 0.0 without results."""
        recent = self.history.get(self.level, [])[-self.min_evaluations :]
        return statistics.fmean(recent) if recent else 0.0

    def metrics(self) -> dict[str, float | str]:
        rate = self.success_rate()
        return {
            "curriculum/current_level": self.level,
            "curriculum/max_level": MAX_LEVEL,
            "curriculum/progress_percent": 100 * (self.level - 1) / (MAX_LEVEL - 1),
            "curriculum/level_description": DESCRIPTIONS[self.level],
            "curriculum/current_level_success_rate": rate,
            "curriculum/threshold_to_advance": self.progress_threshold,
            "curriculum/remaining_to_threshold": max(0.0, self.progress_threshold - rate),
        }


INSTRUCTION = (
    "Turn the exercise into a short everyday story that ends in a question. Keep every number and "
    "every symbol that matters, so that the answer stays exactly the same, and do not give the "
    "answer. Reply with the story alone.\n\nExercise: {question}"
)
MAX_TOKENS, TEMPERATURE, TIMEOUT_S = 512, 0.7, 60.0


class WordProblems:
    """Rewrites exercises as stories, with a model of an OpenAI-compatible service.

    Args:
        api_key: key of the service; without one, exercises are not rewritten.
        base_url: base URL of the service; None is OpenAI's own.
        model_name: name of the model.
    """

    def __init__(self, *, api_key: str | None, base_url: str | None, model_name: str) -> None:
        self._api_key = api_key
        self._base_url = base_url
        self._model_name = model_name

    async def rewrite(self, question: str) -> str:
        """Wait for the story of an exercise; return the exercise itself after a failure."""
        if not self._api_key:
            return question
        import openai

        try:
            reply = await self._client.chat.completions.create(
                model=self._model_name,
                messages=[{"role": "user", "content": INSTRUCTION.format(question=question)}],
                max_tokens=MAX_TOKENS,
                temperature=TEMPERATURE,
            )
        except openai.OpenAIError as error:
            logger.warning("exercise not rewritten: %s", error)
            return question
        # Some services answer an error with status 200 and without choices.
        choices = [choice for choice in reply.choices or () if choice.finish_reason != "length"]
        story = choices[0].message.content if choices else None
        return visible_text(story or "").strip() or question

    async def close(self) -> None:
        if "_client" in vars(self):
            await self._client.close()

    @cached_property
    def _client(self) -> Any:
        import openai

        return openai.AsyncOpenAI(api_key=self._api_key, base_url=self._base_url, timeout=TIMEOUT_S)

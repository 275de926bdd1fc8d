"""Our own generators of exercises, a few for each of the seven levels. Pure but for the dice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

__all__ = ["BUILTIN_GENERATORS", "Generator"]

Generator = Callable[[Random], tuple[str, str]]
"""Source of chance -> question and answer, an integer or a fraction."""


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
"""Level -> its generators."""

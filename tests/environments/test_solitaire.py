"""The solitaire environment: formulas that are arithmetic, their grade, the shipped questions."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from environments.community.solitaire_winning_probability.solitaire_winning_probability_env import (
    SolitaireEnv,
    evaluate_formula,
    grade,
    score_formula,
)
from tests.environments.offline import ready_env


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1/4", 0.25),
        (" 1 - comb(3, 1) / comb(4, 2) ", 0.5),
        ("factorial(5) * 2^5 / factorial(10)", 1 / 945),
        ("2**-1", 0.5),
        ("-(-1/2)**3", 0.125),
        ("sqrt(4) / max(8, min(9, 16))", 2 / 9),
        ("exp(0) - log(e)", 0.0),
        ("comb(1000, 500) / 2**1000", 0.025225),
        ("comb(26.0, 2)", 325.0),
        ("0.5 ** 100000", 0.0),
    ],
)
def test_formula_has_a_value(formula: str, value: float) -> None:
    assert evaluate_formula(formula) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "a quarter",
        "1/0",
        "1e999",
        "1e999 - 1e999",
        "sqrt(-1)",
        "(-8)**0.5",
        "log(0)",
        "comb(1, 2, 3)",
        "comb(5.5, 2)",
        "comb()",
        "factorial(-1)",
        "factorial(99999999)",
        "factorial(factorial(99))",
        "comb(10**9, 10**8)",
        "9**9**9**9",
        "10**400 * 1.0",
        "2**(10**9)",
        "(9**3000)**3000",
        "1 << 10**9",
        "True",
        "'1' * 10**9",
        "[1] * 10**9",
        "1j",
        "x",
        "p = 1/2",
        "1 if 1 else 2",
        "max(*[1, 2])",
        "max(1, 2, key=abs)",
        "(1).real",
        "__import__('os')",
        "(lambda: 1)()",
        "comb.__self__",
        "1; 2",
        "1or 2",
        "0x",
        "\x00",
        "(" * 400,
        "-" * 499 + "1" + "-",
        "1 + " * 200 + "1",
    ],
)
def test_other_texts_have_no_value(formula: str) -> None:
    assert evaluate_formula(formula) is None


@pytest.mark.parametrize(
    ("value", "gold", "score"),
    [
        (0.5, 0.5, 1.0),
        (0.45, 0.5, 1.0),  # an error of 10 % is below 20 %
        (0.35, 0.5, 0.9),
        (0.25, 0.5, 0.7),
        (0.0, 0.5, 0.2),
        (1.0, 0.5, 0.2),
        (1.25, 0.5, -0.3),
        (7.0, 0.5, -0.8),
        (-7.0, 0.5, -0.8),
    ],
)
def test_grade(value: float, gold: float, score: float) -> None:
    assert grade(value, gold) == pytest.approx(score)
    assert score_formula(f"So <formula>{value}</formula>", gold) == pytest.approx(score)


@pytest.mark.parametrize(
    "answer",
    ["", "1/2", "<formula></formula>", "<formula>a half</formula>", "<formula>1/2",
     "<formula>1/2</formula> or <formula>1/3</formula>"],
)  # fmt: skip
def test_reply_without_a_formula_scores_lowest(answer: str) -> None:
    assert score_formula(answer, 0.5) == -1.0


async def test_shipped_formulas_are_right_and_no_constant_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(SolitaireEnv, monkeypatch)
    rows = [*env.train, *env.test]

    def mean(value: float) -> float:
        return statistics.fmean(grade(value, row["answer"]) for row in rows)

    assert len(rows) == len({row["question"] for row in rows}) == 49
    assert all(evaluate_formula(r["formula"]) == pytest.approx(r["answer"]) for r in rows)
    assert max(mean(value / 1000) for value in range(1000)) < 0.3


async def test_answers_of_a_csv_file_are_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "qa_data.csv").write_text("question,answer\nHow likely?,0.5\n")

    env = await ready_env(SolitaireEnv, monkeypatch, dataset_path=str(tmp_path / "qa_data.csv"))

    assert await env.score(env.train[0], "<formula>1/2</formula>") == 1.0
    assert env.check_gold_answer(env.train[0]) == "<formula>0.5</formula>"


@pytest.mark.parametrize("answer", [0, 1.5, -0.1, "nan", "half", [1]])
async def test_answer_that_is_not_a_probability_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": answer}))

    with pytest.raises(ConfigError, match="probability above 0"):
        await ready_env(SolitaireEnv, monkeypatch, dataset_path=str(path))

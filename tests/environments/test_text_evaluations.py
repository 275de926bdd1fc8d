"""Short answers between tags: comparison with gold answers, grids, rows of the hub."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks.text_evaluations import (
    TEXT_SOURCES,
    best_drop_match,
    contains_answer,
    normalized_answer,
)
from environments.eval_environments.arc_agi_eval import read_grid
from environments.eval_environments.hle_eval import is_same_answer


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        # equal; contains the gold answer or is the same number; equal with upper and lower case
        ("DNA Ligase.", "DNA ligase", (True, True, False)),
        ("the enzyme DNA ligase", "DNA ligase", (False, True, True)),
        ("DNA", "DNA ligase", (False, False, False)),
        ("i", "DNA ligase", (False, False, False)),
        ("x^2+1", "$x^2 + 1$", (True, True, True)),
        ("x^{21}", "x^2+1", (False, False, False)),
        ("1, 2", "12", (False, False, False)),
        ("12", "(1, 2)", (False, False, False)),
        ("2 x", "2x", (True, True, True)),
        ("12", "1/2", (False, False, False)),
        ("1/2", "2", (False, False, False)),
        ("-2", "2", (False, False, False)),
        ("3.9", "3.2", (False, False, False)),
        ("1,000.0", "1000", (False, True, True)),
        (".5", "5", (False, False, False)),
        (".5", "0.5", (True, True, True)),
        ("?", "?!", (False, False, False)),
        ("", "7", (False, False, False)),
    ],
)
def test_answers_to_the_last_exam(answer: str, gold: str, expected: tuple[bool, ...]) -> None:
    is_equal, is_fuzzy, is_exact = expected

    assert is_same_answer(answer, gold, is_fuzzy=False, is_case_sensitive=False) == is_equal
    assert is_same_answer(answer, gold, is_fuzzy=True, is_case_sensitive=False) == is_fuzzy
    assert is_same_answer(answer, gold, is_fuzzy=True, is_case_sensitive=True) == is_exact


@pytest.mark.parametrize(
    "text",
    [
        "[[0, 1], [2, 3]]",
        "[[0,1],[2,3]]",
        "((0, 1), (2, 3),)",
        "The output is [\n  [0, 1],\n  [2, 3]\n].",
        "```\n0 1\n2 3\n```",
        "[0, 1]\n[2, 3]",
        "0,1\n\n2,3",
        "[[0, 1], [2, 3]], that is [[0, 1], [2, 3]]",
    ],
)
def test_grid_is_read_in_each_form(text: str) -> None:
    assert read_grid(text) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[[0, 1], [2]]",
        "[[0, 1]] or [[2, 3]]",
        "[[10, 1]]",
        "[[-1, 1]]",
        "[[0.5, 1]]",
        "0 1\nand\n2 3",
        "__import__('os').getcwd()",
        "[" * 20_000,
        "[" + f"[1{' ' * 40}]," * 400,
        "[[1" + " " * 15_000,
        "[" + "[" + "1," * 9_000,
        "0 " * 9_000,
        str([[1] * 31]),
        "[[1, 2]]" + " " * 20_000,
    ],
)
def test_text_without_one_grid_has_none(text: str) -> None:
    assert read_grid(text) is None


def test_rows_of_text_evaluations_may_have_the_forms_of_the_hub() -> None:
    abstract = {"contexts": ["First.", "Second."], "labels": ["A", "B"]}
    row = {"question": "q?", "context": abstract, "final_decision": "Maybe"}
    read = TEXT_SOURCES["pubmedqa"].read

    assert read(row)[:2] == ("First.\nSecond.\n\nQuestion: q?", "maybe")
    assert read({**row, "context": "Text."}).question == "Text.\n\nQuestion: q?"
    with pytest.raises(ConfigError, match="is not yes, no or maybe"):
        read({**row, "final_decision": "unsure"})
    with pytest.raises(ConfigError, match="gold answer is empty"):
        TEXT_SOURCES["hle"].read({"question": "q", "answer": " "})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Danube.", "danube"),
        ("1,000", "1000"),
        ("1000.0", "1000"),
        ("three apples", "3 apples"),
        ("$5", "5"),
        ("U.S.", "us"),
        ("twenty-one", "twenty 1"),
        ("-5", "-5"),
        ("\u2212$5", "-5"),
        ("(-5) degrees", "-5 degrees"),
        ("3-4", "3 4"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("A", "a"),  # an article only
        ("The * a", "the a"),
        ("007", "7"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("-.50 degrees", "-0.5 degrees"),
        ("...5", "5"),
        ("978-0306406157", "978 306406157"),
        ("9780306406157", "9780306406157"),  # more digits than a float of 12 has
        ("9780306406158.0", "9780306406158"),
    ],
)
def test_normalized_short_answers(text: str, expected: str) -> None:
    assert normalized_answer(text) == expected


@pytest.mark.parametrize(
    ("reply", "gold", "expected"),
    [
        ("It is Henrik Ibsen, I think", "Henrik Ibsen", True),
        ("Ibsen", "Henrik Ibsen", False),
        ("I", "Henrik Ibsen", False),
        ("Henrik's friend Ibsen", "Henrik Ibsen", False),
        ("12", "2", False),
        ("", "2", False),
        ("2", "", False),
    ],
)
def test_containment_is_of_whole_words_of_the_gold_answer(
    reply: str, gold: str, expected: bool
) -> None:
    assert contains_answer(reply, gold) is expected


@pytest.mark.parametrize(
    ("reply", "golds", "is_equal", "f1"),
    [
        ("265", [["265"]], True, 1.0),
        ("265 houses", [["265"]], False, pytest.approx(2 / 3)),  # precision 1/2, recall 1
        ("264", [["265"]], False, 0.0),
        ("264 houses", [["265 houses"]], False, 0.0),  # another number
        ("Weld", [["Hanna Weld"], ["Weld"]], True, 1.0),
        ("Jonas and Hanna", [["Hanna", "Jonas"]], True, 1.0),
        ("Hanna", [["Hanna", "Jonas"]], False, 0.5),
        ("Hanna, Jonas, Ada", [["Hanna", "Jonas"]], False, pytest.approx(2 / 3)),
        ("", [["265"]], False, 0.0),
        ("March 1893", [["March 1893"]], True, 1.0),
        ("1,000 men, 2,000 men", [["2,000 men", "1,000 men"]], True, 1.0),
        ("100, 200", [["100", "200"]], True, 1.0),
        ("Bed and Breakfast, Hotel", [["Hotel", "Bed and Breakfast"]], True, 1.0),
        ("Paris, France; Rome", [["Paris, France", "Rome"]], True, 1.0),
        ("Paris, France and Rome, Italy", [["Paris, France", "Rome, Italy"]], True, 1.0),
        ("Paris, France and Rome, Italy", [["Paris, France", "Rome"]], False, pytest.approx(5 / 6)),
        ("A", [["A"]], True, 1.0),
        ("the", [["A"]], False, 0.0),
        (f"265{' ' * 10_000}houses", [["265"]], False, 0.0),
    ],
)
def test_drop_match(reply: str, golds: Any, is_equal: bool, f1: Any) -> None:
    assert best_drop_match(reply, golds) == (is_equal, f1)


def test_drop_answers_of_the_hub_are_columns() -> None:
    answer = {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["Ada"]}
    validated = {"number": ["3", ""], "spans": [[], ["Ada L."]], "date": [{}, {}]}
    row = {"passage": "p", "question": "q", "answer": answer, "validated_answers": validated}

    question = TEXT_SOURCES["drop"].read(row)

    assert question.gold == (("Ada",), ("3",), ("Ada L.",))

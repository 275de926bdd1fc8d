"""The regex environment: the share of right strings, hostile patterns, the shipped problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.errors import ConfigError
from environments.community.regex_generation.regex_generation_env import (
    NUM_SHOWN,
    RegexConfig,
    RegexEnv,
    score_regex,
)
from tests.environments.offline import ready_env

POSITIVE, NEGATIVE = ["1", "22", "333"], ["", "a", "1a", " 1", "1 2"]


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("<answer>[0-9]+</answer>", 8 / 8),
        ("So: <answer>\n\\d+\n</answer>", 8 / 8),
        ("<answer>[0-9]</answer>", 6 / 8),  # not "22", "333"
        ("<answer>.*</answer>", 3 / 8),
        ("<answer>x^</answer>", 5 / 8),  # matches nothing
        ("<answer>1|22</answer>", 7 / 8),
        ("<answer>[0-9</answer>", 0.0),
        ("<answer>(?P<a>1)(?P<a>2)</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>1</answer><answer>22</answer>", 0.0),
        (f"<answer>[0-9]+{'(?:)' * 200}</answer>", 0.0),
        ("<answer>[0-9]{99999999999999999999}</answer>", 0.0),
        ("<answer>" + "(" * 240 + "1" + ")" * 240 + "</answer>", None),
        ("<answer>[[0-9]+</answer>", 8 / 8),  # which Python warns of
        ("[0-9]+", 0.0),
        ("", 0.0),
    ],
)
def test_score(answer: str, share: float | None) -> None:
    score = score_regex(answer, POSITIVE, NEGATIVE)

    assert 0 <= score <= 1 if share is None else score == pytest.approx(share)


async def test_regex_that_backtracks_for_ever_earns_nothing_and_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(RegexEnv, monkeypatch, num_score_workers=1, score_timeout_s=3)
    item = {"positive": ["a" * 60], "negative": ["a" * 60 + "b"]}

    scores = await env.score_all(item, ["<answer>(a*)*c</answer>", "<answer>a+</answer>"])

    assert scores == [0.0, 1.0]
    assert env.score_pool.num_timeouts == 1
    await env.close()


@pytest.mark.parametrize("settings", [{"num_score_workers": 0}, {"score_backend": "THREAD"}])
def test_threads_cannot_be_stopped_and_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="cannot be stopped"):
        RegexConfig(**settings)


@pytest.mark.parametrize("answer", [".*", "(?!)", ".+", "[a-z]+", "[0-9]+", r"\S+"])
async def test_one_regex_for_all_problems_earns_about_half(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    env = await ready_env(RegexEnv, monkeypatch)

    problems = [*env.train, *env.test]
    scores = [
        score_regex(f"<answer>{answer}</answer>", row["positive"], row["negative"])
        for row in problems
    ]

    assert len(problems) == 36
    assert sum(scores) / len(scores) < 0.65


async def test_gold_scores_one_and_a_list_of_the_shown_examples_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(RegexEnv, monkeypatch)

    for row in (*env.train, *env.test):
        listed = f"<answer>{'|'.join(map(re.escape, row['positive'][:NUM_SHOWN]))}</answer>"
        assert score_regex(env.check_gold_answer(row), row["positive"], row["negative"]) == 1.0
        assert score_regex(listed, row["positive"], row["negative"]) <= 0.75
        [shown] = re.findall("^It matches.*$", env.prompt(row)[0]["content"], re.MULTILINE)
        assert all(repr(text) not in shown for text in row["positive"][NUM_SHOWN:])


async def test_difficulties_select_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(RegexEnv, monkeypatch, difficulties=["hard"])

    assert {row["difficulty"] for row in (*env.train, *env.test)} == {"hard"}


async def test_file_without_the_difficulty_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"description": "d", "positive": ["a"], "negative": ["b"], "difficulty": "easy"}\n'
    )

    with pytest.raises(ConfigError, match="no training problem of the difficulty hard"):
        await ready_env(RegexEnv, monkeypatch, dataset_path=str(rows), difficulties=["hard"])


async def test_score_from_the_threshold_on_counts_as_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(RegexEnv, monkeypatch, score_threshold=0.75)

    assert env.train_metrics([1.0, 0.75, 0.5, 0.0])["train/percent_correct"] == 0.5
    assert env.is_correct({"score": 0.75})
    assert not env.is_correct({"score": 0.7})

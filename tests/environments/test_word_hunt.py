"""The word hunt: words on boards, their points, boards that can be drawn again."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.errors import ConfigError
from environments.community.word_hunt.word_hunt_env import (
    SAMPLE,
    Dictionary,
    LetterBoard,
    PointScheme,
    WordHuntConfig,
    WordHuntEnv,
    draw_board,
    find_words,
    has_path,
    points,
    score_words,
)
from tests.environments.offline import ready_env

ROWS = ("cat", "ers", "xyz")
WORDS = ("ace", "care", "cat", "star")  # 100 + 400 + 100 + 400
BOARD = LetterBoard(ROWS, WORDS)


def dictionary(*words: str) -> Dictionary:
    return Dictionary.of(iter(words), min_length=3, max_length=16)


@pytest.mark.parametrize(
    ("length", "word_hunt", "doubling"),
    [(2, 0, 1), (3, 100, 2), (4, 400, 4), (5, 800, 8), (6, 1400, 16), (7, 1800, 32)],
)
def test_points(length: int, word_hunt: int, doubling: int) -> None:
    assert points("x" * length) == word_hunt
    assert points("x" * length, "doubling") == doubling


@pytest.mark.parametrize(
    ("word", "is_found"),
    [
        ("cat", True),
        ("tac", True),
        ("star", True),
        ("crs", True),  # diagonal
        ("stars", False),  # the s twice
        ("races", False),  # e and s are apart
        ("cab", False),
        ("act", False),  # a, c, but t is two places from c
    ],
)
def test_words_are_paths(word: str, is_found: bool) -> None:
    assert has_path(ROWS, word) is is_found
    assert find_words(ROWS, dictionary(word, "zebra")) == ({word} if is_found else set())


@pytest.mark.parametrize(
    ("answer", "scheme", "earned", "best"),
    [
        ("<answer>ace, care, cat, star</answer>", "word_hunt", 1000, 1000),
        ("Found: <answer>\nSTAR\nCat\n</answer>", "word_hunt", 500, 1000),
        ("<answer>cat cat, Cat; CAT</answer>", "word_hunt", 100, 1000),
        ("<answer>stars, dog, crs, cat's</answer>", "word_hunt", 100, 1000),
        ("<answer>star, cat</answer>", "doubling", 6, 12),
        ("<answer></answer>", "word_hunt", 0, 1000),
        ("<answer>cat</answer><answer>star</answer>", "word_hunt", 0, 1000),
        ("cat, star", "word_hunt", 0, 1000),
        ("", "word_hunt", 0, 1000),
    ],
)
def test_score(answer: str, scheme: PointScheme, earned: int, best: int) -> None:
    assert score_words(answer, BOARD, scheme=scheme) == (earned, best)


@pytest.mark.parametrize(
    ("settings", "answer", "score"),
    [
        ({}, "star, cat", 0.5),
        ({"normalize_scores": False}, "star, cat", 500.0),
        ({}, "star, crs, acre", 0.4),
        ({"validate_words": False}, "star, crs, stars, tsx", 0.5),
        ({"validate_words": False}, "acre, care, star, race, cat", 1.0),  # 1700 of 1000 points
        ({"validate_words": False, "max_word_length": 3}, "crs, acre", 0.1),
    ],
)
async def test_settings_of_the_score(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], answer: str, score: float
) -> None:
    env = await ready_env(WordHuntEnv, monkeypatch, **settings)

    assert await env.score(BOARD, f"<answer>{answer}</answer>") == pytest.approx(score)


async def test_boards_depend_on_their_index_and_repeat_after_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = [await ready_env(WordHuntEnv, monkeypatch, boards_per_epoch=2) for _ in range(2)]

    boards = [await one.get_next_item() for _ in range(3)]
    other.iter = 1

    assert boards[0] == boards[2] != boards[1]
    assert await other.get_next_item() == boards[1]
    assert not set(boards) & set(one.eval_items())
    assert all(len(board.words) >= 10 for board in one.eval_items())


def test_words_shipped_are_sorted_lower_case_words() -> None:
    words = SAMPLE.read_text(encoding="utf-8").split("\n")[:-1]

    assert words == sorted(set(words))
    assert len(dictionary(*words).words) == len(words) == 5478


def test_list_of_the_shortest_words_earns_little() -> None:
    shipped = dictionary(*SAMPLE.read_text(encoding="utf-8").split())
    listed = sorted(shipped.words, key=lambda word: (len(word), word))[:400]
    boards = [draw_board(f"0 {index}", 4, shipped) for index in range(30)]

    scores = [score_words(f"<answer>{' '.join(listed)}</answer>", board) for board in boards]

    assert statistics.fmean(earned / best for earned, best in scores) < 0.2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("ab\n12345\n", "no word of 3 to 16"), ("\xff", "cannot be read")],
)
async def test_dictionary_without_words_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_text(content, encoding="latin-1")

    with pytest.raises(ConfigError, match=message):
        await ready_env(WordHuntEnv, monkeypatch, dictionary_path=str(path))


def test_board_without_a_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 by 2 have no word"):
        draw_board("0", 2, dictionary("abcdefghijk"))


def test_lengths_are_a_range() -> None:
    with pytest.raises(ValidationError, match="must not exceed"):
        WordHuntConfig(min_word_length=5, max_word_length=4)

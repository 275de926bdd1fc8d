from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError
from atroposlib.tasks.games import words_at
from environments.game_environments.crosswords.crosswords_env import (
    INVALID,
    LEVELS,
    UNSOLVED,
    WIN,
    Board,
    BoardSize,
    Cell,
    Crossword,
    CrosswordGame,
    CrosswordsEnv,
    Entry,
    board_of,
    make_board,
)
from tests.environments.game_players import Player, play_game

pytestmark = pytest.mark.slow


def runs_of(board: Board) -> list[str]:
    """Every run of two or more letters, read off the grid."""
    letters = board.letters
    rows = [
        "".join(letters.get(Cell(row, column), " ") for column in range(board.num_columns))
        for row in range(board.num_rows)
    ]
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    return [run for line in rows + columns for run in line.split() if len(run) > 1]


@settings(max_examples=60)
@given(st.sampled_from(["easy", "medium", "hard"]), st.integers(0, 2_000_000))
def test_every_run_of_a_board_is_an_entry_and_a_listed_word(difficulty: str, seed: int) -> None:
    level = LEVELS[difficulty]  # type: ignore[index]
    board = make_board(words_at(None), level, seed=seed)

    words = sorted(entry.word for entry in board.entries)
    assert sorted(runs_of(board)) == words
    assert len(words) == len(set(words)) == level.num_words
    assert set(words) <= set(words_at(None))
    assert max(board.num_rows, board.num_columns) <= level.side
    assert all(entry.clue == words_at(None)[entry.word] for entry in board.entries)


@settings(max_examples=20)
@given(st.integers(0, 2_000_000))
def test_board_hangs_together_and_is_numbered_in_reading_order(seed: int) -> None:
    board = make_board(words_at(None), LEVELS["medium"], seed=seed)

    reached = {board.entries[0]}
    for _ in board.entries:
        cells = {cell for entry in reached for cell in entry.cells}
        reached |= {entry for entry in board.entries if cells & set(entry.cells)}
    starts = list(dict.fromkeys(entry.start for entry in board.entries))
    assert reached == set(board.entries)
    assert starts == sorted(starts)
    assert [starts.index(e.start) + 1 for e in board.entries] == [e.number for e in board.entries]
    assert board == make_board(words_at(None), LEVELS["medium"], seed=seed)


def test_words_that_never_cross_make_no_board() -> None:
    with pytest.raises(ConfigError, match="longer word list"):
        make_board({"aaa": "a", "bbb": "b"}, BoardSize(2, side=5), seed=0)


BOARD = Board(
    num_rows=4,
    num_columns=4,
    entries=(
        Entry(1, "Across", Cell(0, 0), "pear", "fruit"),
        Entry(2, "Down", Cell(0, 3), "rock", "stone"),
    ),
)
"""P E A R, and R O C K down from its last letter: 7 cells."""


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        (["1-Across: PEAR"], [4 / 7]),
        (["1-across: pear"], [4 / 7]),
        (["- **1-Across: PEAR**"], [4 / 7]),
        (["**1-Across**: PEAR"], [4 / 7]),
        (["It is a fruit.\n 1-Across :  PEAR."], [4 / 7]),
        (["1-Across: PEAR\n2-Down: ROCK"], [1 + WIN]),
        (["1-Across: PEAR", "2-Down: ROCK"], [4 / 7, 3 / 7 + WIN]),
        (["2-Down: ROCK", "1-Across: PEAR"], [4 / 7, 3 / 7 + WIN]),
        (["1-Across: BEAR"], [(3 - 0.1) / 7]),
        (["1-Across: PEAR\n2-Down: LOCK"], [(7 - 0.1) / 7 + WIN]),  # R is right once, L wrong
        (["1-Across: PEAR", "2-Down: RING"], [4 / 7, -0.3 / 7]),
        (["1-Across: XXXX", "1-Across: XXXX"], [-0.4 / 7, -0.4 / 7]),
        (["1-Across: PEAR", "1-Across: PEAR"], [4 / 7, INVALID]),
        (["1-Across: PEAR", "1-Across: PEAR\n2-Down: ROCK"], [4 / 7, INVALID]),
        (["1-Across: PEARS"], [INVALID]),
        (["1-Across: PEA"], [INVALID]),
        (["1-Across PEAR"], [INVALID]),
        (["1-Across: P3AR"], [INVALID]),
        (["1-Across: P E A R"], [INVALID]),
        (["1-Across: PE\u00c4R"], [INVALID]),
        (["1-Across: PEAR\u00e9"], [INVALID]),
        (["1-Across: \uff30\uff25\uff21\uff32"], [INVALID]),  # full-width PEAR
        (["\u0661-Across: PEAR"], [INVALID]),  # an Arabic 1
        (["3-Across: PEAR"], [INVALID]),
        (["1-Down: PEAR"], [INVALID]),
        (["99999999999999999999-Down: PEAR"], [INVALID]),
        (["1-Across: PEAR\n9-Down: ROCK"], [INVALID]),
        (["1-Across: PEAR\n1-Across: BEAR"], [INVALID]),
        (["PEAR"], [INVALID]),
        ([""], [INVALID]),
    ],
)
def test_turn_earns_the_letters_it_finds(turns: list[str], rewards: list[float]) -> None:
    game = CrosswordGame(BOARD)

    assert [game.fill_in(turn).reward for turn in turns] == pytest.approx(rewards)


def test_invalid_turn_writes_nothing() -> None:
    game = CrosswordGame(BOARD)

    outcome = game.fill_in("1-Across: PEAR\n2-Down: ROCKS")

    assert (game.solved, game.grid()) == (set(), "_ _ _ _\n# # # _\n# # # _\n# # # _")
    assert outcome.message == "2-Down has 4 letters, not 5. Nothing was written."


def test_right_letters_stay_and_wrong_ones_are_rubbed_out() -> None:
    game = CrosswordGame(BOARD)

    game.fill_in("1-Across: BEAR")

    assert game.grid() == "_ E A R\n# # # _\n# # # _\n# # # _"
    assert [game.pattern(entry) for entry in game.unsolved()] == ["_ E A R", "R _ _ _"]


def test_solved_crossword_takes_no_turn() -> None:
    game = CrosswordGame(BOARD)
    game.fill_in("1-Across: PEAR\n2-Down: ROCK")

    with pytest.raises(ValueError, match="solved"):
        game.fill_in("1-Across: PEAR")


async def test_words_inside_the_thinking_are_not_written() -> None:
    crossword = Crossword(CrosswordGame(BOARD), max_turns=3, thinking_active=True)

    first = await crossword.reply(Turn("<think>\n1-Across: PEAR\n", 0, ()))
    second = await crossword.reply(Turn("<think>1-Across: BEAR</think>\n1-Across: PEAR", 1, ()))

    assert (first.reward, second.reward) == pytest.approx((INVALID, 4 / 7))
    assert "Turns left: 1" in second.chat_messages()[0]["content"]


async def test_board_is_shown_in_a_fence_at_every_turn() -> None:
    game = CrosswordGame(BOARD)
    crossword = Crossword(game, max_turns=3, thinking_active=False)

    opening = str(crossword.opening()[-1]["content"])
    [later] = (await crossword.reply(Turn("nothing", 0, ()))).chat_messages()

    for text in (opening, str(later["content"])):
        assert f"```\n{game.grid()}\n```" in text


def test_opening_shows_clues_but_no_letter() -> None:
    opening = Crossword(CrosswordGame(BOARD), max_turns=3, thinking_active=False).opening()

    [message] = opening
    assert "1-Across (row 1, column 1, 4 letters): fruit | _ _ _ _" in message["content"]
    assert not re.search("pear|rock", message["content"], re.IGNORECASE)


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
async def test_oracle_scores_highest_and_garbage_lowest(difficulty: str) -> None:
    for seed in range(10):
        board = board_of(difficulty, None, seed)  # type: ignore[arg-type]
        lines = [f"{entry.name}: {entry.word}" for entry in board.entries]
        turns = ["\n".join(lines), lines[0], "qxz ]] {{"]
        players: list[Player] = [lambda _, text=turn: text for turn in turns]  # type: ignore[misc]
        games = [
            Crossword(CrosswordGame(board), max_turns=6, thinking_active=False) for _ in players
        ]
        scores = [
            sum(await play_game(game, player, max_turns=6))
            for game, player in zip(games, players, strict=True)
        ]

        assert scores[0] == pytest.approx(1 + WIN)
        assert scores[0] > scores[1] > scores[2]
        assert scores[2] == pytest.approx(6 * INVALID + UNSOLVED)
        assert [game.is_won for game in games] == [True, False, False]


async def test_stopping_early_is_worth_as_much_as_nonsense() -> None:
    crossword = Crossword(CrosswordGame(BOARD), max_turns=3, thinking_active=False)
    nonsense = sum(await play_game(crossword, lambda _: "qxz", max_turns=3))

    stopped = Crossword(CrosswordGame(BOARD), max_turns=3, thinking_active=False)
    at_once = stopped.unfinished_reward
    first = await stopped.reply(Turn("1-Across: XXXX", 0, ()))

    assert at_once == pytest.approx(nonsense)
    assert first.reward + stopped.unfinished_reward == pytest.approx(
        -0.4 / 7 + UNSOLVED + 2 * INVALID
    )


def test_environment_passes_the_check() -> None:
    report = check_environment(CrosswordsEnv)

    assert report.passed, report.text

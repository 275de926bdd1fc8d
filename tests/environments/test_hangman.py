from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import ChatMessage, Turn
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, check_group
from atroposlib.tasks.games import NUM_TRAINING_SEEDS, evaluation_seeds, words_at
from environments.game_environments.hangman.hangman_env import (
    INVALID,
    LEVELS,
    LOSS,
    WIN,
    WRONG,
    Hangman,
    HangmanGame,
    HangmanOnlineEnv,
    hidden_word,
)
from tests.environments.game_players import Player, play_game
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow


def play_guesses(word: str, guesses: list[str | None], *, lives: int = 6) -> list[float]:
    game = HangmanGame(word, lives=lives)
    return [game.guess(guess).reward for guess in guesses]


@pytest.mark.parametrize(
    ("guesses", "rewards"),
    [
        (["l"], [2 / 5]),
        (["L"], [2 / 5]),
        (["m", "a", "l"], [1 / 5, 2 / 5, 2 / 5 + WIN]),
        (["llama"], [1 + WIN]),
        (["a", "LLAMA"], [2 / 5, 3 / 5 + WIN]),
        (["z"], [WRONG]),
        (["panda"], [WRONG]),
        (["l", "l"], [2 / 5, INVALID]),
        (["z", "Z"], [WRONG, INVALID]),
        (["panda", "panda"], [WRONG, INVALID]),
        (["la"], [INVALID]),
        (["llamas"], [INVALID]),
        ([None], [INVALID]),
        ([""], [INVALID]),
        (["7"], [INVALID]),
        (["a b"], [INVALID]),
        (["é"], [INVALID]),
        (["\uff4c"], [INVALID]),  # a full-width l
        (["\u017f"], [INVALID]),  # a long s, whose upper case is S
    ],
)
def test_guess_earns_what_it_reveals(guesses: list[str | None], rewards: list[float]) -> None:
    assert play_guesses("llama", guesses) == pytest.approx(rewards)


def test_kelvin_sign_is_no_k() -> None:
    assert play_guesses("kite", ["\u212a"]) == [INVALID]


@pytest.mark.parametrize("guesses", [["llama"], ["l", "a", "m"], ["a", "llama"], ["m", "l", "a"]])
def test_every_flawless_game_is_worth_the_same(guesses: list[str | None]) -> None:
    assert sum(play_guesses("llama", guesses)) == pytest.approx(1 + WIN)


def test_last_life_ends_the_game() -> None:
    game = HangmanGame("llama", lives=2)

    rewards = [game.guess("z").reward, game.guess(None).reward]

    assert rewards == pytest.approx([WRONG, INVALID + LOSS])
    assert (game.is_over, game.is_won) == (True, False)
    with pytest.raises(ValueError, match="over"):
        game.guess("l")


def test_giving_up_costs_as_much_as_nonsense() -> None:
    game = HangmanGame("llama", lives=3)
    given_up = game.forfeit

    assert sum(play_guesses("llama", [None, None, None], lives=3)) == pytest.approx(given_up)
    game.guess("z")
    assert game.forfeit == pytest.approx(2 * INVALID + LOSS)


def test_shown_word_hides_what_was_not_guessed() -> None:
    game = HangmanGame("llama", lives=2)
    game.guess("a")

    assert game.shown == "_ _ a _ a"
    game.guess("llama")
    assert game.shown == "l l a m a"


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_words_of_a_level_have_its_length(difficulty: str) -> None:
    level = LEVELS[difficulty]  # type: ignore[index]
    found = {hidden_word(words_at(None), level, seed=seed) for seed in range(300)}

    assert {len(word) for word in found} <= set(range(level.min_letters, level.max_letters + 1))
    assert len(found) > 30


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_evaluations_hide_words_that_no_training_game_hides(difficulty: str) -> None:
    level = LEVELS[difficulty]  # type: ignore[index]

    def words_of(seeds: range, share: float) -> set[str]:
        return {
            hidden_word(words_at(None), level, seed=seed, held_out_share=share) for seed in seeds
        }

    trained, evaluated = words_of(range(5_000), 0.2), words_of(evaluation_seeds(1_000), 0.2)
    assert not trained & evaluated
    assert 0.1 < len(evaluated) / len(trained | evaluated) < 0.3
    assert words_of(evaluation_seeds(1_000), 0.0) & trained


def test_list_of_one_word_serves_training_and_evaluation() -> None:
    for seed in (0, NUM_TRAINING_SEEDS):
        word = hidden_word({"ant": "insect"}, LEVELS["easy"], seed=seed, held_out_share=0.2)
        assert word == "ant"


def test_word_list_without_fitting_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 to 12 letters"):
        hidden_word({"ant": "insect"}, LEVELS["hard"], seed=0)


def turn(text: str) -> Turn:
    return Turn(text, 0, ())


@pytest.mark.parametrize(
    "text",
    [
        "l",
        "<guess>l",
        "<think><guess>l</guess>",
        "<think><guess>l</guess></think>",
        "<guess>l</guess> or <guess>a</guess>",
        "<guess></guess>",
    ],
)
async def test_turn_without_one_guess_outside_the_thinking_costs_a_life(text: str) -> None:
    game = Hangman(HangmanGame("llama", lives=6), clue="", thinking_active=True)

    reply = await game.reply(turn(text))

    assert (reply.reward, reply.is_done, game.game.lives) == (INVALID, False, 5)


async def test_guess_behind_the_thinking_counts() -> None:
    game = Hangman(HangmanGame("llama", lives=6), clue="woolly animal", thinking_active=True)

    opening = game.opening()
    reply = await game.reply(turn("<think>is it <guess>z</guess>?</think>\n<guess> L </guess>"))

    assert [message["role"] for message in opening] == ["system", "user"]
    assert "woolly animal" in opening[1]["content"]
    assert "llama" not in opening[1]["content"]
    assert reply.reward == pytest.approx(2 / 5)
    assert "l l _ _ _" in reply.chat_messages()[0]["content"]


def frequent_letters(chat: Sequence[ChatMessage]) -> str:
    by_frequency = "etaoinsrhld" + "cumfpgwybvkxjqz"
    return f"<guess>{by_frequency[len(chat) // 2 - 1]}</guess>"


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
async def test_oracle_scores_highest_and_garbage_lowest(difficulty: str) -> None:
    level = LEVELS[difficulty]  # type: ignore[index]
    for seed in range(20):
        word = hidden_word(words_at(None), level, seed=seed)
        letters = iter(dict.fromkeys(word))
        players: list[Player] = [
            lambda _, rest=letters: f"<think>hm</think><guess>{next(rest)}</guess>",  # type: ignore[misc]
            frequent_letters,
            lambda _: "qxz ]] {{",
        ]
        games = [
            Hangman(HangmanGame(word, lives=level.lives), clue="", thinking_active=True)
            for _ in players
        ]
        scores = [
            sum(await play_game(game, player)) for game, player in zip(games, players, strict=True)
        ]

        assert scores[0] == pytest.approx(1 + WIN)
        assert scores[0] >= scores[1] > scores[2]
        assert scores[2] == pytest.approx(level.lives * INVALID + LOSS)
        assert (games[0].is_won, games[2].is_won) == (True, False)


async def test_process_writes_groups_with_an_advantage_per_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    starts = itertools.cycle(["<guess>q</guess>", "hm"])

    def player(prompt: str) -> str:
        num_turns = prompt.count("Word:") - 1
        if num_turns <= 0:
            return next(starts) if num_turns == 0 else "ok"
        return f"<guess>{'qxzj'[num_turns]}</guess>" if "<guess>q</guess>" in prompt else "hm"

    async with ScriptedEngine(player) as engine:
        env = make_env(
            HangmanOnlineEnv, engine, monkeypatch, data_path_to_save_groups=str(out), max_turns=4
        )
        await run_process(env, num_groups=1, group_size=2)

    [group] = read_groups(out)
    check_group(group)
    lives_left = LEVELS["easy"].lives - 4
    forfeit = lives_left * INVALID + LOSS
    assert sorted(group["scores"]) == pytest.approx([4 * INVALID + forfeit, 4 * WRONG + forfeit])
    for advantages, masks in zip(group["advantages"], group["masks"], strict=True):
        values = {a for a, mask in zip(advantages, masks, strict=True) if mask != IGNORE_INDEX}
        assert len(values) == 4


async def test_position_and_win_rate_are_kept_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_env(HangmanOnlineEnv, engine, monkeypatch, seed=5, eval_episodes=3)
        items = [await env.get_next_item() for _ in range(2)]
        won, lost = (
            Hangman(HangmanGame("ant", lives=1), clue="", thinking_active=True) for _ in range(2)
        )
        await won.reply(turn("<guess>ant</guess>"))
        rollouts = [Rollout(rewards=[1.0], conversation=game) for game in (won, lost)]

        assert items == [{"seed": 5}, {"seed": 6}]
        assert env.iter == 2
        assert env.metrics_of(rollouts, "eval")["eval/win_rate"] == 0.5
        assert env.metrics_of([], "train") == {}
        assert [item["seed"] for item in env.eval_items()] == [1_000_001, 1_000_002, 1_000_003]


def test_environment_passes_the_check() -> None:
    report = check_environment(HangmanOnlineEnv)

    assert report.passed, report.text

"""Hangman's easy level, clue shown; the player goes through the alphabet and jumps at times.

A fifth of the shipped words is kept for measuring and neither shown nor trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase

from atroposlib.tasks.games import words_at
from benchmarks.environment_training_parts.lesson import Lesson, Messages, WarmUp, played_out
from environments.game_environments.hangman.hangman_env import (
    LEVELS,
    Hangman,
    HangmanEnvConfig,
    HangmanGame,
)
from example_trainer.demo.settings import DemoSettings, TinyModelShape
from example_trainer.launch.report import RewardMetric

__all__ = ["guess_letter", "hangman", "split_words"]

DOOR = Path("environments/game_environments/hangman/hangman_env.py")
LEVEL = LEVELS["easy"]
HELD_OUT_SHARE = 0.2
JUMPS = 0.4
"""Share of the guesses that are any new letter, not the next one. A model that guessed new letters
at random would have to look at all it has guessed, which so small a one does not come upon; what
follows a letter it learns in a minute, and the jumps show it other ways to go on."""
DISCOUNT = 0.3
"""A guess is credited with what it reveals and little of what follows: with all of that, early
turns, which have more losses to come, look worse than late ones whatever was guessed."""
NUM_GAMES = 400
MAX_TOKENS = 512


def hangman(folder: Path, seed: int) -> Lesson:
    """Return the lesson; the two lists of words are written to `folder`."""
    trained, held_out = split_words(words_at(None), random.Random(seed))
    paths = {"trained": folder / "trained_words.tsv", "held_out": folder / "held_out_words.tsv"}
    for path, words in zip(paths.values(), (trained, held_out), strict=True):
        path.write_text("".join(f"{w}\t{clue}\n" for w, clue in words.items()), encoding="utf-8")

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for word in rng.choices(sorted(trained), k=count):
            game = HangmanGame(word, lives=LEVEL.lives)
            conversation = Hangman(game, clue=trained[word], thinking_active=False)
            guess = partial(guess_letter, game.guesses, rng)
            yield played_out(conversation, guess, max_turns=HangmanEnvConfig().max_turns)

    return Lesson(
        settings=DemoSettings(
            seed=seed,
            steps=120,
            lr=5e-4,
            groups_per_step=8,
            group_size=8,
            max_tokens=MAX_TOKENS,
            shape=TinyModelShape(max_length=MAX_TOKENS, max_vocabulary=1024),
            task=None,
            environment_door=DOOR,
            environment_sections={
                "env": {
                    "seed": seed,
                    "reward_discount": DISCOUNT,
                    "held_out_share": 0.0,  # the two lists of words are apart
                    "thinking_active": False,
                    "words_path": str(paths["trained"]),
                    "max_turn_tokens": 12,
                }
            },
        ),
        evaluation={
            "eval_temperature": 1.0,
            "eval_episodes": NUM_GAMES,
            "reward_discount": 1.0,
            "words_path": str(paths["held_out"]),
        },
        warm_up=WarmUp(steps=160, num_conversations=4_000, batch_size=32),
        conversations=conversations,
        measure=f"mean return (2 is perfect) of {NUM_GAMES} games with words never trained on",
        value=float,
        reward=RewardMetric(
            key="train/mean_return",
            label="mean discounted return of a game",
            summary="{:+.2f} is the mean discounted return of a game",
            limits=None,
        ),
    )


def split_words(
    words: Mapping[str, str], rng: random.Random
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the words that are trained on and those that are held out, with their clues."""
    fitting = sorted(w for w in words if LEVEL.min_letters <= len(w) <= LEVEL.max_letters)
    held_out = set(rng.sample(fitting, round(HELD_OUT_SHARE * len(fitting))))
    return (
        {word: words[word] for word in fitting if word not in held_out},
        {word: words[word] for word in fitting if word in held_out},
    )


def guess_letter(guesses: Sequence[str], rng: random.Random) -> str:
    """Return a letter not guessed before: the next of the alphabet, or at times any."""
    start = ascii_lowercase.index(guesses[-1]) if guesses else 0
    letters = [x for x in ascii_lowercase[start:] + ascii_lowercase[:start] if x not in guesses]
    jumps = not guesses or rng.random() < JUMPS
    return f"<guess>{rng.choice(letters) if jumps else letters[0]}</guess>"

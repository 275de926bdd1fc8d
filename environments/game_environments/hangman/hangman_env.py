"""Hangman: a hidden word, found by guessing letters.

    seed -> word -> [guess -> letters revealed, or a life lost] x N -> found, or no life left

The letters of a word are worth 1 together, finding it is worth 1 more; `game.py` has the rules and
`README.md` the rewards. Words come from the shipped list, nothing is downloaded:

    python environments/game_environments/hangman/hangman_env.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from environments.game_environments.hangman.game import LEVELS, HangmanGame, hidden_word
from environments.shared.card import EnvironmentCard
from environments.shared.games import THINK_FIRST, Difficulty, Game, GameEnv, GameEnvConfig
from environments.shared.marked_answers import only_tagged
from environments.shared.word_clues import words_at

__all__ = ["Hangman", "HangmanEnvConfig", "HangmanOnlineEnv"]

CARD = EnvironmentCard(
    task="find a hidden word by its letters",
    turns="up to 20",
    reward="per turn, the share of letters revealed; wrong -0.1, invalid -0.2, found +1, lost -0.5",
    data="793 words shipped",
    command="process --env.total_steps 4",
)

RULES = """We play Hangman. I have hidden an English word of {num_letters} letters.{clue}
Each turn, guess one letter as <guess>e</guess>, or the whole word as <guess>{example}</guess>.
A wrong guess costs a life. So does a turn without a guess, with several, or with a repeated one."""
EXAMPLE = "abcdefghijkl"
STATE = "Word: {shown}\nGuessed: {guesses}\nLives: {lives}"


class HangmanEnvConfig(GameEnvConfig):
    """Which words are hidden, and how the game is played."""

    difficulty: Difficulty = Field(
        "easy",
        description="easy: 3 to 5 letters, 8 lives and a clue; medium: 4 to 7 letters, 7 lives; "
        "hard: 6 to 12 letters, 5 lives.",
    )
    words_path: str | None = Field(
        None, description="File with a word, a tab and a clue per line; None is the shipped list."
    )
    held_out_share: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of the words that only evaluations hide; with 0 they hide any.",
    )
    thinking_active: bool = Field(True, description="Ask the policy to think before each turn.")
    max_turns: int = Field(20, ge=1, description="Guesses in one game.")


class Hangman(Game):
    """One game as a conversation.

    Args:
        game: the rules and the state.
        clue: shown at the start; empty for none.
        thinking_active: ask for thinking before each guess.
    """

    def __init__(self, game: HangmanGame, *, clue: str, thinking_active: bool) -> None:
        self.game = game
        self.clue = clue
        self.unfinished_reward = game.forfeit
        self.thinking_active = thinking_active

    def opening(self) -> list[ChatMessage]:
        """Tell the rules and show the hidden word."""
        num_letters = len(self.game.word)
        rules = RULES.format(
            num_letters=num_letters,
            clue=f" Clue: {self.clue}." if self.clue else "",
            example=EXAMPLE[:num_letters],
        )
        thinking = [{"role": "system", "content": THINK_FIRST}] if self.thinking_active else []
        return [*thinking, {"role": "user", "content": f"{rules}\n\n{self._state()}"}]

    async def reply(self, turn: Turn) -> Reply:
        """Take the guess outside of the thinking."""
        outcome = self.game.guess(only_tagged(turn.answer, "guess"))
        self.is_won = self.game.is_won
        self.unfinished_reward = self.game.forfeit
        if self.game.is_over:
            return Reply(reward=outcome.reward, is_done=True)
        return Reply(f"{outcome.message}\n{self._state()}", reward=outcome.reward)

    def _state(self) -> str:
        guesses = ", ".join(self.game.guesses) or "nothing"
        return STATE.format(shown=self.game.shown, guesses=guesses, lives=self.game.lives)


class HangmanOnlineEnv(GameEnv):
    """Games of Hangman; an item is the seed of its word."""

    name = "hangman"
    env_config_cls = HangmanEnvConfig
    config: HangmanEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "max_turn_tokens": 1024,
    }

    async def setup(self) -> None:
        """Read the words."""
        self.words = await asyncio.to_thread(words_at, self.config.words_path)
        self.level = LEVELS[self.config.difficulty]

    def start_conversation(self, item: dict[str, int]) -> Hangman:
        """Begin the game of a seed."""
        word = self._word(item)
        return Hangman(
            HangmanGame(word, lives=self.level.lives),
            clue=self.words[word] if self.level.shows_clue else "",
            thinking_active=self.config.thinking_active,
        )

    def check_gold_answer(self, item: dict[str, int]) -> list[str]:
        """Return a game without a wrong guess; asked by `check`."""
        word = self._word(item)
        return [f"<guess>{letter}</guess>" for letter in dict.fromkeys(word)]

    def _word(self, item: dict[str, int]) -> str:
        share = self.config.held_out_share
        return hidden_word(self.words, self.level, seed=item["seed"], held_out_share=share)


if __name__ == "__main__":
    HangmanOnlineEnv.cli()

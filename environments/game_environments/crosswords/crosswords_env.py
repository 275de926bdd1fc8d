"""Crosswords: clues to words that cross, filled in over a few turns.

    seed -> board -> ["1-Across: WORD" -> letters kept or rubbed out] x N -> solved, or no turn

The letters of a board are worth 1 together, solving it is worth 1 more; `game.py` has the rules,
`board.py` lays the words, `README.md` tells the rewards. Nothing is downloaded:

    python environments/game_environments/crosswords/crosswords_env.py process \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from environments.game_environments.crosswords.board import LEVELS, Board, make_board
from environments.game_environments.crosswords.game import INVALID, UNSOLVED, CrosswordGame
from environments.shared.card import EnvironmentCard
from environments.shared.games import THINK_FIRST, Difficulty, Game, GameEnv, GameEnvConfig
from environments.shared.word_clues import words_at

__all__ = ["Crossword", "CrosswordsEnv", "CrosswordsEnvConfig", "board_of"]

CARD = EnvironmentCard(
    task="solve a crossword",
    turns="up to 6",
    reward="per turn, the share of letters found; wrong ones a tenth off, invalid -0.2, solved +1",
    data="793 words with clues shipped",
    command="process --env.total_steps 4",
)

RULES = """Solve this crossword. `_` is a letter to find, `#` belongs to no word.
Each turn, write one or more words, each on a line of its own: {example}: WORD
Right letters stay, wrong ones are rubbed out and cost points.
If a line names no open word of the list or has not as many letters, the turn is lost."""
STATE = "```\n{grid}\n```\n\n{entries}\n\nTurns left: {turns}"
ENTRY = "{name} (row {row}, column {column}, {length} letters): {clue} | {pattern}"


class CrosswordsEnvConfig(GameEnvConfig):
    """Which boards are made, and how the game is played."""

    difficulty: Difficulty = Field(
        "easy",
        description="easy: 3 words on 7 rows and columns; medium: 6 on 9; hard: 10 on 12.",
    )
    words_path: str | None = Field(
        None, description="File with a word, a tab and a clue per line; None is the shipped list."
    )
    thinking_active: bool = Field(True, description="Ask the policy to think before each turn.")
    max_turns: int = Field(6, ge=1, description="Turns for one board.")


@lru_cache(maxsize=256)
def board_of(difficulty: Difficulty, words_path: str | None, seed: int) -> Board:
    """Return the board of a seed; kept, since a group plays the same one."""
    return make_board(words_at(words_path), LEVELS[difficulty], seed=seed)


class Crossword(Game):
    """One crossword as a conversation.

    Args:
        game: the rules and the state.
        max_turns: turns there are.
        thinking_active: ask for thinking before each turn.
    """

    def __init__(self, game: CrosswordGame, *, max_turns: int, thinking_active: bool) -> None:
        self.game = game
        self.max_turns = max_turns
        self.unfinished_reward = UNSOLVED + max_turns * INVALID
        self.thinking_active = thinking_active

    def opening(self) -> list[ChatMessage]:
        """Tell the rules, the clues and the empty board."""
        rules = RULES.format(example=self.game.board.entries[0].name)
        thinking = [{"role": "system", "content": THINK_FIRST}] if self.thinking_active else []
        return [*thinking, {"role": "user", "content": f"{rules}\n\n{self._state(self.max_turns)}"}]

    async def reply(self, turn: Turn) -> Reply:
        """Write the words that stand outside of the thinking."""
        outcome = self.game.fill_in(turn.answer)
        self.is_won = self.game.is_won
        if self.is_won:
            return Reply(reward=outcome.reward, is_done=True)
        turns_left = self.max_turns - turn.index - 1
        # To stop early is worth no more than to fill the other turns with nonsense.
        self.unfinished_reward = UNSOLVED + turns_left * INVALID
        state = self._state(turns_left)
        return Reply(f"{outcome.message}\n\n{state}", reward=outcome.reward)

    def _state(self, turns_left: int) -> str:
        entries = [
            ENTRY.format(
                name=entry.name,
                row=entry.start.row + 1,
                column=entry.start.column + 1,
                length=len(entry.word),
                clue=entry.clue,
                pattern=self.game.pattern(entry),
            )
            for entry in self.game.unsolved()
        ]
        return STATE.format(grid=self.game.grid(), entries="\n".join(entries), turns=turns_left)


class CrosswordsEnv(GameEnv):
    """Crosswords; an item is the seed of a board."""

    name = "crosswords"
    env_config_cls = CrosswordsEnvConfig
    config: CrosswordsEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 16384,
        "max_turn_tokens": 2048,
    }

    async def setup(self) -> None:
        """Read the words, and see that they make a board."""
        await asyncio.to_thread(self._board, {"seed": self.config.seed})

    def start_conversation(self, item: dict[str, int]) -> Crossword:
        """Begin the board of a seed."""
        return Crossword(
            CrosswordGame(self._board(item)),
            max_turns=self.config.max_turns,
            thinking_active=self.config.thinking_active,
        )

    def check_gold_answer(self, item: dict[str, int]) -> str:
        """Return the turn that solves the board; asked by `check`."""
        return "\n".join(f"{e.name}: {e.word.upper()}" for e in self._board(item).entries)

    def _board(self, item: dict[str, int]) -> Board:
        return board_of(self.config.difficulty, self.config.words_path, item["seed"])


if __name__ == "__main__":
    CrosswordsEnv.cli()

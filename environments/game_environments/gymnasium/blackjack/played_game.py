"""A game of blackjack that is played by replies: the table, and the chat about it."""

from __future__ import annotations

import logging

from environments.game_environments.gymnasium.blackjack.chat import describe, opening
from environments.game_environments.gymnasium.blackjack.config import BlackjackEnvConfig
from environments.game_environments.gymnasium.blackjack.figures import GameRecord
from environments.game_environments.gymnasium.blackjack.scoring import (
    ScoredReply,
    shorten_thinking,
)
from environments.game_environments.gymnasium.blackjack.table import Table
from environments.game_environments.gymnasium.blackjack.values import best_action

__all__ = ["PlayedGame"]

logger = logging.getLogger("environments.blackjack")


class PlayedGame:
    """One game.

    Args:
        config: names the game and its limits.
        seed: of the cards.

    Attributes:
        table: the cards.
        chat: what was said, a hand last while the game goes on.
    """

    def __init__(self, config: BlackjackEnvConfig, *, seed: int) -> None:
        self.config = config
        self.table = Table(config.env_name, seed=seed)
        self.chat = opening(self.table.hand, thinking_active=config.thinking_active)
        self.num_turns = 0
        self.num_best = 0

    @property
    def goes_on(self) -> bool:
        """Whether there is another decision."""
        return not self.table.is_over and self.num_turns < self.config.max_turns

    def play(self, text: str, scored: ScoredReply) -> None:
        """Play a reply on the table and in the chat."""
        table = self.table
        if self.config.debug_mode:
            logger.info("%s: %s, score %.3f", table.hand, scored.action, scored.score)
        self.num_turns += 1
        self.num_best += scored.action == best_action(table.hand, table.rules)
        table.play(scored.played)
        kept = shorten_thinking(text, max_chars=self.config.max_think_chars_history)
        self.chat.append({"role": "agent", "content": kept})
        if not table.is_over:
            self.chat.append({"role": "environment", "content": describe(table.hand)})

    def record(self) -> GameRecord:
        """Return what became of the game."""
        table = self.table
        return GameRecord(table.reward, self.num_turns, self.num_best, table.is_over, self.chat)

"""A game of gymnasium's blackjack, dealt from a seed."""

from __future__ import annotations

from typing import Any

from environments.game_environments.gymnasium.blackjack.values import Action, Hand, Rules
from environments.game_environments.gymnasium.package import load_gymnasium

__all__ = ["Table"]


class Table:
    """One game.

    Args:
        env_name: name of the game in gymnasium's registry.
        seed: of the cards.

    Attributes:
        hand: what the player sees.
        rules: of this game.
        is_over: whether the last card fell.
        reward: of the whole game so far; 0 until it is over.
    """

    def __init__(self, env_name: str, *, seed: int) -> None:
        self._env = load_gymnasium().make(env_name)
        observation, _ = self._env.reset(seed=seed)
        options = self._env.unwrapped
        self.rules = Rules(sab=bool(options.sab), natural=bool(options.natural))
        self.is_over = False
        self.reward = 0.0
        self.hand = _hand(observation, is_dealt=True)

    def play(self, action: Action) -> float:
        """Take an action; returns its reward.

        Raises:
            ValueError: the game is over.
        """
        if self.is_over:
            raise ValueError("the game is over; no action can be taken")
        observation, reward, terminated, truncated, _ = self._env.step(int(action == "hit"))
        self.hand = _hand(observation, is_dealt=False)
        self.is_over = bool(terminated or truncated)
        self.reward += float(reward)
        return float(reward)


def _hand(observation: Any, *, is_dealt: bool) -> Hand:
    total, dealer_card, usable_ace = (int(number) for number in observation)
    # Two cards make 21 only as an ace and a ten.
    return Hand(total, bool(usable_ace), dealer_card, is_natural=is_dealt and total == 21)

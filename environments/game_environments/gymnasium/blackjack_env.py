"""Blackjack with thinking, under the path it had in May 2025; see `blackjack/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.game_environments.gymnasium.blackjack.blackjack_env_thinking import (
        BlackjackEnv,
        BlackjackEnvConfig,
    )
else:
    with sibling_imports(__file__, "blackjack"):
        from blackjack_env_thinking import BlackjackEnv, BlackjackEnvConfig

__all__ = ["BlackjackEnv", "BlackjackEnvConfig"]

CARD = EnvironmentCard(
    task="blackjack with thinking, under an earlier path",
    turns="up to 5",
    reward="as `blackjack/blackjack_env_thinking.py`",
    data="made on the spot",
    needs="`pip install '.[examples]'`",
    command="process --env.total_steps 4",
)


if __name__ == "__main__":
    BlackjackEnv.cli()

"""Blackjack with thinking, under the path it had in May 2025; see `blackjack/`."""

from __future__ import annotations

from environments.game_environments.gymnasium.blackjack.blackjack_env_thinking import (
    BlackjackEnv,
    BlackjackEnvConfig,
)

__all__ = ["BlackjackEnv", "BlackjackEnvConfig"]


if __name__ == "__main__":
    BlackjackEnv.cli()

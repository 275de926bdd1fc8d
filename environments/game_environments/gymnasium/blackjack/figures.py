"""The figures of finished blackjack games. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["GameRecord", "evaluation_figures", "training_figures"]


class GameRecord(NamedTuple):
    """One game."""

    reward: float
    """1 won, 0 drawn or not finished, -1 lost."""
    num_turns: int
    num_best: int
    """Decisions that were valid and the best on average."""
    is_over: bool
    messages: list[Mapping[str, str]]


def training_figures(games: Sequence[GameRecord]) -> dict[str, float]:
    """Return the figures by their name without an area; none without games."""
    if not games:
        return {}
    return {
        "avg_episode_reward": statistics.fmean(game.reward for game in games),
        "avg_episode_steps": statistics.fmean(game.num_turns for game in games),
        "episode_win_rate": statistics.fmean(game.reward > 0 for game in games),
        "num_episodes": len(games),
    }


def evaluation_figures(games: Sequence[GameRecord]) -> dict[str, float]:
    """Return the figures of at least one game; rates are shares of the finished ones.

    `action_accuracy` is the share of decisions that were valid and the best on average.
    """
    num_turns = sum(game.num_turns for game in games)
    finished = [game for game in games if game.is_over]
    num_finished = max(1, len(finished))
    return {
        "eval/avg_total_reward": statistics.fmean(game.reward for game in games),
        "eval/avg_num_turns": num_turns / len(games),
        "eval/action_accuracy": sum(game.num_best for game in games) / max(1, num_turns),
        "eval/win_rate": sum(game.reward > 0 for game in finished) / num_finished,
        "eval/loss_rate": sum(game.reward < 0 for game in finished) / num_finished,
        "eval/draw_rate": sum(game.reward == 0 for game in finished) / num_finished,
        "eval/num_completed_episodes": len(finished),
    }

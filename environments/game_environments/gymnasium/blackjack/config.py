"""The settings of blackjack with thinking."""

from __future__ import annotations

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig

__all__ = ["BlackjackEnvConfig"]


class BlackjackEnvConfig(BaseEnvConfig):
    """Which game is played, and how decisions are sampled and scored."""

    env_name: str = Field("Blackjack-v1", description="Name of the game in gymnasium.")
    temperature: float = Field(
        0.7, ge=0, description="Sampling temperature, of evaluations as well."
    )
    top_p: float = Field(0.9, gt=0, le=1, description="Share of the likeliest tokens sampled from.")
    max_turns: int = Field(5, ge=1, description="Decisions in one game.")
    wandb_name: str | None = Field("blackjack", description="Name to register under.")
    thinking_active: bool = Field(True, description="Ask the policy to think, and reward it.")
    eval_episodes: int = Field(100, ge=0, description="Games of one evaluation.")
    max_think_chars_history: int = Field(
        3000, ge=0, description="Characters of thinking that stay in the chat of later decisions."
    )
    max_trajectory_tokens: int = Field(
        24576, ge=1, description="Most tokens of prompt and reply; old decisions leave the prompt."
    )
    debug_mode: bool = Field(False, description="Log every decision.")
    group_size: int = Field(16, ge=1, description="Replies per decision.")
    tiebreak_token_factor: float = Field(
        0.01, ge=0, description="What the shortest reply earns more than the longest."
    )

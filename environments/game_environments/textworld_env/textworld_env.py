"""TextWorld: text adventures that are made on the spot; the reward is the score of the game.

    challenge, settings, seed -> game -> description -> command -> feedback, score -> ...

It is the adapter of `docs/adapters/textworld.md` with the settings of the earlier environment:

    python environments/game_environments/textworld_env/textworld_env.py process --help
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig
from atroposlib.adapters.textworld import DEFAULT_SETTINGS
from atroposlib.envs.base import APIServerConfig
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import default_configs

__all__ = ["TextWorldEnv", "TextWorldEnvConfig"]

CARD = EnvironmentCard(
    task="text adventures: collect, cook, unlock, find",
    turns="up to 300",
    reward="the change of the game's score",
    data="made on the spot",
    needs="`pip install '.[textworld]'`",
    command="process --env.challenge_names tw-simple --env.total_steps 4",
)

MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"


class TextWorldEnvConfig(AdapterEnvConfig):
    """Settings of the games; they set those of the adapter."""

    env_name: str = Field("TextWorld", description="Name in metrics of the earlier environment.")
    challenge_names: list[str] = Field(
        default_factory=lambda: list(DEFAULT_SETTINGS),
        min_length=1,
        description="Challenges, one of which is drawn for each game.",
    )
    randomize_challenge_settings: bool = Field(
        True, description="Whether the settings of a challenge are drawn for each game."
    )
    max_steps: int = Field(300, ge=1, le=10_000, description="Commands in one game.")
    group_size: int = Field(16, ge=1, description="Trajectories of one game.")
    max_num_workers: int = Field(
        16, ge=-1, description="Maximum number of groups at once; -1 as in other environments."
    )
    total_steps: int = Field(
        500, ge=-1, description="Trainer steps after which the run ends; -1: the trainer's number."
    )
    max_token_length: int = Field(32768, ge=1, description="Token limit of one game.")

    @model_validator(mode="after")
    def _set_adapter(self) -> TextWorldEnvConfig:
        self.adapter = f"textworld:{'+'.join(self.challenge_names)}"
        # The arguments may be those of `config_init`, which a flag is to change.
        chosen = {"randomize": self.randomize_challenge_settings}
        self.adapter_args = {"normalize": False, **self.adapter_args, **chosen}
        self.max_turns = self.max_steps
        return self


class TextWorldEnv(AdapterEnv):
    """Games of TextWorld; an item is a game."""

    name = "textworld_minimal"
    env_config_cls = TextWorldEnvConfig
    config: TextWorldEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "challenge_names": ["tw-treasure_hunter"],
        "randomize_challenge_settings": False,
        "adapter_args": {"settings": {"level": 1}},
        "max_steps": 6,
        "num_eval_items": 2,
    }

    @classmethod
    def config_init(cls) -> tuple[TextWorldEnvConfig, APIServerConfig]:
        return default_configs(
            TextWorldEnvConfig,
            MODEL,
            max_turn_tokens=50,
            temperature=0.7,
            wandb_name="textworld",
        )


if __name__ == "__main__":
    TextWorldEnv.cli()

"""Conversational style of word problems: `conversational_style_dpo_env.py` with GSM8K.

    problem -> patient tutor -> chosen answer   (+1) -+
            -> bare result   -> rejected answer (-1) -+-> pair, without the system prompts

Problems come from GSM8K on the hub or from local files:

    python environments/community/conversational_style_dpo/gsm8k_conversational_style_dpo_env.py \
        process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.community.conversational_style_dpo import (
        conversational_style_dpo_env as styles,
    )
else:
    with sibling_imports(__file__):
        import conversational_style_dpo_env as styles

__all__ = ["GSM8KConversationalStyleConfig", "GSM8KConversationalStyleDPOEnv"]

CARD = EnvironmentCard(
    task="pairs of an engaging and a blunt answer to a word problem",
    turns="1",
    reward="+1 for the engaging answer, -1 for the blunt one",
    data="GSM8K from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).parents[2] / "data" / "gsm8k_sample"
ENGAGING = (
    "You are a patient tutor. Solve the problem together with the student: name the idea, go "
    "through the steps in a friendly tone, state the result, and encourage them to try the next "
    "one."
)
BLUNT = "State the result of the problem and nothing else: no steps, no explanation, no courtesy."


class GSM8KConversationalStyleConfig(styles.StyleSettings, HubItemsConfig):
    """Settings of the problems and of the pairs."""


class GSM8KConversationalStyleDPOEnv(styles.ConversationalStyleDPOEnv):
    """Word problems answered in two styles; an item is a row."""

    name = "gsm8k_conversational_style_dpo"
    hub_dataset = "gsm8k"
    hub_subset = "main"
    hub_test_split = "test"
    env_config_cls = GSM8KConversationalStyleConfig  # type: ignore[assignment]
    columns = ("question",)
    prompt_column = "question"
    engaging = ENGAGING
    blunt = BLUNT
    default_settings: ClassVar[dict[str, Any]] = {
        "max_token_length": 2048,
        "wandb_name": "gsm8k_conversational_style_dpo",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def _read(self) -> tuple[Any, Any]:
        return DatasetItems._read(self)


if __name__ == "__main__":
    GSM8KConversationalStyleDPOEnv.cli()

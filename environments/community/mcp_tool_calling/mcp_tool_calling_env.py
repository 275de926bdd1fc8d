"""Single tool calling, the environment of `environments/tool_calling_server.py`, for a small model.

Data, prompt and score are those of that file, which this one extends; only the model differs:

    python environments/community/mcp_tool_calling/mcp_tool_calling_env.py process \
        --env.dataset_path environments/data/tool_calling_sample --env.total_steps 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atroposlib.envs.base import APIServerConfig
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments import tool_calling_server
else:
    with sibling_imports(__file__, "../.."):
        import tool_calling_server

__all__ = ["SingleToolCallingEnv"]

CARD = EnvironmentCard(
    task="write the tool calls that a request needs, for a small model",
    turns="1",
    reward="+1 the expected calls, -1 anything else; by length when all are right",
    data="XLAM-Atropos from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/tool_calling_sample --env.total_steps 4",
)

MODEL = "Qwen/Qwen3-1.7B"


class SingleToolCallingEnv(tool_calling_server.SingleToolCallingEnv):
    """Requests and the calls that they need."""

    @classmethod
    def config_init(
        cls,
    ) -> tuple[tool_calling_server.SingleToolCallingEnvConfig, APIServerConfig]:
        config, server = super().config_init()
        return (
            config.model_copy(update={"tokenizer_name": MODEL}),
            server.model_copy(update={"model_name": MODEL}),
        )


if __name__ == "__main__":
    SingleToolCallingEnv.cli()

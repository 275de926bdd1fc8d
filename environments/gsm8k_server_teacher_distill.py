"""GSM8K whose groups carry a teacher's log-probabilities of every token.

    problem -> G completions -> scores -> admitted group -> teacher reads it -> distill_* fields

Problems, prompts and scores are those of `gsm8k_server.py`. The teacher must have the tokenizer of
the policy, and is used by `serve` only:

    python environments/gsm8k_server_teacher_distill.py serve --teacher.model_name NAME \
        --teacher.base_url http://localhost:9003/v1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.gsm8k_server import MODEL, GSM8kEnv, GSM8kEnvConfig
else:
    with sibling_imports(__file__):
        from gsm8k_server import MODEL, GSM8kEnv, GSM8kEnvConfig

__all__ = ["GSM8kTeacherDistillConfig", "GSM8kTeacherDistillEnv"]

CARD = EnvironmentCard(
    task="grade-school word problems, distilled from a teacher",
    turns="1",
    reward="+1 right, -1 wrong; by length when all are right",
    data="GSM8K from the hub, or `--env.dataset_path`",
    needs="a second server, for the teacher",
    command="process --env.teacher_enabled false --env.dataset_path environments/data/gsm8k_sample "
    "--env.total_steps 4",
)


class GSM8kTeacherDistillConfig(GSM8kEnvConfig, TeacherDistillationConfig):
    """Settings of the problems and of the teacher."""

    teacher_enabled: bool = Field(
        default=True,
        description="Whether to send a teacher's log-probabilities with every group.",
    )
    teacher_top_k: int = Field(
        default=4,
        ge=-1,
        description="Number of the teacher's most likely tokens per position; 0 takes only the "
        "token of the trajectory, -1 disables requests to the teacher.",
    )


class GSM8kTeacherDistillEnv(GSM8kEnv, TeacherDistillationEnv):
    """The same problems; a teacher reads the completions."""

    name = "gsm8k_teacher_distill"
    env_config_cls = GSM8kTeacherDistillConfig
    config: GSM8kTeacherDistillConfig
    check_settings: ClassVar[dict[str, Any]] = {**GSM8kEnv.check_settings, "teacher_enabled": False}

    @classmethod
    def config_init(cls) -> tuple[GSM8kTeacherDistillConfig, APIServerConfig]:
        config, server = super().config_init()
        settings = {**config.model_dump(exclude_unset=True), "wandb_name": cls.name}
        return GSM8kTeacherDistillConfig(**settings), server

    @classmethod
    def teacher_config_init(cls) -> APIServerConfig:
        """Return a placeholder for a teacher on port 9003; `serve` sets the model name."""
        return APIServerConfig(
            model_name="mock-teacher",
            base_url="http://localhost:9003/v1",
            api_key="",
            server_type="vllm",
            tokenizer_name=MODEL,
            timeout=1200,
        )


if __name__ == "__main__":
    GSM8kTeacherDistillEnv.cli()

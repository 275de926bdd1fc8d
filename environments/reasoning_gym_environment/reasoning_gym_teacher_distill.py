"""Reasoning gym whose groups carry a teacher's log-probabilities of every token.

    task and question -> G completions -> scores -> group -> teacher reads it -> distill_* fields

Items, prompts and scores are those of `reasoning_gym_environment.py`. The teacher must have the
tokenizer of the policy and a context of `max_token_length` + 1 tokens, and is used by `serve` only:

    python environments/reasoning_gym_environment/reasoning_gym_teacher_distill.py serve \
        --teacher.model_name NAME --teacher.base_url http://localhost:9003/v1
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
from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.reasoning_gym_environment.reasoning_gym_environment import ReasoningGymEnv
else:
    with sibling_imports(__file__):
        from reasoning_gym_environment import ReasoningGymEnv

__all__ = ["ReasoningGymTeacherDistillConfig", "ReasoningGymTeacherDistillEnv"]

CARD = EnvironmentCard(
    task="about a hundred procedural tasks, distilled from a teacher",
    turns="1",
    reward="0 to 1 from the task's own scorer",
    data="made on the spot",
    needs="`pip install '.[examples]'`, a second server for the teacher",
    command="process --env.teacher_enabled false --env.task_names chain_sum --env.total_steps 4",
)


class ReasoningGymTeacherDistillConfig(ReasoningGymEnvConfig, TeacherDistillationConfig):
    """Settings of the tasks and of the teacher."""

    teacher_enabled: bool = Field(
        default=True,
        description="Whether to send a teacher's log-probabilities with every group.",
    )
    teacher_top_k: int = Field(
        default=8,
        ge=-1,
        description="Number of the teacher's most likely tokens per position; 0 takes only the "
        "token of the trajectory, -1 disables requests to the teacher.",
    )
    ensure_scores_are_not_same: bool = Field(
        default=False,
        description="Whether to drop groups with equal scores; a teacher scores their tokens too.",
    )


class ReasoningGymTeacherDistillEnv(ReasoningGymEnv, TeacherDistillationEnv):
    """The same tasks; a teacher reads the completions."""

    name = "reasoning_gym_teacher_distill"
    env_config_cls = ReasoningGymTeacherDistillConfig
    config: ReasoningGymTeacherDistillConfig
    check_settings: ClassVar[dict[str, Any]] = {
        **ReasoningGymEnv.check_settings,
        "teacher_enabled": False,
    }

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymTeacherDistillConfig, APIServerConfig]:
        config, server = super().config_init()
        settings = {**config.model_dump(exclude_unset=True), "wandb_name": cls.name}
        return ReasoningGymTeacherDistillConfig(**settings), server


if __name__ == "__main__":
    ReasoningGymTeacherDistillEnv.cli()

"""Reasoning gym whose groups carry a teacher's log-probabilities of every token.

    task and question -> G completions -> scores -> group -> teacher reads it -> distill_* fields

Items, prompts and scores are those of `reasoning_gym_environment.py`. The teacher must have the
tokenizer of the policy and a context of `max_token_length` + 1 tokens, and is used by `serve` only:

    python environments/reasoning_gym_environment/reasoning_gym_teacher_distill.py serve \
        --teacher.model_name NAME --teacher.base_url http://localhost:9003/v1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

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
        changes = {
            "wandb_name": cls.name,
            "teacher_enabled": True,
            "teacher_top_k": 8,
            "ensure_scores_are_not_same": False,  # a teacher scores every token of such a group
        }
        settings = {**config.model_dump(exclude_unset=True), **changes}
        return ReasoningGymTeacherDistillConfig(**settings), server


if __name__ == "__main__":
    ReasoningGymTeacherDistillEnv.cli()

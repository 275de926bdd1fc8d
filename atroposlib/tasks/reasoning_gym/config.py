"""Settings of the reasoning-gym environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.errors import ConfigError

__all__ = ["ReasoningGymEnvConfig"]


class ReasoningGymEnvConfig(BaseEnvConfig):
    """Which tasks to draw, how hard they are, and what is kept of the rollouts."""

    task_names: list[str] = Field(
        default_factory=list,
        description="Tasks of the reasoning-gym package; empty means all that can be built.",
    )
    task_params: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Generator parameters by task; they win over those of the complexity.",
    )
    system_prompt: str | None = Field(
        None, description="System message; None is the default prompt, an empty text sends none."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of rollouts; 1 samples from all.")
    eval_temperature: float = Field(0.1, ge=0, description="Sampling temperature of evaluations.")
    eval_budget_factor: float = Field(
        2.0, gt=0, description="Evaluation tokens, as a multiple of max_token_length."
    )
    seed: int = Field(42, ge=0, description="Seed of the training items.")
    eval_seed: int = Field(123, ge=0, description="Seed of the evaluation items.")
    num_eval_samples_per_task: int = Field(5, ge=1, description="Evaluation items per task.")
    max_eval_tasks: int = Field(
        20, ge=1, description="Tasks evaluated; more than that are drawn by eval_seed."
    )
    complexity_mode: Literal["curriculum", "random"] | None = Field(
        None,
        description="How hard training items are: the package's defaults (None), drawn evenly "
        "(random), or following the accuracy of each task (curriculum).",
    )
    curriculum_target_accuracy: float = Field(
        0.7, ge=0, le=1, description="Accuracy at which the curriculum holds the complexity."
    )
    mask_too_long_completions: bool = Field(
        True, description="Keep truncated completions from moving the policy."
    )
    dump_rollouts: bool = Field(False, description="Save rollouts above the score threshold.")
    dump_failed_rollouts: bool = Field(False, description="Save groups in which all scores are 0.")
    rollout_save_score_threshold: float = Field(
        0.7, ge=0, le=1, description="Score above which dump_rollouts saves a rollout."
    )
    dump_dir: str = Field("data_dumps", description="Folder of saved rollouts.")
    debug_logging: bool = Field(False, description="Log every scored group.")
    suppress_base_env_logs: bool = Field(
        True, description="Show only warnings of the base environment class."
    )
    num_score_workers: int = Field(
        2, ge=0, description="Processes that check answers; 0 checks in threads, without a limit."
    )
    score_timeout_s: float = Field(
        20.0, gt=0, description="Seconds one answer may take to check; beyond that it scores 0."
    )

    def validate_config(self) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ConfigError: names the setting.
        """
        missing = sorted(set(self.task_params) - set(self.task_names)) if self.task_names else []
        if missing:
            raise ConfigError(
                f"task_params names {', '.join(missing)}, which task_names does not list"
            )

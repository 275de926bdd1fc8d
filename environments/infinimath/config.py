"""Settings of infinimath: the curriculum, the rewards, and where exercises come from."""

from __future__ import annotations

import os

from pydantic import Field, model_validator

from atroposlib.envs.single_turn_env import SingleTurnEnvConfig
from environments.infinimath.problems import MAX_LEVEL, GeneratorKind

__all__ = ["InfiniteMathEnvConfig"]


class InfiniteMathEnvConfig(SingleTurnEnvConfig):
    """The curriculum, the rewards, and where exercises come from."""

    starting_level: int = Field(1, ge=1, le=MAX_LEVEL, description="Level of the first exercise.")
    progress_threshold: float = Field(
        0.8, ge=0, le=1, description="Mean result at a level from which the next one is set."
    )
    min_evaluations: int = Field(5, ge=1, description="Latest results that mean is taken of.")
    max_attempts_per_problem: int = Field(
        3, ge=1, description="Groups made of an exercise while no answer in them is right."
    )
    correct_reward: float = Field(1.0, description="Reward of a right answer.")
    incorrect_reward: float = Field(-1.0, description="Reward of a wrong answer.")
    think_block_bonus: float = Field(0.2, ge=0, description="Added for a thought that is closed.")
    boxed_answer_bonus: float = Field(0.2, ge=0, description="Added for a box behind the thought.")
    apply_length_penalty: bool = Field(
        True, description="Rank groups in which all answers are right by length."
    )
    length_threshold_ratio: float = Field(
        0.5, ge=0, le=1, description="Part of max_token_length that costs nothing in that ranking."
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts; 1 samples from all.")
    generator: GeneratorKind = Field(
        "auto",
        description="Where exercises come from: mathgenerator, builtin, or auto for the former "
        "where it is installed.",
    )
    problem_seed: int = Field(0, description="Seed of the exercises.")
    word_problem_model_name: str = Field(
        "gpt-4.1-mini", description="Model that turns exercises into stories."
    )
    word_problem_openai_api_key: str | None = Field(
        default_factory=lambda: os.environ.get("OPENAI_API_KEY"),
        repr=False,
        description="Key for that model, the variable OPENAI_API_KEY by default; without one "
        "exercises stay as they are.",
    )
    word_problem_openai_base_url: str | None = Field(
        None, description="Address of that model; None is OpenAI's own."
    )

    @model_validator(mode="after")
    def _right_answers_earn_most(self) -> InfiniteMathEnvConfig:
        if self.correct_reward <= self.best_wrong_reward:
            raise ValueError("correct_reward must exceed incorrect_reward with both bonuses")
        if self.apply_length_penalty and self.best_wrong_reward >= 0:
            raise ValueError(
                "with apply_length_penalty, incorrect_reward with both bonuses must be below 0: a "
                "right answer that fills max_token_length earns 0"
            )
        return self

    @property
    def best_wrong_reward(self) -> float:
        """What a wrong answer earns at best: with a thought and in a box."""
        return self.incorrect_reward + self.think_block_bonus + self.boxed_answer_bonus

"""Fundamental prediction: direction and size of the change of a company's metric, from a report.

    report, metric -> [system, user] -> G completions -> direction and percentage -> +1 or -1

The reward is 0 for a wrong direction. For a right one it is 1, plus up to 1 for the percentage.
Scores are +1 or -1 for the direction alone, or the reward with `magnitude_in_score`.

    python environments/fundamental_prediction_environment.py process --env.dataset_path \
        environments/data/fundamental_prediction_sample --env.total_steps 4
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnvConfig, Trajectory
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import (
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
    long_completion_penalty,
)

__all__ = [
    "FundamentalPredictionEnv",
    "Prediction",
    "magnitude_score",
    "read_prediction",
    "reward_of",
]

CARD = EnvironmentCard(
    task="direction and size of the change of a company's figure",
    turns="1",
    reward="+1 right direction, -1 wrong; 0 to 2 with `--env.magnitude_in_score true`",
    data="company-fundamentals-prediction-lite from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/fundamental_prediction_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "fundamental_prediction_sample"

SYSTEM_PROMPT = (
    "You are a financial analyst who thinks deeply. Before you commit to a forecast, reason for as "
    "long as you need about the company's position, the tone of what it says and the figures it "
    "gives, and weigh what speaks against your view. Put all of that inside <think> </think> tags, "
    "and give your forecast after the closing tag."
)
TASK = (
    "Read the material below about a company and predict whether its {metric} will be maintained, "
    "raised or reduced, and by what percentage. Give the forecast in one sentence of exactly this "
    "form, with 0% where it is maintained:\n"
    "The {metric} will be: {{answer}} and the magnitude will be: {{percentage}}%\n\n"
    "{context}"
)

DIRECTIONS = "maintained|raised|reduced"
CLOSENESS = ((0.0, 1.0), (1.0, 0.9), (5.0, 0.7), (10.0, 0.5), (20.0, 0.3))
"""Maximum difference in percentage points, and the reward up to it."""


class Prediction(NamedTuple):
    """The forecast of a completion."""

    direction: str
    magnitude: str
    """Percentage as written, sign included."""


class FundamentalPredictionEnvConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the data set, of sampling and of the score."""

    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.2, ge=0, description="Sampling temperature of evaluations.")
    magnitude_in_score: bool = Field(
        False,
        description="Whether scores run from 0 to 2 and include the percentage, instead of +1 or "
        "-1 for the direction alone.",
    )


def read_prediction(completion: str, metric: str) -> Prediction | None:
    """Return the forecast after the thinking; None unless there is exactly one."""
    answer = answer_after_thinking(completion)
    if answer is None:
        return None
    name = r"\s{1,9}".join(map(re.escape, metric.split()))
    sentence = (
        rf"The\s{{1,9}}{name}\s{{1,9}}will\s{{1,9}}be:?\s{{0,9}}({DIRECTIONS})\s{{1,9}}and\s{{1,9}}"
        r"the\s{1,9}magnitude\s{1,9}will\s{1,9}be:?\s{0,9}([-+]?[0-9]{1,12}(?:\.[0-9]{1,12})?)\s?%"
    )
    found = re.findall(sentence, answer, re.IGNORECASE)
    return Prediction(found[0][0].lower(), found[0][1]) if len(found) == 1 else None


def magnitude_score(predicted: str, expected: str) -> float:
    """Return the closeness of two percentages, 0.0 to 1.0; 0.0 if one is not a number."""
    try:
        difference = abs(float(predicted) - float(expected.strip().rstrip("%")))
    except ValueError:
        return 0.0
    return next((reward for limit, reward in CLOSENESS if difference <= limit), 0.0)


def reward_of(prediction: Prediction | None, *, answer: str, magnitude: str) -> float:
    """Return 0.0 for a wrong or missing direction, else 1.0 plus the `magnitude_score`."""
    if prediction is None or prediction.direction != answer.strip().lower():
        return 0.0
    return 1.0 + magnitude_score(prediction.magnitude, magnitude)


def _accuracies(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the fraction of right directions and the mean `magnitude_score` of those."""
    right = [reward - 1.0 for reward in rewards if reward >= 1.0]
    return len(right) / len(rewards), statistics.fmean(right) if right else 0.0


class FundamentalPredictionEnv(DatasetItems, ThinkingEnv):
    """Reports about companies and the change of a metric; an item is a row of the data set."""

    env_config_cls = FundamentalPredictionEnvConfig
    config: FundamentalPredictionEnvConfig
    hub_dataset = "NousResearch/company-fundamentals-prediction-lite"
    hub_subset = "default"
    test_fraction = 0.05
    columns = ("context", "answer", "magnitude", "fundamental_metric")
    rollout_columns = ("expected_direction", "expected_magnitude", "fundamental_metric")
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[FundamentalPredictionEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            FundamentalPredictionEnvConfig,
            group_size=16,
            max_num_workers=128,
            total_steps=2000,
            steps_per_eval=20,
            max_token_length=16384,
            wandb_name="fundamental_metric_prediction",
        )

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        task = TASK.format(metric=item["fundamental_metric"], context=item["context"])
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        prediction = read_prediction(self.opened_tag + answer, item["fundamental_metric"])
        return reward_of(prediction, answer=item["answer"], magnitude=str(item["magnitude"]))

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        limit = self.config.max_token_length
        rewards = [
            reward - long_completion_penalty(t.num_completion_tokens, max_tokens=limit)
            for reward, t in zip(scores, trajectories, strict=True)
        ]
        if self.config.magnitude_in_score:
            return rewards
        return [1.0 if reward > 0 else -1.0 for reward in rewards]

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        direction, magnitude = _accuracies(scores)
        return {
            "train/direction_accuracy": direction,
            "train/magnitude_accuracy": magnitude,
            "train/combined_score": direction + magnitude,
        }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        rewards = [sample["score"] for sample in samples]
        direction, magnitude = _accuracies(rewards)
        return {
            "eval/direction_accuracy": direction,
            "eval/magnitude_accuracy": magnitude,
            "eval/combined_score": statistics.fmean(rewards),
        }

    def rollout_cells(self, item: Mapping[str, Any]) -> Sequence[Any]:
        return item["answer"], item["magnitude"], item["fundamental_metric"]

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        return (
            f"<think>I weigh the report.</think> The {item['fundamental_metric']} will be: "
            f"{item['answer']} and the magnitude will be: {item['magnitude'].rstrip('%')}%"
        )


if __name__ == "__main__":
    FundamentalPredictionEnv.cli()

"""Implied volatility: predict it for an option from its price and terms.

    option -> [system, user] -> G completions -> The implied volatility will be: N%
        -> closeness of N, 0.1 to 1 -> +1 if it is above 0.5, else -1

Options come from local files; options of invented companies are shipped:

    python environments/community/options_iv_prediction/options_iv_prediction_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import long_completion_penalty
from atroposlib.utils.local_records import read_splits

__all__ = [
    "OptionsIVConfig",
    "OptionsIVPrediction",
    "closeness",
    "read_volatility",
    "score_prediction",
]

logger = logging.getLogger("environments.options_iv_prediction")

CARD = EnvironmentCard(
    task="predict the implied volatility of an option",
    turns="1",
    reward="+1 within 10 percentage points, else -1",
    data="48 options of invented companies shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
UNREADABLE = -0.5
THRESHOLD = 0.5
CLOSENESS = ((2.0, 0.95), (5.0, 0.85), (10.0, 0.7), (15.0, 0.5), (20.0, 0.3))
"""Maximum difference in percentage points, and the score up to it."""
VERY_CLOSE, FAR = 0.5, 0.1
LEAD_IN = "The implied volatility will be:"
PREDICTION = re.compile(
    r"The\s{1,9}implied\s{1,9}volatility\s{1,9}will\s{1,9}be:?\*{0,2}\s{0,9}\*{0,2}"
    r"(?:([0-9]{1,6}(?:\.[0-9]{1,12})?)\s?%)?",
    re.IGNORECASE,
)
"""The lead-in, and the number after it if there is one."""
SYSTEM_PROMPT = (
    "You are an analyst of options. Estimate the implied volatility of an option, per year, from "
    "its price and its terms. You may reason first between <think> and </think>. Then write one "
    f"line of exactly this form, with a number in percent:\n{LEAD_IN} 25.0%"
)
QUESTION = (
    "{option_type} option on {symbol}\nPrice of the option: {option_price}\nPrice of the stock: "
    "{stock_price}\nStrike: {strike}\nDays to expiration: {days_to_expiration}\nRisk-free rate: "
    "{risk_free_rate}%\n\nWhat is its implied volatility?"
)
Option = Mapping[str, Any]
"""One row: the terms of an option, as texts or numbers, and `implied_volatility` in percent."""


class OptionsIVConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Source of the options, and sampling."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File of options, or folder with a train and a test file; None takes the "
        "options that are shipped.",
    )


def read_volatility(answer: str) -> float | None:
    """Return the number after the lead-in in percent; None unless there is exactly one lead-in.

    Args:
        answer: the completion without its thinking.
    """
    found = PREDICTION.findall(answer)
    return float(found[0]) if len(found) == 1 and found[0] else None


def closeness(predicted: float, gold: float) -> float:
    """Return the closeness of two volatilities in percent, 0.1 to 1."""
    difference = abs(predicted - gold)
    if difference < VERY_CLOSE:
        return 1.0
    return next((score for limit, score in CLOSENESS if difference <= limit), FAR)


def score_prediction(answer: str, gold: float) -> float:
    """Return the closeness of the volatility in an answer; -0.5 without one."""
    predicted = read_volatility(answer)
    return UNREADABLE if predicted is None else closeness(predicted, gold)


class OptionsIVPrediction(DatasetItems, SingleTurnEnv):
    """Options whose implied volatility is known; an item is an `Option`."""

    name = "options_iv_prediction"
    env_config_cls = OptionsIVConfig
    config: OptionsIVConfig
    columns = (
        "symbol",
        "option_type",
        "option_price",
        "stock_price",
        "strike",
        "days_to_expiration",
        "risk_free_rate",
        "implied_volatility",
    )
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 16,
        "max_token_length": 16384,
        "wandb_name": "options_iv_prediction",
    }

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        splits = read_splits(path, self.columns, shuffle_seed=self.config.dataset_seed)
        train, test = ([row for row in rows if _volatility(row)] for rows in splits)
        num_left_out = sum(map(len, splits)) - len(train) - len(test)
        if num_left_out:
            logger.warning("%d options are left out: no implied volatility above 0", num_left_out)
        if not train:
            raise ConfigError(
                f"{path} has no option with an implied_volatility above 0, in percent"
            )
        return train, test

    def prompt(self, item: Option) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": QUESTION.format(**item)},
        ]

    async def score(self, item: Option, answer: str) -> float:
        """Return the closeness; `group_scores` makes +1 or -1 of it."""
        return score_prediction(answer, float(item["implied_volatility"]))

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        limit = self.config.max_token_length
        return [
            1.0
            if score - long_completion_penalty(t.num_completion_tokens, max_tokens=limit)
            > THRESHOLD
            else -1.0
            for score, t in zip(scores, trajectories, strict=True)
        ]

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        return _metrics(scores, "train")

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return _metrics([sample["score"] for sample in samples], "eval")

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        return _metrics([record["score"]], "eval")

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return bool(record["score"] > THRESHOLD)

    def check_gold_answer(self, item: Option) -> str:
        return f"{LEAD_IN} {item['implied_volatility']}%"


def _metrics(scores: Sequence[float], area: str) -> dict[str, float]:
    return {
        f"{area}/percent_correct": statistics.fmean(score > THRESHOLD for score in scores),
        f"{area}/mean_score": statistics.fmean(scores),
    }


def _volatility(row: Option) -> float | None:
    """Return the volatility of a row; None unless it is a number above 0."""
    try:
        value = float(row["implied_volatility"])
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and value > 0 else None


if __name__ == "__main__":
    OptionsIVPrediction.cli()

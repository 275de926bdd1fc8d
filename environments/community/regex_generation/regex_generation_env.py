"""Regex generation: write a regular expression for a description and a few examples.

    problem -> [user] description, 3 + 3 examples -> G completions -> <answer> regex
        -> worker: all strings that must match, and that must not -> share of right ones

A regex of the model can backtrack for ever, so it runs in a worker with a time limit. Problems are
in `sample/`, or in `--env.dataset_path`:

    python environments/community/regex_generation/regex_generation_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from atroposlib.envs.config import ScoreBackendEnum
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.local_records import read_splits

__all__ = ["RegexConfig", "RegexEnv", "score_regex"]

CARD = EnvironmentCard(
    task="write a regular expression for a description and examples",
    turns="1",
    reward="share of the strings that it matches or rejects rightly",
    data="36 problems shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
MAX_REGEX_CHARACTERS = 500
NUM_SHOWN = 3
"""Examples of each kind in the prompt; the others only count in the score."""
QUESTION = (
    "Write a regular expression in the syntax of Python's module re. It must match the whole of "
    "each string of this kind (re.fullmatch), and no other string:\n\n{description}\n\n"
    "It matches, for example: {positive}\nIt does not match, for example: {negative}\n\n"
    "There are further strings of both kinds. Put only the expression, without quotes or a fence, "
    "between <answer> and </answer>."
)
Difficulty = Literal["easy", "medium", "hard"]
Problem = Mapping[str, Any]
"""One row: `description`, `positive` and `negative` strings, `difficulty`; `pattern` or None."""


class RegexConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Settings of the problems and their evaluation."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File of problems, or folder with a train and a test file; None takes the "
        "problems that are shipped.",
    )
    difficulties: list[Difficulty] = Field(
        ["easy", "medium", "hard"], min_length=1, description="Difficulties of the problems."
    )
    score_threshold: float = Field(
        1.0, ge=0, le=1, description="Score from which an answer counts as correct in metrics."
    )

    @model_validator(mode="after")
    def _regexes_run_in_workers(self) -> RegexConfig:
        if self.num_score_workers == 0 or self.score_backend is ScoreBackendEnum.THREAD:
            raise ValueError(
                "a regex of the model can run for ever, and a thread cannot be stopped: "
                "num_score_workers must be at least 1, and score_backend PROCESS or RAY"
            )
        return self


def score_regex(answer: str, positive: Sequence[str], negative: Sequence[str]) -> float:
    """Return the share of strings that the regex in the tags treats rightly; 0.0 without a regex.

    Args:
        answer: the completion without its thinking.
        positive: strings that it must match as a whole.
        negative: strings that it must not match as a whole.
    """
    found = only_tagged(answer, "answer")
    if not found or len(found) > MAX_REGEX_CHARACTERS:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that future versions read differently
            regex = re.compile(found)
        right = [regex.fullmatch(text) is not None for text in positive]
        right += [regex.fullmatch(text) is None for text in negative]
    except (re.error, RecursionError, OverflowError, MemoryError):
        return 0.0
    return statistics.fmean(right)


class RegexEnv(DatasetItems, SingleTurnEnv):
    """Descriptions of strings; an item is a `Problem`."""

    name = "regex_generation"
    env_config_cls = RegexConfig
    config: RegexConfig
    columns = ("description", "positive", "negative", "difficulty")
    optional_columns = ("pattern",)
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "mute_truncated": True,
        "score_timeout_s": 5.0,
        "wandb_name": "regex_generation",
    }

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        seed, optional = self.config.dataset_seed, self.optional_columns
        splits = read_splits(path, self.columns, shuffle_seed=seed, optional=optional)
        train, test = (list(filter(self._is_wanted, rows)) for rows in splits)
        if not train:
            wanted = ", ".join(self.config.difficulties)
            raise ConfigError(f"{path} has no training problem of the difficulty {wanted}")
        return train, test

    def _is_wanted(self, problem: Problem) -> bool:
        for kind in ("positive", "negative"):
            strings = problem[kind]
            if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
                raise ConfigError(f"expected {kind} to be a list of strings, got {strings!r:.80}")
        if not problem["positive"] or not problem["negative"]:
            raise ConfigError(f"{problem['description']!r:.80} has strings of one kind only")
        return problem["difficulty"] in self.config.difficulties

    def prompt(self, item: Problem) -> list[dict[str, str]]:
        shown = {
            kind: ", ".join(map(repr, item[kind][:NUM_SHOWN])) for kind in ("positive", "negative")
        }
        question = QUESTION.format(description=item["description"], **shown)
        return [{"role": "user", "content": question}]

    async def score(self, item: Problem, answer: str) -> float:
        """Score in a worker; a regex over the time limit earns nothing."""
        return await self.score_pool.run(
            score_regex, answer, item["positive"], item["negative"], default=0.0
        )

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        correct = statistics.fmean(score >= self.config.score_threshold for score in scores)
        return {**super().train_metrics(scores), "train/percent_correct": correct}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        correct = statistics.fmean(map(self.is_correct, samples))
        return {**super().evaluation_metrics(samples), "eval/percent_correct": correct}

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        correct = float(self.is_correct(record))
        return {**super().evaluation_values(record), "eval/percent_correct": correct}

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return bool(record["score"] >= self.config.score_threshold)

    def check_gold_answer(self, item: Problem) -> str | None:
        return f"<answer>{item['pattern']}</answer>" if item["pattern"] else None


if __name__ == "__main__":
    RegexEnv.cli()

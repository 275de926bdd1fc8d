"""Dataset environment: any data set with a column of questions, rewarded by named functions.

    row -> [system, user] (+ prefill) -> G completions -> reward functions, for the group -> scores

A YAML file is all it takes; see `README.md` beside this file.

    python environments/dataset_environment/dataset_env.py process \
        --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.reward_fns import CombinedReward, registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.envs.single_turn_env import SingleTurnEnv
from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import find_split, read_records
from environments.dataset_environment.dataset_config import DatasetEnvConfig
from environments.shared.card import EnvironmentCard
from environments.shared.hub import hub_rows

__all__ = ["DatasetEnv", "DatasetEnvConfig", "make_reward", "read_rows", "token_limit"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="the questions of any data set, without code",
    turns="1",
    reward="by reward functions named in a YAML file",
    data="any data set of the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample"
EVAL_SPLITS = ("test", "validation", "valid", "val")
MAX_EVAL_ROWS = 100

Row = dict[str, Any]


def make_reward(config: DatasetEnvConfig) -> RewardFunction:
    """Return the reward function of a run.

    Raises:
        ConfigError: none is named, or both lists are used.
        UnknownRewardError: there is none of a name.
    """
    if bool(config.reward_functions) == bool(config.reward_funcs):
        raise ConfigError(
            "name reward functions in reward_functions, for instance accuracy, or in the older "
            "reward_funcs; one of the two"
        )
    entries = config.reward_functions or config.reward_funcs
    if len(entries) == 1:
        return registry.create(entries[0])
    return CombinedReward(entries, normalization="sum" if config.reward_functions else "none")


def token_limit(step: int, *, warmup_steps: int, min_tokens: int, max_tokens: int) -> int:
    """Return how many tokens a completion may have at a trainer step, at least one."""
    if step >= warmup_steps:
        return max_tokens
    grown = min_tokens + (max_tokens - min_tokens) * step / warmup_steps
    return min(max_tokens, max(1, round(grown)))


def read_rows(config: DatasetEnvConfig) -> tuple[list[Row], list[Row]]:
    """Return the rows to ask and at most a hundred for evaluations; blocks.

    Raises:
        ConfigError: a file or column is missing, or the hub cannot be reached.
    """
    train, test = _local_rows(config) if config.dataset_path else _hub_rows(config)
    if config.shuffle_dataset:
        random.Random(config.dataset_seed).shuffle(train)
    return train, test[:MAX_EVAL_ROWS]


def _columns(config: DatasetEnvConfig) -> list[str]:
    named = (config.prompt_field, config.answer_field, config.ground_truth_field)
    return list(dict.fromkeys([*filter(None, named), *config.item_fields]))


def _local_rows(config: DatasetEnvConfig) -> tuple[list[Row], list[Row]]:
    path, columns = Path(config.dataset_path or ""), _columns(config)
    if path.is_dir():
        wanted = [config.eval_dataset_split] if config.eval_dataset_split else EVAL_SPLITS
        train = read_records(find_split(path, [config.split]), columns)
        return train, read_records(find_split(path, wanted), columns)
    rows = read_records(path, columns)
    num_test = max(1, len(rows) // 10)
    return rows[:-num_test] or rows, rows[-num_test:]


def _hub_rows(config: DatasetEnvConfig) -> tuple[list[Row], list[Row]]:
    train = hub_rows(config.dataset_name, split=config.split, subset=config.dataset_config)
    test: list[Row] = []
    if config.eval_dataset_name or config.eval_dataset_split:
        test = hub_rows(
            config.eval_dataset_name or config.dataset_name,
            split=config.eval_dataset_split or "test",
            subset=config.eval_dataset_config
            or (None if config.eval_dataset_name else config.dataset_config),
        )
    for rows in filter(None, (train, test)):
        missing = [column for column in _columns(config) if column not in rows[0]]
        if missing:
            raise ConfigError(
                f"{config.dataset_name} has no column {', '.join(missing)}; it has "
                f"{', '.join(rows[0])}"
            )
    return train, test


class DatasetEnv(SingleTurnEnv):
    """Rows of a data set.

    Attributes:
        iter: groups handed out so far; kept in checkpoints.
        reward_function: what completions are rewarded by.
    """

    env_config_cls = DatasetEnvConfig  # type: ignore[assignment] # it has required fields
    config: DatasetEnvConfig
    scores_thinking = True  # reward functions look at its form
    default_model = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    default_settings: ClassVar[dict[str, Any]] = {
        "dataset_name": "gsm8k",
        "dataset_config": "main",
        "prompt_field": "question",
        "answer_field": "answer",
        "eval_dataset_split": "test",
        "max_token_length": 8192,
        "reward_functions": ["accuracy"],
    }
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "num_score_workers": 1,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.train: list[Row] = []
        self.test: list[Row] = []
        self.prefill = self.config.prefill or ""
        self.reward_function = make_reward(self.config)
        if self.config.include_messages_in_scoring:
            self.config.include_messages = True

    async def setup(self) -> None:
        """Read the rows."""
        self.train, self.test = await asyncio.to_thread(read_rows, self.config)
        logger.info("%d rows, %d for evaluations", len(self.train), len(self.test))

    async def get_next_item(self) -> Row:
        """Return the next row, from the start again after the last."""
        number = self.iter // self.config.max_generations_per_prompt
        self.iter += 1
        return self.train[number % len(self.train)]

    def eval_items(self) -> Sequence[Row]:
        """Return the rows kept for evaluations."""
        return self.test

    def prompt(self, item: Row) -> list[dict[str, str]]:
        """Return the question of a row behind the system message."""
        user = {"role": "user", "content": str(item[self.config.prompt_field])}
        if not self.config.system_prompt:
            return [user]
        return [{"role": "system", "content": self.config.system_prompt}, user]

    def sampling(self) -> dict[str, Any]:
        """Return temperature and nucleus of rollouts."""
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score(self, item: Row, answer: str) -> float:
        """Return the reward of one completion."""
        [score] = await self.score_all(item, [answer])
        return score

    async def score_all(self, item: Row, answers: Sequence[str]) -> list[float]:
        """Return the rewards of all completions, given to the reward function together."""
        config = self.config
        reward = functools.partial(
            self.reward_function,
            solution=item.get(config.answer_field or ""),
            ground_truth=item.get(config.ground_truth_field or ""),
            item=item,
            config=config,
        )
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        return await self.score_pool.run(reward, completions, default=[0.0] * len(answers))

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return mean, best and worst reward."""
        scores = [sample["score"] for sample in samples]
        return {
            "eval/mean_score": statistics.fmean(scores),
            "eval/max_score": max(scores),
            "eval/min_score": min(scores),
        }

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Keep the position."""
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: Row) -> str | None:
        """Return the gold answer behind a thought, boxed; None where no column holds one."""
        column = self.config.ground_truth_field or self.config.answer_field
        if column is None:
            return None
        gold = str(item[column]).rsplit("####", 1)[-1].strip()
        return f"<think>I work it out.</think> <answer>\\boxed{{{gold}}}</answer>"

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        limit = token_limit(
            self.curr_step,
            warmup_steps=self.config.length_warmup_steps,
            min_tokens=self.config.min_tokens,
            max_tokens=self.config.max_tokens,
        )
        return min(limit, super()._budget(messages))


if __name__ == "__main__":
    DatasetEnv.cli()

"""Dataset environment: any data set with a column of questions, scored by reward functions.

    row -> [system, user] (+ prefill) -> G completions -> reward functions, for the group -> scores

It is configured by a YAML file; see `README.md` next to this file.

    python environments/dataset_environment/dataset_env.py process \
        --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, ValidationError

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_items import hub_rows
from atroposlib.envs.reward_fns import CombinedReward, registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.aio import all_results
from atroposlib.utils.local_records import read_records, read_split
from atroposlib.utils.yaml_text import read_yaml

__all__ = [
    "DatasetEnv",
    "DatasetEnvConfig",
    "RunFile",
    "expand_variables",
    "make_reward",
    "read_rows",
    "read_run_file",
    "token_limit",
]

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).with_name("configs")
SECTIONS = ("dataset", "server_configs", "trainer")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class DatasetEnvConfig(SingleTurnEnvConfig):
    """Settings of the data set, of the reward functions and of sampling."""

    dataset_name: str = Field(description="Data set of the hub, unless dataset_path is given.")
    dataset_config: str | None = Field(
        None, description="Configuration of dataset_name, if it has several."
    )
    split: str = Field("train", description="Split of the training rows.")
    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with one file per split; the last "
        "tenth of a single file is kept for evaluations.",
    )
    prompt_field: str = Field(description="Column of the question.")
    answer_field: str | None = Field(
        None, description="Column of the gold answer, passed to reward functions as solution."
    )
    ground_truth_field: str | None = Field(
        None, description="Column passed to reward functions as ground_truth."
    )
    item_fields: list[str] = Field(
        default_factory=list, description="Further columns, passed to reward functions in item."
    )
    system_prompt: str | None = Field(None, description="System message; None sends none.")
    prefill: str | None = Field(None, description="Prefix of every completion; not trained.")
    shuffle_dataset: bool = Field(
        True, description="Whether the training rows are shuffled, by dataset_seed."
    )
    dataset_seed: int = Field(42, description="Seed of the order.")
    max_generations_per_prompt: int = Field(
        1, ge=1, description="Number of consecutive groups of one row."
    )
    include_messages_in_scoring: bool = Field(
        False, description="Whether groups are sent with their messages."
    )
    reward_functions: list[str | dict[str, Any]] = Field(
        default_factory=list,
        description="Names, or {type, weight, params}; several are combined to a weighted mean.",
    )
    reward_funcs: list[str | dict[str, Any]] = Field(
        default_factory=list,
        description="The same as reward_functions, but combined to a weighted sum.",
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts; 1 disables it.")
    max_tokens: int = Field(4096, ge=1, description="Maximum tokens of one completion.")
    length_warmup_steps: int = Field(
        0,
        ge=0,
        description="Trainer steps over which the maximum grows from min_tokens to max_tokens; 0 "
        "disables the warmup.",
    )
    min_tokens: int = Field(0, ge=0, description="Maximum tokens of one completion at step 0.")
    eval_dataset_name: str | None = Field(
        None, description="Data set of the hub for evaluations; None takes dataset_name."
    )
    eval_dataset_config: str | None = Field(None, description="Configuration of eval_dataset_name.")
    eval_dataset_split: str | None = Field(
        None,
        description="Split for evaluations; without it and a name, no evaluation rows are "
        "loaded from the hub.",
    )


class RunFile(NamedTuple):
    """Contents of one YAML file."""

    env: DatasetEnvConfig
    servers: list[APIServerConfig]
    trainer: dict[str, Any]
    """Flags of the trainer, without dashes, and their values."""


def read_run_file(name_or_path: str, variables: Mapping[str, str]) -> RunFile:
    """Read a YAML file.

    Args:
        name_or_path: a path, or the name of a file in `configs/` with or without `.yaml`.
        variables: values of `${NAME}`, such as `os.environ`.

    Raises:
        ConfigError: the file is missing or invalid, or a variable is not set.
    """
    path = _find(name_or_path)
    content = _read_yaml(path)
    unknown = sorted(set(content) - set(SECTIONS))
    if unknown or not isinstance(content.get("dataset"), dict):
        raise ConfigError(
            f"{path}: expected the sections {', '.join(SECTIONS)}, of which dataset must be there; "
            f"got {', '.join(map(str, content))}"
        )
    settings = content["dataset"]
    misspelt = sorted(set(settings) - set(DatasetEnvConfig.model_fields))
    if misspelt:
        raise ConfigError(f"{path}: dataset has no setting {', '.join(map(str, misspelt))}")
    servers = expand_variables(content.get("server_configs") or [], variables, where=str(path))
    try:
        return RunFile(
            env=DatasetEnvConfig(**settings),
            servers=[APIServerConfig(**server) for server in servers],
            trainer=dict(content.get("trainer") or {}),
        )
    except (ValidationError, TypeError) as error:
        # Without the values: one may be an API key.
        places = (
            [".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors()]
            if isinstance(error, ValidationError)
            else ["server_configs must be a list of settings by name"]
        )
        raise ConfigError(f"{path}: {'; '.join(places)}") from None


def expand_variables(value: Any, variables: Mapping[str, str], *, where: str) -> Any:
    """Return a YAML value with `${NAME}` and `${NAME:-default}` replaced in all strings.

    Raises:
        ConfigError: a variable without a default is not set.
    """

    def replace(match: re.Match[str]) -> str:
        found = variables.get(match[1]) or match[2]
        if found is None:
            raise ConfigError(f"{where}: the environment variable {match[1]} is not set")
        return found

    if isinstance(value, str):
        return VARIABLE.sub(replace, value)
    if isinstance(value, dict):
        return {key: expand_variables(v, variables, where=where) for key, v in value.items()}
    if isinstance(value, list):
        return [expand_variables(entry, variables, where=where) for entry in value]
    return value


def _find(name_or_path: str) -> Path:
    places = [Path(name_or_path), CONFIGS / name_or_path, CONFIGS / f"{name_or_path}.yaml"]
    for path in places:
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    raise ConfigError(f"no file {name_or_path!r}; expected a path or one of {names}")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections by name, found {type(content).__name__}")
    return content


CARD = EnvironmentCard(
    task="the questions of any data set, without code",
    turns="1",
    reward="by reward functions named in a YAML file",
    data="any data set of the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "gsm8k_sample"
EVAL_SPLITS = ("test", "validation", "valid", "val")
MAX_EVAL_ROWS = 100

Row = dict[str, Any]


def make_reward(config: DatasetEnvConfig) -> RewardFunction:
    """Return the reward function of a run.

    Raises:
        ConfigError: no function is named, or both lists are used.
        UnknownRewardError: a name is not registered.
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
    """Return the maximum tokens of a completion at a trainer step, at least 1."""
    if step >= warmup_steps:
        return max_tokens
    grown = min_tokens + (max_tokens - min_tokens) * step / warmup_steps
    return min(max_tokens, max(1, round(grown)))


def read_rows(config: DatasetEnvConfig) -> tuple[list[Row], list[Row]]:
    """Return the training rows and at most a hundred evaluation rows; blocks.

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
        train = read_split(path, [config.split], columns)
        return train, read_split(path, wanted, columns)
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
    """Rows of a data set, scored by reward functions; an item is a row.

    Attributes:
        iter: groups started so far; kept in checkpoints.
        reward_function: scores the completions of a group.
    """

    env_config_cls = DatasetEnvConfig  # type: ignore[assignment] # it has required fields
    config: DatasetEnvConfig
    scores_thinking = True  # some reward functions check its format
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
        self.train, self.test = await asyncio.to_thread(read_rows, self.config)
        logger.info("%d rows, %d for evaluations", len(self.train), len(self.test))

    async def get_next_item(self) -> Row:
        number = self.iter // self.config.max_generations_per_prompt
        self.iter += 1
        return self.train[number % len(self.train)]

    def eval_items(self) -> Sequence[Row]:
        return self.test

    def prompt(self, item: Row) -> list[dict[str, str]]:
        user = {"role": "user", "content": str(item[self.config.prompt_field])}
        if not self.config.system_prompt:
            return [user]
        return [{"role": "system", "content": self.config.system_prompt}, user]

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score(self, item: Row, answer: str) -> float:
        [score] = await self.score_all(item, [answer])
        return score

    async def score_all(self, item: Row, answers: Sequence[str]) -> list[float]:
        config = self.config
        reward = functools.partial(
            self.reward_function,
            solution=item.get(config.answer_field or ""),
            ground_truth=item.get(config.ground_truth_field or ""),
            item=item,
            config=config,
        )
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        together = await self.score_pool.run(reward, completions, default=None)
        if together is not None:
            return together
        # One of them took too long or ended the worker; the others keep their rewards.
        alone = await all_results(
            self.score_pool.run(reward, [completion], default=[0.0]) for completion in completions
        )
        return [score for [score] in alone]

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scores = [sample["score"] for sample in samples]
        return {
            "eval/mean_score": statistics.fmean(scores),
            "eval/max_score": max(scores),
            "eval/min_score": min(scores),
        }

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: Row) -> str | None:
        """Return the boxed gold answer after a thought; None without a column for it."""
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

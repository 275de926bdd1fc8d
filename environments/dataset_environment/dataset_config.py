"""Settings of the dataset environment, and the YAML files that hold them.

dataset:          fields of `DatasetEnvConfig`, the environment's own and those of every one
server_configs:   inference servers; `${NAME}` is a variable, `${NAME:-text}` has a default
trainer:          flags of the example trainer, for `launch_local_dataset_run.py`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.single_turn_env import SingleTurnEnvConfig
from atroposlib.errors import ConfigError

__all__ = ["DatasetEnvConfig", "RunFile", "expand_variables", "read_run_file"]

CONFIGS = Path(__file__).with_name("configs")
SECTIONS = ("dataset", "server_configs", "trainer")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class DatasetEnvConfig(SingleTurnEnvConfig):
    """Which rows are asked, how they are rewarded, and how completions are drawn."""

    dataset_name: str = Field(description="Data set of the hub, unless dataset_path is given.")
    dataset_config: str | None = Field(None, description="Its configuration, if it has several.")
    split: str = Field("train", description="Split whose rows are asked.")
    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with one for each split; of a single "
        "file the last tenth is kept for evaluations.",
    )
    prompt_field: str = Field(description="Column of the question.")
    answer_field: str | None = Field(
        None, description="Column of the gold answer; reward functions get it as solution."
    )
    ground_truth_field: str | None = Field(
        None, description="Column that reward functions get as ground_truth."
    )
    item_fields: list[str] = Field(
        default_factory=list, description="Further columns that reward functions find in item."
    )
    system_prompt: str | None = Field(None, description="System message; None sends none.")
    prefill: str | None = Field(None, description="How every completion begins; not trained.")
    shuffle_dataset: bool = Field(True, description="Shuffle the rows, by dataset_seed.")
    dataset_seed: int = Field(42, description="Seed of the order.")
    max_generations_per_prompt: int = Field(
        1, ge=1, description="Groups made of a row before the next one."
    )
    include_messages_in_scoring: bool = Field(False, description="Send groups with their chats.")
    reward_functions: list[str | dict[str, Any]] = Field(
        default_factory=list,
        description="Names, or {type, weight, params}; several make their weighted mean.",
    )
    reward_funcs: list[str | dict[str, Any]] = Field(
        default_factory=list, description="The same, but several make their weighted sum."
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts; 1 samples from all.")
    max_tokens: int = Field(4096, ge=1, description="Tokens one completion may have.")
    length_warmup_steps: int = Field(
        0, ge=0, description="Trainer steps over which min_tokens grows to max_tokens; 0: at once."
    )
    min_tokens: int = Field(0, ge=0, description="Tokens one completion may have at step 0.")
    eval_dataset_name: str | None = Field(
        None, description="Data set of the hub for evaluations; None takes dataset_name."
    )
    eval_dataset_config: str | None = Field(None, description="Its configuration.")
    eval_dataset_split: str | None = Field(
        None, description="Split for evaluations; without it and a name the hub is not asked."
    )


class RunFile(NamedTuple):
    """One YAML file, read."""

    env: DatasetEnvConfig
    servers: list[APIServerConfig]
    trainer: dict[str, Any]
    """Flag of the trainer, without dashes -> value."""


def read_run_file(name_or_path: str, variables: Mapping[str, str]) -> RunFile:
    """Return what a YAML file says.

    Args:
        name_or_path: a path, or the name of a file in `configs/` with or without `.yaml`.
        variables: what `${NAME}` stands for, as `os.environ`.

    Raises:
        ConfigError: the file is missing or no such YAML, a section or setting is unknown or
            refused, or a variable is not set.
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
        # Not the values: one may be a key.
        places = (
            [".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors()]
            if isinstance(error, ValidationError)
            else ["server_configs must be a list of settings by name"]
        )
        raise ConfigError(f"{path}: {'; '.join(places)}") from None


def expand_variables(value: Any, variables: Mapping[str, str], *, where: str) -> Any:
    """Return a YAML value with `${NAME}` and `${NAME:-default}` replaced in all its texts.

    Raises:
        ConfigError: a variable without a default is not set; the message names it.
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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections by name, found {type(content).__name__}")
    return content

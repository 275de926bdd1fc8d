r"""Fight predictions: name the winner of a bout of mixed martial arts from two records.

    bout -> [system, user] -> G completions -> name in \boxed{} -> +1 or -1

Bouts come from local CSV files; bouts of invented fighters are shipped:

    python environments/community/ufc_prediction_env/ufc_prediction_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import FORMATS
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.local_records import read_splits

__all__ = ["UFCConfig", "UFCEnv", "naming_winner", "read_bouts", "score_prediction"]

logger = logging.getLogger("environments.ufc_prediction")

CARD = EnvironmentCard(
    task="predict the winner of a bout of martial arts",
    turns="1",
    reward="+1 for the name of the winner, else -1",
    data="40 bouts of invented fighters shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
SYSTEM_PROMPT = (
    "You predict the winner of a bout of mixed martial arts from the records of both fighters. You "
    "may reason first between <think> and </think>. Then name the winner, and no other, as "
    "written in the records, once in the form \\boxed{name}."
)
QUESTION = "Fighter: {fighter_1}\n{record_1}\n\nFighter: {fighter_2}\n{record_2}\n\nWho wins?"
COLUMNS = ("fighter_1", "record_1", "fighter_2", "record_2", "winner")
Bout = Mapping[str, str]
"""One row: both fighters, their records as text, and `winner`, one of the names."""


class UFCConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Source of the bouts, and sampling."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File of bouts, or folder with a train and a test file; None takes the bouts "
        "that are shipped.",
    )


def score_prediction(answer: str, gold: str) -> float:
    """Return 1.0 if the only box has the name of the winner, in any case; else -1.0.

    Args:
        answer: the completion without its thinking.
        gold: name of the winner.
    """
    fields = FORMATS["latex_boxed"].extract(answer)
    return 1.0 if fields is not None and _folded(fields["answer"]) == _folded(gold) else -1.0


def _folded(name: str) -> str:
    return " ".join(name.casefold().split())


def read_bouts(
    path: Path, *, seed: int, optional: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the bouts to train on and to evaluate, without those whose winner is not a fighter.

    Args:
        path: a file, or a folder with a train and a test file.
        seed: seed of the split, if there is one file.
        optional: further columns that bouts may have.

    Raises:
        ConfigError: there is no bout to train on.
    """
    splits = read_splits(path, COLUMNS, optional=optional, shuffle_seed=seed)
    train, test = (list(filter(_has_a_winner, rows)) for rows in splits)
    num_left_out = sum(map(len, splits)) - len(train) - len(test)
    if num_left_out:
        logger.warning("%d bouts are left out: their winner is not a fighter", num_left_out)
    if not train:
        raise ConfigError(f"{path} has no training bout whose winner is one of its fighters")
    return train, test


def naming_winner(group: ScoredDataGroup | None, winner: str) -> ScoredDataGroup | None:
    """Return the group with the name of the winner for each trajectory, and its own size."""
    if group is not None:
        size = len(group["tokens"])
        group["ground_truths"] = [winner] * size  # type: ignore[typeddict-unknown-key]
        group["group_overrides"] = {"group_size": size}
    return group


class UFCEnv(DatasetItems, SingleTurnEnv):
    """Bouts of two fighters; an item is a `Bout`."""

    name = "ufc_predictor"
    env_config_cls = UFCConfig
    config: UFCConfig
    columns = COLUMNS
    logs_percent_correct = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "wandb_name": "ufc_predictor",
    }

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        return read_bouts(path, seed=self.config.dataset_seed)

    def prompt(self, item: Bout) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": QUESTION.format(**item)},
        ]

    async def score(self, item: Bout, answer: str) -> float:
        return score_prediction(answer, item["winner"])

    async def collect_trajectories(self, item: Bout) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group, which also has the name of the winner."""
        group, backlog = await super().collect_trajectories(item)
        return naming_winner(group, item["winner"]), backlog

    def check_gold_answer(self, item: Bout) -> str:
        return f"\\boxed{{{item['winner']}}}"


def _has_a_winner(row: Bout) -> bool:
    names = [_folded(str(row[name])) for name in ("fighter_1", "fighter_2")]
    return names[0] != names[1] and _folded(str(row["winner"])) in names


if __name__ == "__main__":
    UFCEnv.cli()

"""`LocalItems`: items that are the rows of a file, one after the other.

    JSONL, JSON or Parquet ─► train rows ─► get_next_item, from the start again after the last
                           └► test rows  ─► eval_items

To be named before the kind of environment: `class MyEnv(LocalItems, SingleTurnEnv)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.utils.local_records import read_splits, require_data

__all__ = ["LocalItems", "LocalItemsConfig"]

logger = logging.getLogger(__name__)


class LocalItemsConfig(BaseEnvConfig):
    """Where the rows are."""

    dataset_path: str = Field(
        "data.jsonl",
        description="JSONL, JSON or Parquet file, or folder with a train and a test file.",
    )
    dataset_seed: int = Field(
        0, description="Seed of the order, and of the test rows taken from a single file."
    )


class LocalItems(BaseEnv):
    """Reads the rows at `setup` and hands them out; the position is kept in checkpoints.

    Attributes:
        columns: what each row must have; other columns are left out.
        iter: training rows handed out so far.
        train: training rows, shuffled.
        test: test rows, shuffled.
    """

    columns: ClassVar[Sequence[str]] = ()
    config: LocalItemsConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.train: list[dict[str, Any]] = []
        self.test: list[dict[str, Any]] = []

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        """Find out whether the data set is there; one of the hub is left to `setup`."""
        if isinstance(config, LocalItemsConfig) and config.dataset_path:
            require_data(Path(config.dataset_path), cls.columns)

    async def setup(self) -> None:
        """Read the rows; a `ConfigError` names the files or columns that are missing."""
        path, seed = Path(self.config.dataset_path), self.config.dataset_seed
        self.train, self.test = await asyncio.to_thread(
            read_splits, path, self.columns, shuffle_seed=seed
        )
        logger.info("%d training and %d test rows", len(self.train), len(self.test))

    async def get_next_item(self) -> dict[str, Any]:
        """Return the next training row."""
        row = self.train[self.iter % len(self.train)]
        self.iter += 1
        return row

    def eval_items(self) -> Sequence[dict[str, Any]]:
        """Return the test rows."""
        return self.test

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Keep the position."""
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

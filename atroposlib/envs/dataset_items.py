"""`DatasetItems`: the rows of local files, or of a data set of the hub, as items.

    hub data set ─┐
    dataset_path ─┴► rows ─► train rows ─► get_next_item, repeated after the last row
                          └► test rows  ─► eval_items

List it before the other base class: `class MyEnv(DatasetItems, SingleTurnEnv)`. The settings are
`LocalItemsConfig` for files only, `HubItemsConfig` for both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_splits, require_data
from atroposlib.utils.model_paths import use_cache_without_hub

__all__ = ["DatasetItems", "HubItemsConfig", "LocalItemsConfig", "hub_dataset", "hub_rows"]

logger = logging.getLogger(__name__)


def hub_rows(
    path: str, *, split: str, subset: str | None = None, shuffle_seed: int | None = None
) -> list[dict[str, Any]]:
    """Download a split and return its rows.

    Args:
        path: name of the data set, `owner/name`.
        split: `train`, `test`, ...
        subset: name of its configuration, if it has several.
        shuffle_seed: seed of the order; None keeps that of the data set.

    Raises:
        ConfigError: the data set cannot be loaded.
    """
    rows = hub_dataset(path, split=split, subset=subset)
    if shuffle_seed is not None:
        rows = rows.shuffle(seed=shuffle_seed)
    return [dict(row) for row in rows]


def hub_dataset(
    path: str,
    *,
    split: str,
    subset: str | None = None,
    is_streamed: bool = False,
    remedy: str = "--env.dataset_path takes local files instead",
) -> Any:
    """Return a split whose rows are decoded on access; errors as for `hub_rows`.

    Args:
        path: name of the data set, `owner/name`.
        split: `train`, `test`, ...
        subset: name of its configuration, if it has several.
        is_streamed: Whether to return an `IterableDataset`, whose rows are downloaded as they are
            read.
        remedy: end of the error message.
    """
    use_cache_without_hub(path)
    import datasets

    try:
        if is_streamed:
            return datasets.load_dataset(path, subset, split=split, streaming=True)
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be loaded from the hub ({error}); {remedy}") from error


Row = dict[str, Any]


class HubSource(TypedDict):
    """Arguments of `hub_rows` for one split."""

    path: str
    subset: str | None
    split: str


class LocalItemsConfig(BaseEnvConfig):
    """Source of the rows: local files."""

    dataset_path: str = Field(
        "data.jsonl",
        description="JSONL, JSON, CSV or Parquet file, or folder with a train and a test file.",
    )
    dataset_seed: int = Field(
        0, description="Seed of the order, and of the choice of test rows from a single file."
    )


class HubItemsConfig(LocalItemsConfig):
    """Source of the rows: local files, or a data set of the hub."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="JSONL, JSON, CSV or Parquet file, or folder with a train and a test file; "
        "None loads the data set of the hub.",
    )
    dataset_name: str | None = Field(
        None,
        description="Data set of the hub with the environment's columns; None uses the "
        "environment's own.",
    )
    dataset_subset: str | None = Field(
        None, description="Configuration of that data set, if it has several."
    )
    dataset_split: str = Field(
        "train", description="Split of that data set; a part is reserved for evaluations."
    )
    dataset_seed: int = Field(
        42, description="Seed of the order, and of the choice of test rows from a single file."
    )


class DatasetItems(BaseEnv):
    """Reads the rows in `setup` and returns them in order; checkpoints store the position.

    Attributes:
        columns: required columns; other columns are dropped.
        optional_columns: optional columns; None replaces a missing value.
        hub_dataset: name on the hub, unless the settings have another name or a path.
        hub_subset: name of its configuration.
        hub_test_split: split of `hub_dataset` for evaluations; None reserves a part of the other.
        test_fraction: fraction of a single split or file that is reserved for evaluations.
        num_test_rows: number of rows of a hub split instead of a fraction.
        iter: number of training rows returned.
        train: training rows, shuffled.
        test: test rows, shuffled.
    """

    columns: ClassVar[Sequence[str]] = ()
    optional_columns: ClassVar[Sequence[str]] = ()
    hub_dataset: ClassVar[str]
    hub_subset: ClassVar[str | None] = None
    hub_test_split: ClassVar[str | None] = None
    test_fraction: ClassVar[float] = 0.02
    num_test_rows: ClassVar[int | None] = None
    config: Any  # a LocalItemsConfig, or a HubItemsConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.train: list[dict[str, Any]] = []
        self.test: list[dict[str, Any]] = []

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        """Check that local files exist and have the columns."""
        if isinstance(config, LocalItemsConfig) and config.dataset_path:
            require_data(Path(config.dataset_path), cls.columns)

    async def setup(self) -> None:
        """Read the rows; raises `ConfigError` if files or columns are missing."""
        self.train, self.test = await asyncio.to_thread(self._read)
        logger.info("%d training and %d test rows", len(self.train), len(self.test))

    async def get_next_item(self) -> dict[str, Any]:
        row = self.train[self.iter % len(self.train)]
        self.iter += 1
        return row

    def eval_items(self) -> Sequence[dict[str, Any]]:
        return self.test

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def _read(self) -> tuple[Any, Any]:
        if not self.columns and not self.optional_columns:
            raise ConfigError(
                f"{type(self).__name__} names no columns, and items have no others: write "
                'columns = ("question", "answer") in the class, with the names of your data'
            )
        if self.config.dataset_path is None:
            return self._read_hub()
        return read_splits(
            Path(self.config.dataset_path),
            self.columns,
            shuffle_seed=self.config.dataset_seed,
            test_fraction=self.test_fraction,
            optional=self.optional_columns,
        )

    def _read_hub(self) -> tuple[Any, Any]:
        source = self._hub_source()
        rows = self._rows_of(source)
        if self.hub_test_split and not self.config.dataset_name:
            return rows, self._rows_of({**source, "split": self.hub_test_split})
        num_test = self.num_test_rows or max(1, round(self.test_fraction * len(rows)))
        return rows[num_test:] or rows, rows[:num_test]

    def _hub_source(self) -> HubSource:
        name, subset = self.config.dataset_name, self.config.dataset_subset
        return {
            "path": name or self.hub_dataset,
            "subset": subset or (None if name else self.hub_subset),
            "split": self.config.dataset_split,
        }

    def _rows_of(self, source: HubSource) -> list[Row]:
        loaded = hub_rows(**source, shuffle_seed=self.config.dataset_seed)
        missing = sorted(set(self.columns) - set(loaded[0] if loaded else ()))
        if missing:
            raise ConfigError(f"{source['path']} on the hub has no {', '.join(missing)}")
        names = (*self.columns, *self.optional_columns)
        return [{name: row.get(name) for name in names} for row in loaded]

"""`HubItems`: items that are rows of a data set of the hub, or of local files in its columns.

    hub data set ─┐
    dataset_path ─┴► rows ─► train rows ─► get_next_item      test rows ─► eval_items

To be named before the kind of environment: `class MyEnv(HubItems, SingleTurnEnv)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.local_items import LocalItems, LocalItemsConfig
from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_splits
from environments.shared.hub import hub_rows

__all__ = ["HubItems", "HubItemsConfig"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class HubItemsConfig(LocalItemsConfig):
    """Where the rows come from."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="JSONL, JSON or Parquet file, or folder with a train and a test file; "
        "None loads the data set of the hub.",
    )
    dataset_seed: int = Field(
        42, description="Seed of the order, and of the test rows taken from a single file."
    )


class HubItems(LocalItems):
    """Reads the rows at `setup` and hands them out; the position is kept in checkpoints.

    Attributes:
        hub_dataset: name on the hub, its training split is read.
        hub_subset: name of its configuration.
        test_fraction: part of a single split or file that is kept for evaluations.
        optional_columns: columns a row may lack; None stands in for them.
    """

    hub_dataset: ClassVar[str]
    hub_subset: ClassVar[str | None] = None
    test_fraction: ClassVar[float] = 0.02
    optional_columns: ClassVar[Sequence[str]] = ()
    config: HubItemsConfig

    async def setup(self) -> None:
        """Read the rows; a `ConfigError` names what is missing."""
        self.train, self.test = await asyncio.to_thread(self._read)
        logger.info("%d training and %d test rows", len(self.train), len(self.test))

    def _read(self) -> tuple[list[Row], list[Row]]:
        seed, path = self.config.dataset_seed, self.config.dataset_path
        if path is not None:
            return read_splits(
                Path(path),
                self.columns,
                shuffle_seed=seed,
                test_fraction=self.test_fraction,
                optional=self.optional_columns,
            )
        loaded = hub_rows(
            self.hub_dataset, split="train", subset=self.hub_subset, shuffle_seed=seed
        )
        missing = sorted(set(self.columns) - set(loaded[0] if loaded else ()))
        if missing:
            raise ConfigError(f"{self.hub_dataset} on the hub has no {', '.join(missing)}")
        names = (*self.columns, *self.optional_columns)
        rows = [{name: row.get(name) for name in names} for row in loaded]
        num_test = max(1, round(self.test_fraction * len(rows)))
        return rows[num_test:] or rows, rows[:num_test]

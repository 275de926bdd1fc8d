"""`RolloutColumns`: what the table of rollouts tells of an item, beside text and score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnv, Item, ScoredDataGroup

__all__ = ["RolloutColumns"]


class RolloutColumns(BaseEnv):
    """Adds columns to `train/rollouts`; to be named before the kind of environment.

    Attributes:
        rollout_columns: their names.
    """

    rollout_columns: ClassVar[Sequence[str]]

    @abstractmethod
    def rollout_cells(self, item: Item) -> Sequence[Any]:
        """Return the values of the columns, the same for every completion of an item."""

    async def add_rollouts_for_wandb(
        self, scored_data: ScoredDataGroup, item: Item | None = None
    ) -> None:
        """Keep the first trajectories of a group, with the columns of their item."""
        await super().add_rollouts_for_wandb(scored_data, item)
        if self.rollouts_for_wandb and item is not None:
            cells = tuple(self.rollout_cells(item))
            self.rollouts_for_wandb[-1] = [(*row, *cells) for row in self.rollouts_for_wandb[-1]]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as table `train/rollouts`."""
        names = ["text", "score", *self.rollout_columns]
        rows = [row for group in self.rollouts_for_wandb for row in group]
        complete = [(*row, *[None] * (len(names) - len(row))) for row in rows]
        if complete:
            wandb_metrics["train/rollouts"] = self.run_log.table(names, complete)
        return wandb_metrics

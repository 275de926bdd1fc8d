"""The row of an environment in the table of environments; the constant `CARD` of its module."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EnvironmentCard"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentCard:
    """One row of a table in `environments/README.md`.

    The table is generated without importing the module, so every field must be a string literal, as
    in `CARD = EnvironmentCard(task="sums of large numbers", turns="up to 6", ...)`.
    """

    task: str
    """The task, in a few words."""
    turns: str
    """Number of turns, such as `1` or `up to 10`."""
    reward: str
    """Reward of a completion, or of a turn."""
    data: str
    """Source of the items."""
    command: str
    """Arguments of the smallest run, such as `process --env.total_steps 4`."""
    needs: str = "core install"
    """Requirements beyond the core, such as `pip install '.[examples]'`."""

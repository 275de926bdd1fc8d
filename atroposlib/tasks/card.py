"""The row of an environment in the table of environments; each module has one as `CARD`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EnvironmentCard"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentCard:
    """One row of the table in `environments/README.md`.

    The table is made without importing the module, so each field is written as a plain string, as
    in `CARD = EnvironmentCard(task="sums of large numbers", turns="up to 6", ...)`.
    """

    task: str
    """The task, in a few words."""
    turns: str
    """How many: `1`, `up to 10`."""
    reward: str
    """The reward of a completion, or of a turn."""
    data: str
    """Where the items come from."""
    command: str
    """The smallest run, what follows `python FILE`: `process --env.total_steps 4`."""
    needs: str = "core install"
    """Requirements beyond the core, such as `pip install '.[examples]'`."""

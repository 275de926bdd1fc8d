"""Games of gymnasium by names that its newer releases have removed."""

from __future__ import annotations

import copy
import logging
import sys

__all__ = ["keep_removed_games"]

logger = logging.getLogger(__name__)

SUCCESSORS = {"Taxi-v3": "Taxi-v4"}
"""Removed names, and the names of games with the same rules, states and actions."""


def keep_removed_games() -> None:
    """Let `gymnasium.make` know removed names again, where gymnasium is imported.

    Environment files make their games by these names. One that the installed gymnasium knows, or
    whose successor it does not know, stays as it is.
    """
    gymnasium = sys.modules.get("gymnasium")
    registry = getattr(gymnasium, "registry", None)  # None while it is being imported, too
    if registry is None:
        return
    for removed, successor in SUCCESSORS.items():
        if removed in registry or successor not in registry:
            continue
        game = copy.deepcopy(registry[successor])
        game.id, game.version = removed, int(removed.rpartition("-v")[2])
        registry[removed] = game
        logger.info("this gymnasium has no %s; %s takes its place", removed, successor)

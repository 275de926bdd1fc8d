"""Gymnasium environments under names that newer releases removed."""

from __future__ import annotations

import copy
import logging
import sys

__all__ = ["keep_removed_games"]

logger = logging.getLogger(__name__)

SUCCESSORS = {"Taxi-v3": "Taxi-v4"}
"""Removed names, and the names of environments with the same rules, states and actions."""


def keep_removed_games() -> None:
    """Register removed names again if gymnasium is imported.

    Names that the installed gymnasium knows, or whose successor it does not know, are unchanged.
    """
    gymnasium = sys.modules.get("gymnasium")
    registry = getattr(gymnasium, "registry", None)  # None also during its import
    if registry is None:
        return
    for removed, successor in SUCCESSORS.items():
        if removed in registry or successor not in registry:
            continue
        game = copy.deepcopy(registry[successor])
        game.id, game.version = removed, int(removed.rpartition("-v")[2])
        registry[removed] = game
        logger.info("this gymnasium has no %s; using %s instead", removed, successor)

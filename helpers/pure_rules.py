"""Modules that only compute: without network, disk, clock, environment variables or randomness."""

from __future__ import annotations

__all__ = ["PURE_RULES"]

PURE_RULES = (
    "atroposlib.api.concurrency",
    "atroposlib.api.environments",
    "atroposlib.api.queue",
    "atroposlib.envs.settings",
    "atroposlib.envs.server_handling.turn_recording",
    "atroposlib.envs.server_handling.tool_calls",
    "atroposlib.envs.server_handling.tool_formats",
    "atroposlib.envs.server_handling.tagged_tool_formats",
    "atroposlib.wire",
    "atroposlib.wire.groups",
    "atroposlib.wire.binary_format",
    "atroposlib.wire.json_format",
    "example_trainer.batch",
    "example_trainer.prefix_tree",
    "example_trainer.rows",
    "example_trainer.loss_choice",
    "example_trainer.loss",
    "example_trainer.weights.format",
)
"""Their imports are checked by `tests/contract/test_architecture.py`, their branches counted by
`helpers/coverage_figures.py`."""

"""What groups tell of how they were sampled: their age, and how many were cut; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from example_trainer.row_fields import is_cut_by_engine

__all__ = ["group_metrics"]


def group_metrics(
    groups: Sequence[Mapping[str, Any]], *, step: int, seq_len: int
) -> dict[str, float]:
    """Return staleness and truncation of a batch, as means over trajectories.

    `train/staleness_mean` and `train/staleness_max` are optimiser steps between the weights that
    sampled a group and those that are trained; left out where no group tells its
    `policy_version`, or only one that this trainer has not reached.
    `train/staleness_unknown_fraction` is the share of those trajectories.
    `train/truncation_rate` is the share that the engine's limit or `seq_len` cut.

    Args:
        groups: [N] as the service delivers them.
        step: Optimiser steps done.
        seq_len: Tokens of a trajectory that are trained.
    """
    sizes = [len(group["tokens"]) for group in groups]
    versions = [group.get("policy_version") for group in groups]
    ages = [
        (step - version, size)
        for version, size in zip(versions, sizes, strict=True)
        if version is not None and version <= step
    ]
    known = sum(size for _, size in ages)
    total = max(1, sum(sizes))
    num_cut = sum(
        len(tokens) > seq_len or is_cut_by_engine(group, i)
        for group in groups
        for i, tokens in enumerate(group["tokens"])
    )
    metrics = {
        "train/staleness_unknown_fraction": 1.0 - known / total,
        "train/truncation_rate": num_cut / total,
    }
    if known:
        metrics["train/staleness_mean"] = sum(age * size for age, size in ages) / known
        metrics["train/staleness_max"] = float(max(age for age, _ in ages))
    return metrics

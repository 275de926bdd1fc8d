"""Batches of the contenders: prompts, completions and scores with the lengths of a workload."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.scored_data import IGNORE_INDEX

__all__ = ["CPU_WORKLOADS", "Trajectory", "Workload", "groups_of", "sequences", "with_vocabulary"]

_FIRST_WORD = 3  # 0 pads, 1 ends


class Trajectory(NamedTuple):
    """One scored trajectory of a batch."""

    prompt: list[int]
    completion: list[int]
    score: float


class Workload(NamedTuple):
    """Sizes of a batch."""

    name: str
    num_groups: int
    prompt_tokens: int
    median_tokens: int
    """Median length of a completion."""
    spread: float
    """Standard deviation of the logarithm of a completion's length."""
    most_tokens: int
    """Maximum length of a completion."""
    group_size: int = 8
    least_tokens: int = 1
    """Minimum length of a completion."""
    pass_tokens: int | None = None
    """Maximum tokens of a forward pass of our trainer; None: `pass_sequences`."""
    pass_sequences: int = 8
    """Sequences of a forward pass, for TRL and for padded rows."""
    vocabulary: int = 4096
    steps: int = 3
    """Timed steps; one more step warms up."""
    seed: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.num_groups * self.group_size

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and completions, without padding."""
        return sum(len(s.prompt) + len(s.completion) for s in sequences(self))

    def describe(self) -> str:
        """Return a description of the batch."""
        lengths = [len(s.completion) for s in sequences(self)]
        return (
            f"{self.name}: {self.num_groups} groups of {self.group_size}, prompts of "
            f"{self.prompt_tokens} tokens, completions of {statistics.median(lengths):.0f} "
            f"(median), {statistics.fmean(lengths):.0f} (mean), {max(lengths)} (maximum)"
        )


CPU_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("plain", 4, prompt_tokens=24, median_tokens=72, spread=0.2, most_tokens=128),
        Workload(
            "heavy-tailed", 4, prompt_tokens=24, median_tokens=48, spread=1.0, most_tokens=512
        ),
        Workload(
            "shared prefix", 1, prompt_tokens=384, median_tokens=128, spread=0.2, most_tokens=192
        ),
    )
}
"""Workloads that a CPU trains on in seconds."""


def with_vocabulary(workload: Workload, vocabulary: int) -> Workload:
    """Return the workload with ids of a model's vocabulary."""
    return workload._replace(vocabulary=vocabulary)


def sequences(workload: Workload) -> list[Trajectory]:
    """Return every sequence, in the order of groups."""
    rng = random.Random(workload.seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(_FIRST_WORD, workload.vocabulary) for _ in range(count)]

    found = []
    for _ in range(workload.num_groups):
        prompt = words(workload.prompt_tokens)
        for member in range(workload.group_size):
            length = rng.lognormvariate(0, workload.spread) * workload.median_tokens
            length = min(workload.most_tokens, max(workload.least_tokens, round(length)))
            found.append(Trajectory(prompt, words(length), float(member % 2 or rng.random() < 0.3)))
    return found


def groups_of(workload: Workload) -> list[dict[str, Any]]:
    """Return the batch as delivered by the service."""
    flat, size = sequences(workload), workload.group_size
    return [_group(flat[start : start + size]) for start in range(0, len(flat), size)]


def _group(members: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "tokens": [s.prompt + s.completion for s in members],
        "masks": [[IGNORE_INDEX] * len(s.prompt) + s.completion for s in members],
        "scores": [s.score for s in members],
    }

"""Versions of the weights that sampled tokens: what engines report, and runs in groups; pure.

    engine: "weight_versions": [{"version": "7", "num_tokens": 57}, ...]   of one completion
    group:  "token_versions":  [[null, 12], [7, 57], [8, 20]]              of one trajectory

A run is a policy version and the number of successive tokens that were sampled with it. The
version is None where no model sampled, such as in a prompt, or where it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from atroposlib.errors import InferenceError

__all__ = ["VersionRun", "WeightSpan", "cut_runs", "join_runs", "read_spans", "select_runs"]

VersionRun = tuple[int | None, int]
"""Version, number of tokens."""


class WeightSpan(NamedTuple):
    """Successive tokens of a completion that were sampled with the same weights."""

    version: str | None
    """The engine's name of the weights; None if it does not report one."""
    num_tokens: int


def read_spans(given: Any, num_tokens: int, *, completion_index: int) -> list[WeightSpan]:
    """Read the `weight_versions` of a completion of `num_tokens`; nothing is one unknown span.

    Raises:
        InferenceError: they do not cover the tokens of the completion.
    """
    if not given:
        return [WeightSpan(None, num_tokens)]
    try:
        pairs = [(span["version"], int(span["num_tokens"])) for span in given]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InferenceError(
            f"completion {completion_index}: expected weight_versions of the form "
            f'[{{"version": "12", "num_tokens": 57}}], the engine sent {given!r:.80}'
        ) from error
    spans = [WeightSpan(None if name is None else str(name), size) for name, size in pairs]
    total = sum(span.num_tokens for span in spans)
    if total != num_tokens or any(span.num_tokens < 0 for span in spans):
        raise InferenceError(
            f"completion {completion_index} has {num_tokens} ids, the spans of its "
            f"weight_versions {total}"
        )
    return spans


def join_runs(runs: Iterable[Sequence[int | None]]) -> list[VersionRun]:
    """Return the same versions in the fewest runs."""
    joined: list[VersionRun] = []
    for version, length in runs:
        if not length:
            continue
        if joined and joined[-1][0] == version:
            length += joined.pop()[1]
        joined.append((version, length))
    return joined


def cut_runs(runs: Iterable[Sequence[int | None]], num_tokens: int) -> list[VersionRun]:
    """Return the runs of the first tokens."""
    cut: list[VersionRun] = []
    for version, length in runs:
        taken = min(length or 0, num_tokens)
        num_tokens -= taken
        cut.append((version, taken))
    return join_runs(cut)


def select_runs(runs: Iterable[Sequence[int | None]], positions: Iterable[int]) -> list[VersionRun]:
    """Return the runs of the tokens at `positions`, each in the range that `runs` cover."""
    versions = [version for version, length in runs for _ in range(length or 0)]
    return join_runs((versions[position], 1) for position in positions)

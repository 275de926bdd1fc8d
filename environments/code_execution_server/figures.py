"""What is logged of many programs: how many pass, how long they are; pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from environments.code_execution_server.verdicts import pass_at_k

__all__ = ["Answer", "eval_figures", "train_figures"]

DIFFICULTIES = ("easy", "medium", "hard")


class Answer(NamedTuple):
    """One completion."""

    passes: bool
    is_cut: bool
    length: int
    """Its tokens."""


def train_figures(groups: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Return the metrics `train_rewards/*`; none without groups.

    Args:
        groups: [N][G].
    """
    if not any(groups):
        return {}
    answers = [answer for group in groups for answer in group]
    figures = {
        "rewards": statistics.fmean(1.0 if answer.passes else -1.0 for answer in answers),
        "pass@group_size": statistics.fmean(any(a.passes for a in group) for group in groups),
        **_shares_and_lengths(answers),
    }
    return {f"train_rewards/{name}": value for name, value in figures.items()}


def eval_figures(
    groups: Sequence[Sequence[Answer]], difficulties: Sequence[str], *, group_size: int
) -> dict[str, float]:
    """Return the metrics `eval/*`; none without groups.

    Args:
        groups: [N] samples of each problem.
        difficulties: [N] `easy`, `medium`, `hard` or anything else.
        group_size: k of the second pass@k.
    """
    if not any(groups):
        return {}
    figures = {"pass_1": statistics.fmean(_pass_at(group, 1) for group in groups)}
    for difficulty in DIFFICULTIES:
        rates = [
            _pass_at(group, 1)
            for group, other in zip(groups, difficulties, strict=True)
            if other.lower() == difficulty
        ]
        if rates:
            figures[f"{difficulty}_pass_1"] = statistics.fmean(rates)
    figures["pass@group_size"] = statistics.fmean(_pass_at(group, group_size) for group in groups)
    figures |= _shares_and_lengths([answer for group in groups for answer in group])
    return {f"eval/{name}": value for name, value in figures.items()}


def _pass_at(group: Sequence[Answer], k: int) -> float:
    return pass_at_k(len(group), sum(answer.passes for answer in group), min(k, len(group)))


def _shares_and_lengths(answers: Sequence[Answer]) -> dict[str, float]:
    lengths = {
        "completion_length": [answer.length for answer in answers],
        "correct_completion_length": [answer.length for answer in answers if answer.passes],
        "incorrect_completion_length": [answer.length for answer in answers if not answer.passes],
    }
    figures = {name: statistics.fmean(values) for name, values in lengths.items() if values}
    return {"overlong_ratio": statistics.fmean(answer.is_cut for answer in answers), **figures}

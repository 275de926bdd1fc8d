"""Rewards that are made of named parts: weighed, summed, and kept for the records; pure.

A reward of `{"answer": 1.0, "format": 0.5}` under the weights `{"format": 0.2}` is 1.1 in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from atroposlib.envs.admission import as_number
from atroposlib.errors import ConfigError
from atroposlib.utils.text import near_name

__all__ = [
    "PartSums",
    "Reward",
    "RewardWeights",
    "WeighedReward",
    "check_weight_names",
    "complete_parts",
    "part_means",
    "weigh",
]

Reward: TypeAlias = float | Mapping[str, float]
"""What an author's method returns: a number, or numbers by the name of a part."""

RewardWeights: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class WeighedReward(NamedTuple):
    """One reward, summed."""

    total: float
    parts: dict[str, float]
    """By name, before they were weighed; empty where the reward was a number."""


def weigh(reward: Any, weights: Mapping[str, float], said: str) -> WeighedReward:
    """Sum a reward by the weights of its parts; a part without a weight counts as it is.

    Args:
        reward: what an author's method gave, a number or numbers by name.
        weights: by name of a part; a reward that is a number has no parts and is not weighed.
        said: how an error begins, as `MyEnv.score returned`.

    Raises:
        TypeError: the reward, or one of its parts, is not a number.
    """
    if not isinstance(reward, Mapping):
        return WeighedReward(as_number(reward, said), {})
    if not reward:
        raise TypeError(f"{said} an empty mapping; expected a number, or numbers by name")
    parts: dict[str, float] = {}
    for name, value in reward.items():
        if not isinstance(name, str):
            raise TypeError(f"{said} a part named {name!r}; expected a string as its name")
        parts[name] = as_number(value, f"{said} as the part {name!r}")
    return WeighedReward(sum(weights.get(n, 1.0) * value for n, value in parts.items()), parts)


def check_weight_names(
    weights: Mapping[str, float], parts: Iterable[Mapping[str, float]], method: str
) -> None:
    """Refuse a weight whose part is in none of the rewards of a group.

    Args:
        weights: the setting `reward_weights`.
        parts: of every reward of the group.
        method: what gave the rewards, as `MyEnv.score`.

    Raises:
        ConfigError: names the weight and the parts there are.
    """
    known = sorted({name for row in parts for name in row}) if weights else []
    for name in sorted(weights):
        if name not in known:
            found = f"gave the parts {', '.join(known)}" if known else "gave numbers without parts"
            remedy = "correct the name, or give the part as 0.0 where nothing was earned"
            raise ConfigError(
                f"reward_weights names {name!r}, but {method} {found}"
                f"{near_name(name, known) or f'; {remedy}'}"
            )


def complete_parts(parts: Sequence[Mapping[str, float]]) -> list[dict[str, float]] | None:
    """Return [G] parts with the same names everywhere, 0.0 where one was left out.

    None when no reward had parts.
    """
    names = list(dict.fromkeys(name for row in parts for name in row))
    return [{name: row.get(name, 0.0) for name in names} for row in parts] if names else None


def part_means(parts: Sequence[Mapping[str, float]], area: str) -> dict[str, float]:
    """Return `<area>/reward/<part>`, the mean of each part over all rewards; empty without parts.

    Args:
        parts: of each reward; a part that one of them lacks counts as 0.0 there.
        area: `train` or `eval`.
    """
    sums = PartSums()
    sums.add(complete_parts(parts) or ())
    return sums.means(area)


class PartSums:
    """Running means of the parts of rewards."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, parts: Any) -> None:
        """Add the parts of a group; what is not a finite number by name is left out."""
        for row in parts if isinstance(parts, list | tuple) else ():
            for name, value in row.items() if isinstance(row, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = total + value, count + 1

    def means(self, area: str) -> dict[str, float]:
        """Return `<area>/reward/<part>` by name."""
        return {f"{area}/reward/{name}": total / n for name, (total, n) in self._sums.items()}
